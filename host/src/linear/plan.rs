//! Which kernel a product takes, how k is split and how rows are divided: a pure function of shape and rows, printable.
//!
//! The split of k follows from k alone. Everything else may follow from the number of rows too, because it leaves a
//! row's sums as they are.

use std::fmt;

use cuda_std::Kernel;
use gpu::kernels::gemm_f32::{MAX_WARPS, shared_bytes};
use gpu::kernels::stream::{self, CHUNK_K, TILE_M, TILE_N, Variant, WARPS};
use gpu::kernels::wide::Wide;
use gpu::kernels::{gemm_bf16, gemm_w4a16};

use super::pool::Kind;
use super::tiled::{self, Tiles};
use super::{ExpertWeights, Format, HostWeight, ScaleType, Weight};
use crate::device::{Device, Dims};

/// k from which a second warp joins in an f32 tile's sums, and so on: less would cost more in the barrier than it
/// saves.
const K_PER_WARP: usize = 512;
/// Blocks along x of a grouped f32 product: each takes tiles in turn, so that few tiles start few blocks.
const GROUPED_BLOCKS: usize = 16;
/// Shared memory that a multiprocessor keeps for itself of each block's, bytes.
const RESERVED: u32 = 1024;

/// How one product runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub kernel: &'static str,
    pub format: Format,
    /// Matrices, their rows and columns.
    pub batch: usize,
    pub n: usize,
    pub k: usize,
    /// Rows of x; of a grouped product, pairs.
    pub rows: usize,
    /// Slices of k that are summed apart, by one warp each.
    pub k_split: usize,
    /// Tiles of 16 weight rows that a block owns at a time.
    pub tiles_per_block: usize,
    /// Rows of x that a block multiplies at a time.
    pub rows_per_block: usize,
    /// What blocks take in turn; of a grouped product, at most.
    pub units: usize,
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared: u32,
    /// Bytes of weights that are read at least once.
    pub weight_bytes: usize,
    /// Blocks of a multiprocessor at once.
    pub(super) resident: u32,
    pub(super) rows_variant: RowsVariant,
    /// Matrices that a row is multiplied by: all of a batch, one of the experts, gate and up.
    matrices_of_row: usize,
}

/// Which of a format's dense kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowsVariant {
    M8,
    M8Few,
    M16,
    M16Few,
    M32,
    M64,
    M64Few,
    /// Tall matrices, whose blocks share rows of x.
    Wide8,
    Wide16,
    Wide32,
    Wide64,
    /// More rows than are streamed.
    Tiled(Tiles),
}

/// How a block of a dense kernel divides its work.
enum Tiling {
    Stream(Variant),
    Wide(Wide),
}

/// Tiles of weights from which blocks have enough of them to take all of k.
const TALL_TILES: usize = 768;

/// Tiles of weights up to which each goes to a warp team of its own: with more a team, many of a large GPU's
/// multiprocessors would have none. With many rows a team costs a pass over x, and fewer of them are better.
const FEW_TILES: usize = 264;
const FEW_TILES_MANY_ROWS: usize = 132;

/// Rows up to which weights are streamed, 64 rows at a time. With few tiles a block's share of a tiled product is long,
/// and most multiprocessors have none.
const STREAMED_ROWS: usize = 96;
const STREAMED_ROWS_FEW_TILES: usize = 256;

impl RowsVariant {
    fn of(kind: Kind, n: usize, rows: usize) -> Self {
        let tiles = n.div_ceil(TILE_N);
        let few = tiles <= FEW_TILES;
        if kind != Kind::F32 && rows > if few { STREAMED_ROWS_FEW_TILES } else { STREAMED_ROWS } {
            return Self::Tiled(Tiles::Warps);
        }
        // Beside weights of 16 bits, up to 16 rows of x weigh little. f32 scales have no such kernels.
        let wide = match kind {
            Kind::W4a16(ScaleType::Bf16) => tiles >= TALL_TILES && rows > 1,
            Kind::Bf16 => tiles >= TALL_TILES && rows > 2 * TILE_M,
            _ => false,
        };
        match rows.div_ceil(TILE_M) {
            0 | 1 if wide => Self::Wide8,
            2 if wide => Self::Wide16,
            3 | 4 if wide => Self::Wide32,
            _ if wide => Self::Wide64,
            0 | 1 if few => Self::M8Few,
            0 | 1 => Self::M8,
            2 if few => Self::M16Few,
            2 => Self::M16,
            _ if tiles <= FEW_TILES_MANY_ROWS => Self::M64Few,
            3 | 4 => Self::M32,
            // Sums of 64 rows and two tiles are more than registers hold beside codes: 32 rows twice.
            _ if kind == Kind::W4a16(ScaleType::Bf16) => Self::M32,
            _ => Self::M64,
        }
    }

    fn tiling(self, kind: Kind) -> Tiling {
        Tiling::Stream(match (kind, self) {
            (Kind::Bf16, Self::Wide32) => return Tiling::Wide(gemm_bf16::WIDE32),
            (Kind::Bf16, Self::Wide64) => return Tiling::Wide(gemm_bf16::WIDE64),
            (_, Self::Wide8) => return Tiling::Wide(gemm_w4a16::WIDE8),
            (_, Self::Wide16) => return Tiling::Wide(gemm_w4a16::WIDE16),
            (_, Self::Wide32) => return Tiling::Wide(gemm_w4a16::WIDE32),
            (_, Self::Wide64) => return Tiling::Wide(gemm_w4a16::WIDE64),
            (Kind::Bf16, Self::M8) => gemm_bf16::M8,
            (Kind::Bf16, Self::M8Few) => gemm_bf16::M8_FEW,
            (Kind::Bf16, Self::M16) => gemm_bf16::M16,
            (Kind::Bf16, Self::M16Few) => gemm_bf16::M16_FEW,
            (Kind::Bf16, Self::M32) => gemm_bf16::M32,
            (Kind::Bf16, Self::M64) => gemm_bf16::M64,
            (Kind::Bf16, Self::M64Few) => gemm_bf16::M64_FEW,
            (Kind::W4a16(ScaleType::F32), Self::M8) => gemm_w4a16::M8_S32,
            (Kind::W4a16(ScaleType::F32), Self::M64) => gemm_w4a16::M64_FEW,
            (_, Self::M8) => gemm_w4a16::M8,
            (_, Self::M8Few) => gemm_w4a16::M8_FEW,
            (_, Self::M16) => gemm_w4a16::M16,
            (_, Self::M16Few) => gemm_w4a16::M16_FEW,
            (_, Self::M32) => gemm_w4a16::M32,
            // Chosen for neither, and not streamed: see `tiled`.
            (_, Self::M64 | Self::Tiled(_)) => gemm_w4a16::M32,
            (_, Self::M64Few) => gemm_w4a16::M64_FEW,
        })
    }
}

/// The variant of products gathered by expert.
fn gathered(kind: Kind) -> Variant {
    match kind {
        Kind::Bf16 => gemm_bf16::M8,
        Kind::W4a16(ScaleType::F32) => gemm_w4a16::M8_S32,
        _ => gemm_w4a16::M8,
    }
}

fn dense_kernel(kind: Kind, rows: RowsVariant) -> &'static str {
    use RowsVariant::{M8, M8Few, M16, M16Few, M32, M64, M64Few, Tiled, Wide8, Wide16, Wide32, Wide64};
    match (kind, rows) {
        (_, Tiled(tiles)) => tiles.entry(kind).map_or("gemm_f32", Kernel::name),
        (Kind::F32, _) => "gemm_f32",
        (Kind::Bf16, M8) => "gemm_bf16_m8",
        (Kind::Bf16, M8Few) => "gemm_bf16_m8_few",
        (Kind::Bf16, M16) => "gemm_bf16_m16",
        (Kind::Bf16, M16Few) => "gemm_bf16_m16_few",
        (Kind::Bf16, M32) => "gemm_bf16_m32",
        (Kind::Bf16, M64) => "gemm_bf16_m64",
        (Kind::Bf16, M64Few) => "gemm_bf16_m64_few",
        // Chosen for neither.
        (Kind::Bf16, Wide8) => "gemm_bf16_m8",
        (Kind::W4a16(ScaleType::F32), Wide8 | Wide16 | Wide32 | Wide64) => "gemm_w4a16_s32_m64",
        (Kind::Bf16, Wide16) => "gemm_bf16_m16",
        (Kind::Bf16, Wide32) => "gemm_bf16_wide32",
        (Kind::Bf16, Wide64) => "gemm_bf16_wide64",
        (Kind::W4a16(ScaleType::Bf16), Wide8) => "gemm_w4a16_wide8",
        (Kind::W4a16(ScaleType::Bf16), Wide16) => "gemm_w4a16_wide16",
        (Kind::W4a16(ScaleType::Bf16), Wide32) => "gemm_w4a16_wide32",
        (Kind::W4a16(ScaleType::Bf16), Wide64) => "gemm_w4a16_wide64",
        (Kind::W4a16(ScaleType::Bf16), M8) => "gemm_w4a16_m8",
        (Kind::W4a16(ScaleType::Bf16), M8Few) => "gemm_w4a16_m8_few",
        (Kind::W4a16(ScaleType::Bf16), M16) => "gemm_w4a16_m16",
        (Kind::W4a16(ScaleType::Bf16), M16Few) => "gemm_w4a16_m16_few",
        (Kind::W4a16(ScaleType::Bf16), M32) => "gemm_w4a16_m32",
        (Kind::W4a16(ScaleType::Bf16), M64) => "gemm_w4a16_m32",
        (Kind::W4a16(ScaleType::Bf16), M64Few) => "gemm_w4a16_m64_few",
        (Kind::W4a16(ScaleType::F32), M8) => "gemm_w4a16_s32_m8",
        (Kind::W4a16(ScaleType::F32), M8Few) => "gemm_w4a16_s32_m8_few",
        (Kind::W4a16(ScaleType::F32), M16) => "gemm_w4a16_s32_m16",
        (Kind::W4a16(ScaleType::F32), M16Few) => "gemm_w4a16_s32_m16_few",
        (Kind::W4a16(ScaleType::F32), M32) => "gemm_w4a16_s32_m32",
        (Kind::W4a16(ScaleType::F32), M64) => "gemm_w4a16_s32_m64",
        (Kind::W4a16(ScaleType::F32), M64Few) => "gemm_w4a16_s32_m64_few",
    }
}

fn grouped_kernel_of(kind: Kind) -> &'static str {
    match kind {
        Kind::F32 => "grouped_gemm_f32",
        Kind::Bf16 => "grouped_gemm_bf16",
        Kind::W4a16(ScaleType::Bf16) => "grouped_gemm_w4a16",
        Kind::W4a16(ScaleType::F32) => "grouped_gemm_w4a16_s32",
    }
}

/// The kernel that multiplies gate and up of experts of one kind together; f32 has none.
fn gate_up_kernel_of(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::F32 => None,
        Kind::Bf16 => Some("gate_up_gemm_bf16"),
        Kind::W4a16(ScaleType::Bf16) => Some("gate_up_gemm_w4a16"),
        Kind::W4a16(ScaleType::F32) => Some("gate_up_gemm_w4a16_s32"),
    }
}

/// The kernel that multiplies `rows` rows with such a weight.
pub fn kernel(weight: &HostWeight, rows: usize) -> &'static str {
    let kind = Kind::of(&weight.data);
    dense_kernel(kind, RowsVariant::of(kind, weight.n, rows))
}

/// The kernel that multiplies gathered rows with such an expert.
pub fn grouped_kernel(expert: &HostWeight) -> &'static str {
    grouped_kernel_of(Kind::of(&expert.data))
}

/// The kernel that multiplies gathered rows with gate and up of such an expert together.
pub fn gate_up_kernel(expert: &HostWeight) -> Option<&'static str> {
    gate_up_kernel_of(Kind::of(&expert.data))
}

impl Plan {
    fn dense(weight: &Weight, rows: usize) -> Self {
        let (kind, format, batch) = (weight.pool().kind, weight.format(), weight.batch());
        let (n, k) = (weight.n(), weight.k());
        let rows_variant = RowsVariant::of(kind, n, rows);
        if let RowsVariant::Tiled(tiles) = rows_variant
            && let Some(plan) = Self::tiled(weight, rows, tiles)
        {
            return plan;
        }
        let kernel = dense_kernel(kind, rows_variant);
        let tiles = rows.div_ceil(TILE_M);
        let (plan, most) = match kind.tile_words() {
            None => (Self::of_f32(kernel, format, n, k), 1),
            Some(words) => match rows_variant.tiling(kind) {
                Tiling::Stream(variant) => {
                    let shape = [n, k, stream::k_split(k)];
                    (Self::streamed(kernel, format, shape, variant, variant.nt, words), variant.mt)
                }
                Tiling::Wide(wide) => {
                    let (tiles, shared) = (wide.rows() / TILE_N, wide.shared_bytes(words));
                    let plan = Self::one(kernel, format, n, k, stream::k_split(k), tiles, stream::THREADS, shared);
                    (Self { resident: wide.blocks, ..plan }, wide.mt)
                }
            },
        };
        // Blocks of equal size: 65 rows are 40 and 25, not 64 and 1.
        let blocks = tiles.div_ceil(most);
        let rows_per_block = tiles.checked_div(blocks).map_or(0, |_| tiles.div_ceil(blocks)) * TILE_M;
        let weight_bytes = batch * kind.matrix_bytes(n, k);
        let units = batch * blocks * plan.units;
        Self { batch, rows, rows_per_block, weight_bytes, rows_variant, units, matrices_of_row: batch, ..plan }
    }

    /// Both operands in tiles; f32 weights have no such kernel.
    pub(super) fn tiled(weight: &Weight, rows: usize, tiles: Tiles) -> Option<Self> {
        let (kind, batch, n, k) = (weight.pool().kind, weight.batch(), weight.n(), weight.k());
        let (kernel, words) = (tiles.entry(kind)?.name(), kind.tile_words()?);
        let (own, rows_per_block, shared) = tiles.block(kind, words);
        let plan = Self::one(kernel, weight.format(), n, k, tiles.slices(k), own, tiled::THREADS, shared);
        let weight_bytes = batch * kind.matrix_bytes(n, k);
        let units = batch * rows.div_ceil(rows_per_block) * plan.units;
        let rows_variant = RowsVariant::Tiled(tiles);
        Some(Self { batch, rows, rows_per_block, weight_bytes, rows_variant, units, matrices_of_row: batch, ..plan })
    }

    /// `experts`: how many have this kind. At least one tile for each expert in use, at most as many as pairs.
    pub(super) fn grouped(kind: Kind, format: Format, experts: usize, n: usize, k: usize, pairs: usize) -> Self {
        let kernel = grouped_kernel_of(kind);
        let plan = match kind.tile_words() {
            None => Self::of_f32(kernel, format, n, k),
            Some(words) => {
                let variant = gathered(kind);
                Self::streamed(kernel, format, [n, k, stream::k_split_grouped(n, k)], variant, variant.nt, words)
            }
        };
        let weight_bytes = experts.min(pairs) * kind.matrix_bytes(n, k);
        Self { batch: experts, rows: pairs, rows_per_block: TILE_M, weight_bytes, units: pairs * plan.units, ..plan }
    }

    /// As [`Self::grouped`], of gate and up together; none where a kind has no such kernel.
    pub(super) fn gate_up(
        kind: Kind,
        format: Format,
        experts: usize,
        n: usize,
        k: usize,
        pairs: usize,
    ) -> Option<Self> {
        let (kernel, words) = (gate_up_kernel_of(kind)?, kind.tile_words()?);
        let variant = gathered(kind);
        let plan = Self::streamed(kernel, format, [n, k, stream::k_split_grouped(n, k)], variant, 1, words);
        let weight_bytes = 2 * experts.min(pairs) * kind.matrix_bytes(n, k);
        Some(Self {
            batch: experts,
            rows: pairs,
            rows_per_block: TILE_M,
            weight_bytes,
            units: pairs * plan.units,
            matrices_of_row: 2,
            ..plan
        })
    }

    fn of_f32(kernel: &'static str, format: Format, n: usize, k: usize) -> Self {
        let wanted = (k / K_PER_WARP).clamp(1, MAX_WARPS as usize);
        let k_split = 1 << wanted.ilog2();
        let tiles = n.div_ceil(TILE_N);
        let tiles_per_block = tiles.min(MAX_WARPS as usize / k_split);
        let warps = (tiles_per_block * k_split) as u32;
        let block = warps * cuda_std::warp::WARP;
        Self::one(kernel, format, n, k, k_split, tiles_per_block, block, shared_bytes(k_split as u32, warps))
    }

    /// `own`: tiles of a team that are rows of the result.
    fn streamed(
        kernel: &'static str,
        format: Format,
        [n, k, k_split]: [usize; 3],
        variant: Variant,
        own: usize,
        words: usize,
    ) -> Self {
        let tiles_per_block = WARPS as usize / k_split * own;
        let shared = variant.shared_bytes(words);
        let plan = Self::one(kernel, format, n, k, k_split, tiles_per_block, stream::THREADS, shared);
        Self { resident: variant.blocks, ..plan }
    }

    /// A product with one block of rows.
    #[expect(clippy::too_many_arguments, reason = "the fields that both families fill")]
    fn one(
        kernel: &'static str,
        format: Format,
        n: usize,
        k: usize,
        k_split: usize,
        tiles_per_block: usize,
        block: u32,
        shared: u32,
    ) -> Self {
        let units = n.div_ceil(TILE_N).div_ceil(tiles_per_block);
        Self {
            kernel,
            format,
            batch: 1,
            n,
            k,
            rows: 0,
            k_split,
            tiles_per_block,
            rows_per_block: 0,
            units,
            block,
            shared,
            weight_bytes: 0,
            resident: 1,
            rows_variant: RowsVariant::M8,
            matrices_of_row: 1,
        }
    }

    /// Blocks of rows of a dense product.
    pub(super) fn row_blocks(&self) -> usize {
        self.rows.div_ceil(self.rows_per_block.max(1))
    }

    /// Launch dimensions where blocks take units in turn: as many blocks as the device holds at once.
    pub(super) fn dims(&self, device: &Device) -> Dims {
        let info = device.info();
        let fit = (info.max_shared + RESERVED) / (self.shared + RESERVED);
        let blocks = info.multiprocessors as usize * fit.clamp(1, self.resident) as usize;
        Dims { grid: [self.units.min(blocks) as u32, 1, 1], block: [self.block, 1, 1], shared: self.shared }
    }

    /// Launch dimensions of an f32 product: x = blocks of rows or tiles of pairs, y = tiles, z = matrices.
    pub(super) fn dims_f32(&self, grouped: bool) -> Dims {
        let y = self.n.div_ceil(TILE_N).div_ceil(self.tiles_per_block) as u32;
        let grid = match grouped {
            true => [self.rows.min(GROUPED_BLOCKS) as u32, y, 1],
            false => [self.row_blocks() as u32, y, self.batch as u32],
        };
        Dims { grid, block: [self.block, 1, 1], shared: self.shared }
    }

    /// Multiplications and additions.
    pub fn flops(&self) -> usize {
        2 * self.rows * self.n * self.k * self.matrices_of_row
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { batch, rows, n, k, k_split, tiles_per_block, rows_per_block, units, block, .. } = *self;
        let tile = tiles_per_block * TILE_N;
        use RowsVariant::{Tiled, Wide8, Wide16, Wide32, Wide64};
        // Slices go to different warps, or each warp takes them in turn.
        let in_turn = matches!(self.rows_variant, Tiled(_) | Wide8 | Wide16 | Wide32 | Wide64);
        let (by, of) = if in_turn { ("in", "slices") } else { ("over", "warps") };
        write!(
            f,
            "{} {batch} x [{n}, {k}] x {rows} rows: {}, {tile} x {rows_per_block} a block, k in {CHUNK_K}s {by} \
             {k_split} {of}, {units} units, blocks of {block}, {} shared, {} weight bytes",
            self.format, self.kernel, self.shared, self.weight_bytes
        )
    }
}

/// How `linear` would run a product of `weight` with `rows` rows.
pub fn explain(weight: &Weight, rows: usize) -> Plan {
    Plan::dense(weight, rows)
}

/// How `grouped_linear` would run a product with `pairs` pairs: one launch for each format present.
pub fn explain_grouped(weights: &ExpertWeights, pairs: usize) -> Vec<Plan> {
    weights.plans(pairs).collect()
}
