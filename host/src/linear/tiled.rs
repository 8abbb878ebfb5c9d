//! Products of many rows: by which instructions, how they are divided, and their launch.

use cuda_std::Kernel;
use gpu::SHARED_LIMIT_LARGE;
use gpu::args::linear::StreamArgs;
pub use gpu::kernels::tiled::THREADS;
use gpu::kernels::{tiled as warps, tiled_wgmma as warpgroups};

use super::pool::Kind;
use super::{Plan, ScaleType};
use crate::device::{Device, Dims};

/// The kernels with `wgmma`.
const WARPGROUP_PTX: &str = "sm_90";

/// Whose tensor-core products multiply many rows. `linear` takes [`Self::Warps`]: a row's bits then do not depend on
/// how many there are, so a large tree keeps the tokens of plain decoding.
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

    pub(super) fn entry(self, kind: Kind) -> Option<&'static Kernel<StreamArgs>> {
        match (kind, self) {
            (Kind::F32, _) => None,
            (Kind::Bf16, Self::Warps) => Some(&warps::GEMM_BF16_TILED),
            (Kind::Bf16, Self::Warpgroups) => Some(&warpgroups::GEMM_BF16_WGMMA),
            (Kind::W4a16(ScaleType::Bf16), Self::Warps) => Some(&warps::GEMM_W4A16_TILED),
            (Kind::W4a16(ScaleType::Bf16), Self::Warpgroups) => Some(&warpgroups::GEMM_W4A16_WGMMA),
            (Kind::W4a16(ScaleType::F32), Self::Warps) => Some(&warps::GEMM_W4A16_S32_TILED),
            (Kind::W4a16(ScaleType::F32), Self::Warpgroups) => Some(&warpgroups::GEMM_W4A16_S32_WGMMA),
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
pub(super) fn dims(plan: &Plan) -> Dims {
    Dims { grid: [plan.units as u32, 1, 1], block: [plan.block, 1, 1], shared: plan.shared }
}
