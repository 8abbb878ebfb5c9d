//! Products of many rows: by which instructions, how they are divided, and their launch.

use cuda_std::{GlobalMut, Kernel};
use gpu::SHARED_LIMIT_LARGE;
use gpu::args::linear::{PanelProductArgs, StreamArgs, StreamShape};
pub use gpu::kernels::tiled::THREADS;
use gpu::kernels::{tiled as warps, tiled_wgmma as warpgroups};

use super::panels::{self, Panels, x_panels};
use super::pool::Kind;
use super::{Format, Plan, Product, ScaleType, Weight};
use crate::device::{Device, Dims, Result};
use crate::kernels::contract;

/// The kernels with `wgmma`.
const WARPGROUP_PTX: &str = "sm_90";

/// What a product of many rows is for.
#[derive(Clone, Copy)]
pub enum Many {
    /// Rows whose bits must be those that few rows have: of a tree, which then keeps the tokens of plain decoding.
    /// They take [`Tiles::Warps`].
    AsFew,
    /// Rows of a prompt: where the device and the weight allow it they take [`Tiles::Warpgroups`], more than twice as
    /// fast. The memory is for x in the order of that kernel, [`super::panel_words`] of it.
    Fast(GlobalMut<u32>),
}

/// Whose tensor-core products multiply many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiles {
    /// Those of warps, which every GPU has; the bits are those of few rows.
    Warps,
    /// Those of warpgroups, which sm_90a has.
    Warpgroups,
}

impl Tiles {
    pub const ALL: [Self; 2] = [Self::Warps, Self::Warpgroups];

    /// Whether a device can; the CPU device can all.
    pub fn runs_on(self, device: &Device) -> bool {
        let info = device.info();
        match self {
            Self::Warps => true,
            Self::Warpgroups => {
                !device.is_cuda() || info.ptx.as_deref() == Some(WARPGROUP_PTX) && info.max_shared >= SHARED_LIMIT_LARGE
            }
        }
    }

    /// Whether a weight can be multiplied so, exactly.
    pub fn takes(self, weight: &Weight) -> bool {
        match (self, weight.pool().kind) {
            (_, Kind::F32) | (Self::Warpgroups, Kind::W4a16(ScaleType::F32)) => false,
            (Self::Warpgroups, Kind::W4a16(ScaleType::Bf16)) => weight.half_factor().is_some(),
            (Self::Warps, _) | (Self::Warpgroups, Kind::Bf16) => true,
        }
    }

    pub(super) fn name(self, kind: Kind) -> Option<&'static str> {
        match self {
            Self::Warps => warps_entry(kind).map(Kernel::name),
            Self::Warpgroups => warpgroups_entry(kind).map(Kernel::name),
        }
    }

    /// A block's tile: weight rows in tiles of 16, and rows of x; its dynamic shared memory in bytes.
    pub(super) fn block(self, kind: Kind, tile_words: usize) -> (usize, usize, u32) {
        let (tiling, depth) = match kind {
            Kind::Bf16 => (warps::BF16, warpgroups::BF16_DEPTH),
            _ => (warps::W4A16, warpgroups::W4A16_DEPTH),
        };
        match self {
            Self::Warps => (tiling.tiles(), tiling.rows(), tiling.shared_bytes(tile_words)),
            Self::Warpgroups => (warpgroups::TILES, warpgroups::ROWS, warpgroups::shared_bytes(depth, tile_words)),
        }
    }

    /// Parts of k that are summed apart.
    pub(super) fn slices(self, k: usize) -> usize {
        match self {
            Self::Warps => gpu::kernels::stream::k_split(k),
            Self::Warpgroups => 1,
        }
    }
}

/// One block a unit.
pub(super) fn dims_of(plan: &Plan) -> Dims {
    Dims { grid: [plan.units as u32, 1, 1], block: [plan.block, 1, 1], shared: plan.shared }
}

pub(super) fn warps_entry(kind: Kind) -> Option<&'static Kernel<StreamArgs>> {
    match kind {
        Kind::F32 => None,
        Kind::Bf16 => Some(&warps::GEMM_BF16_TILED),
        Kind::W4a16(ScaleType::Bf16) => Some(&warps::GEMM_W4A16_TILED),
        Kind::W4a16(ScaleType::F32) => Some(&warps::GEMM_W4A16_S32_TILED),
    }
}

fn warpgroups_entry(kind: Kind) -> Option<&'static Kernel<PanelProductArgs>> {
    match kind {
        Kind::Bf16 => Some(&warpgroups::GEMM_BF16_WGMMA),
        Kind::W4a16(ScaleType::Bf16) => Some(&warpgroups::GEMM_W4A16_WGMMA),
        Kind::F32 | Kind::W4a16(ScaleType::F32) => None,
    }
}

/// What stands before a product by warpgroups.
pub(super) fn panels_name(format: Format) -> &'static str {
    panels::entry(format != Format::Bf16).name()
}

/// Queues a product by warpgroups: x into panels, then the product.
pub(super) fn launch_warpgroups(device: &Device, p: &Product, plan: &Plan, memory: GlobalMut<u32>) -> Result<()> {
    let kind = p.weight.pool().kind;
    let name = plan.kernel;
    let entry = warpgroups_entry(kind).filter(|_| Tiles::Warpgroups.takes(p.weight));
    let Some(entry) = entry else {
        return contract(name, false, || format!("`{}`: not exact in f16", p.weight.name()));
    };
    let of = Panels {
        x: p.x.bf16,
        rows: p.rows,
        k: plan.k,
        batch: plan.batch,
        x_stride: p.x_stride,
        x_batch: p.x_batch,
        half: kind != Kind::Bf16,
        memory,
    };
    let (panels, undo) = x_panels(device, &of)?;
    let factor = p.weight.half_factor().unwrap_or(1.0);
    let args = PanelProductArgs {
        weights: p.weight.pool().words(),
        panels,
        undo,
        y: p.y,
        shape: StreamShape { n: plan.n as u32, k: plan.k as u32, k_split: plan.k_split as u32 },
        rows: p.dense_rows(plan),
        batch: plan.batch as u32,
        row_blocks: plan.row_blocks() as u32,
        factor,
        undo_factor: 1.0 / factor,
    };
    device.launch_overlapping(entry, dims_of(plan), args)
}
