//! Matrices of one shape and format on the device, in the layout that their kernel reads.

use cuda_std::{Element, Global, GlobalMut, Kernel, bf16};
use gpu::args::linear::{Bf16Weights, F32Weights, RepackArgs, W4a16Weights};
use gpu::kernels::gemm::{CHUNK_K, TILE_N};
use gpu::kernels::gemm_w4a16::{CHUNK_SCALES, CHUNK_WORDS};
use gpu::kernels::repack_w4a16::{self as kernel, REPACK_W4A16, REPACK_W4A16_S32};

use super::{HostData, HostWeight, ScaleType};
use crate::device::{Buffer, Device, Dims, Result};

/// What decides the kernel and the layout. Groups above 32 share the layout of 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    Bf16,
    W4a16(ScaleType),
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::W4a16(ScaleType::Bf16), Self::W4a16(ScaleType::F32)];

    pub fn of(data: &HostData) -> Self {
        match data {
            HostData::F32(_) => Self::F32,
            HostData::Bf16(_) => Self::Bf16,
            HostData::W4a16 { scale_type, .. } => Self::W4a16(*scale_type),
        }
    }

    /// Bytes of a matrix `[n, k]` in its kernel's layout.
    pub fn matrix_bytes(self, n: usize, k: usize) -> usize {
        let chunks = n.div_ceil(TILE_N) * k.div_ceil(CHUNK_K);
        match self {
            Self::F32 => n * k * size_of::<f32>(),
            Self::Bf16 => n * k * size_of::<bf16>(),
            Self::W4a16(scale) => chunks * (CHUNK_WORDS * size_of::<u32>() + CHUNK_SCALES * scale.bytes()),
        }
    }
}

/// Bytes on the device, read as elements of a type whose kernel wants them.
struct Bytes(Buffer<u8>);

impl Bytes {
    fn alloc(device: &Device, bytes: usize) -> Result<Self> {
        Ok(Self(device.alloc(bytes)?))
    }

    fn view<T: Element>(&self) -> Global<T> {
        Global::from_raw(self.0.view().addr(), self.0.len() / size_of::<T>())
    }

    fn view_mut<T: Element>(&self, start: usize, len: usize) -> GlobalMut<T> {
        GlobalMut::from_raw(self.0.view().addr() + (start * size_of::<T>()) as u64, len)
    }
}

/// `count` matrices `[n, k]` of one kind.
pub(super) struct Pool {
    pub kind: Kind,
    pub count: usize,
    n: usize,
    k: usize,
    /// The values, or the codes.
    values: Bytes,
    /// Of W4A16 only.
    scales: Bytes,
}

impl Pool {
    pub fn alloc(device: &Device, kind: Kind, count: usize, n: usize, k: usize) -> Result<Self> {
        let chunks = count * n.div_ceil(TILE_N) * k.div_ceil(CHUNK_K);
        let (values, scales) = match kind {
            Kind::F32 | Kind::Bf16 => (count * kind.matrix_bytes(n, k), 0),
            Kind::W4a16(scale) => (chunks * CHUNK_WORDS * size_of::<u32>(), chunks * CHUNK_SCALES * scale.bytes()),
        };
        let (values, scales) = (Bytes::alloc(device, values)?, Bytes::alloc(device, scales)?);
        Ok(Self { kind, count, n, k, values, scales })
    }

    pub fn bytes(&self) -> usize {
        self.values.0.bytes() + self.scales.0.bytes()
    }

    /// Uploads the matrices of `weight`, which has been checked and is of this kind and shape, from slot `first` on.
    pub fn put(&self, device: &Device, first: usize, weight: &HostWeight) -> Result<()> {
        match &weight.data {
            HostData::F32(bytes) | HostData::Bf16(bytes) => {
                self.values.0.write(first * self.kind.matrix_bytes(self.n, self.k), bytes)
            }
            HostData::W4a16 { packed, scales, scale_type: ScaleType::Bf16, group } => {
                self.repack::<bf16>(device, &REPACK_W4A16, first, weight.batch, packed, scales, *group)
            }
            HostData::W4a16 { packed, scales, scale_type: ScaleType::F32, group } => {
                self.repack::<f32>(device, &REPACK_W4A16_S32, first, weight.batch, packed, scales, *group)
            }
        }
    }

    fn repack<S: Element>(
        &self,
        device: &Device,
        entry: &Kernel<RepackArgs<S>>,
        first: usize,
        matrices: usize,
        packed: &[u8],
        scales: &[u8],
        group: usize,
    ) -> Result<()> {
        let (packed, scales) = (device.upload(packed)?, Bytes(device.upload(scales)?));
        let of_matrix = self.n.div_ceil(TILE_N) * self.k.div_ceil(CHUNK_K);
        let (start, chunks) = (first * of_matrix, matrices * of_matrix);
        let args = RepackArgs {
            packed: packed.view(),
            scales: scales.view(),
            out_codes: self.values.view_mut(start * CHUNK_WORDS, chunks * CHUNK_WORDS),
            out_scales: self.scales.view_mut(start * CHUNK_SCALES, chunks * CHUNK_SCALES),
            matrices: matrices as u32,
            n: self.n as u32,
            k: self.k as u32,
            group: group as u32,
        };
        let grid = [chunks.div_ceil(kernel::CHUNKS as usize) as u32, 1, 1];
        device.launch(entry, Dims { grid, block: [kernel::THREADS, 1, 1], shared: 0 }, args)?;
        // The uploads are freed on return.
        device.synchronize()
    }

    pub fn f32(&self) -> F32Weights {
        F32Weights { rows: self.values.view() }
    }

    pub fn bf16(&self) -> Bf16Weights {
        Bf16Weights { rows: self.values.view() }
    }

    /// `S` is the type that `kind` names.
    pub fn w4a16<S: Element>(&self) -> W4a16Weights<S> {
        W4a16Weights { codes: self.values.view(), scales: self.scales.view() }
    }
}
