//! Matrices of one shape and format on the device, in the layout that their kernel reads.

use cuda_std::{Element, Global, GlobalMut, Kernel, bf16};
use gpu::args::linear::{F32Weights, RepackArgs, RepackBf16Args};
use gpu::kernels::gemm_w4a16::Scale;
use gpu::kernels::repack_bf16::{self, REPACK_BF16};
use gpu::kernels::repack_w4a16::{self, REPACK_W4A16, REPACK_W4A16_S32};
use gpu::kernels::stream::{CHUNK_K, TILE_N};
use gpu::kernels::{gemm_bf16, gemm_w4a16};

use super::upload::Stored;
use super::{HostData, HostWeight, ScaleType, Upload};
use crate::device::{Buffer, Device, Dims, Result};
use crate::kernels::contract;

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

    /// Words of a tile's chunk where weights are streamed.
    pub fn tile_words(self) -> Option<usize> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(gemm_bf16::TILE_WORDS),
            Self::W4a16(ScaleType::Bf16) => Some(<bf16 as gemm_w4a16::Scale>::TILE_WORDS),
            Self::W4a16(ScaleType::F32) => Some(<f32 as gemm_w4a16::Scale>::TILE_WORDS),
        }
    }

    /// Bytes of a matrix `[n, k]` in its kernel's layout.
    pub fn matrix_bytes(self, n: usize, k: usize) -> usize {
        match self.tile_words() {
            None => n * k * size_of::<f32>(),
            Some(words) => n.div_ceil(TILE_N) * k.div_ceil(CHUNK_K) * words * size_of::<u32>(),
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

/// The same bytes as elements.
fn elements<T: Element>(bytes: Global<u8>) -> Global<T> {
    Global::from_raw(bytes.addr(), bytes.len() / size_of::<T>())
}

/// `count` matrices `[n, k]` of one kind.
pub(super) struct Pool {
    pub kind: Kind,
    pub count: usize,
    n: usize,
    k: usize,
    values: Bytes,
}

impl Pool {
    pub fn alloc(device: &Device, kind: Kind, count: usize, n: usize, k: usize) -> Result<Self> {
        // Kernels number the chunks of all tiles in 32 bits.
        let chunks = n.div_ceil(TILE_N) as u128 * k.div_ceil(CHUNK_K) as u128 * count as u128;
        contract("weight", kind == Kind::F32 || chunks <= u128::from(u32::MAX), || {
            format!("{count} matrices of {n} x {k}: {chunks} chunks, at most {} are possible", u32::MAX)
        })?;
        Ok(Self { kind, count, n, k, values: Bytes::alloc(device, count * kind.matrix_bytes(n, k))? })
    }

    pub fn bytes(&self) -> usize {
        self.values.0.bytes()
    }

    /// Uploads the matrices of `weight`, which has been checked and is of this kind and shape, from slot `first` on.
    pub fn put(&self, upload: &Upload, first: usize, weight: &HostWeight) -> Result<()> {
        if let HostData::F32(bytes) = &weight.data {
            return self.values.0.write(first * self.kind.matrix_bytes(self.n, self.k), bytes);
        }
        self.repack(upload.device(), first, weight.batch, upload.put(&weight.data)?)
    }

    /// Queues the repacking of `matrices` matrices, stored as this kind, into the slots from `first` on.
    pub fn repack(&self, device: &Device, first: usize, matrices: usize, stored: Stored) -> Result<()> {
        match self.kind {
            Kind::F32 => contract("weight", false, || "f32 matrices stay as they are stored".into()),
            Kind::Bf16 => {
                let (out, chunks) = self.place(first, matrices);
                let (matrices, n, k) = (matrices as u32, self.n as u32, self.k as u32);
                let args = RepackBf16Args { rows: elements(stored.values), out, matrices, n, k };
                let grid = [chunks.div_ceil(repack_bf16::CHUNKS as usize) as u32, 1, 1];
                device.launch(&REPACK_BF16, Dims { grid, block: [repack_bf16::THREADS, 1, 1], shared: 0 }, args)
            }
            Kind::W4a16(ScaleType::Bf16) => self.repack_codes(device, &REPACK_W4A16, first, matrices, stored),
            Kind::W4a16(ScaleType::F32) => self.repack_codes(device, &REPACK_W4A16_S32, first, matrices, stored),
        }
    }

    /// Where `matrices` matrices from slot `first` on lie, and how many chunks of tiles they are.
    fn place(&self, first: usize, matrices: usize) -> (GlobalMut<u32>, usize) {
        let words = self.kind.matrix_bytes(self.n, self.k) / size_of::<u32>();
        let chunks = matrices * self.n.div_ceil(TILE_N) * self.k.div_ceil(CHUNK_K);
        (self.values.view_mut(first * words, matrices * words), chunks)
    }

    fn repack_codes<S: Scale>(
        &self,
        device: &Device,
        entry: &Kernel<RepackArgs<S>>,
        first: usize,
        matrices: usize,
        stored: Stored,
    ) -> Result<()> {
        let (out, chunks) = self.place(first, matrices);
        let args = RepackArgs {
            packed: stored.values,
            scales: elements(stored.scales),
            out,
            matrices: matrices as u32,
            n: self.n as u32,
            k: self.k as u32,
            group: stored.group as u32,
        };
        let grid = [chunks.div_ceil(repack_w4a16::CHUNKS as usize) as u32, 1, 1];
        device.launch(entry, Dims { grid, block: [repack_w4a16::THREADS, 1, 1], shared: 0 }, args)
    }

    pub fn f32(&self) -> F32Weights {
        F32Weights { rows: self.values.view() }
    }

    /// The words that are streamed.
    pub fn words(&self) -> Global<u32> {
        self.values.view()
    }
}
