//! Which kernel a product takes, how k is split and how rows are divided: a pure function of shape and rows, printable.
//!
//! The split of k follows from k alone. Everything else may follow from the number of rows too, because it leaves a
//! row's sums as they are.

use std::fmt;

use cuda_std::Kernel;
use gpu::args::linear::{GateUpArgs, GatedArgs, GroupedStreamArgs};
use gpu::kernels::gemm_f32::{GEMM_F32, MAX_WARPS, shared_bytes};
use gpu::kernels::pairs::FEW;
use gpu::kernels::short::{Short, is_short};
use gpu::kernels::stream::{self, CHUNK_K, TILE_M, TILE_N, WARPS};
use gpu::kernels::wide::Wide;
use gpu::kernels::{gemm_bf16, gemm_w4a16};

use super::grouped::ExpertPool;
use super::pool::Kind;
use super::tiled::{self, Tiles};
use super::variant::{Kernels, Tiling, Variant};
use super::{ExpertWeights, Format, HostWeight, ScaleType, Weight};
use crate::device::{Device, Dims};

/// k from which a second warp joins in an f32 tile's sums, and so on: less would cost more in the barrier than it
/// saves.
const K_PER_WARP: usize = 512;
/// Blocks along x of a grouped f32 product: each takes tiles in turn, so that few tiles start few blocks.
const GROUPED_BLOCKS: usize = 16;
/// In [`Plan::resident`]: a block for each unit, however many there are.
const ALL: u32 = u32::MAX;
/// Shared memory that a multiprocessor keeps for itself of each block's, bytes.
const RESERVED: u32 = 1024;

/// Rows up to which weights are streamed where warpgroups may multiply more.
const STREAMED_ROWS_FAST: usize = 96;

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
    /// Slices of k that are summed apart, by one warp each, or one block of a cluster.
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
    /// Blocks of a multiprocessor at once, or [`ALL`].
    pub(super) resident: u32,
    /// Which of the format's dense kernels; none where it has one only.
    pub(super) variant: Option<Variant>,
    /// Whether a warp takes slices of k in turn, of a product gathered by expert.
    in_turn: bool,
    /// Matrices that a row is multiplied by: all of a batch, one of the experts, gate and up.
    matrices_of_row: usize,
}

/// The variant of products gathered by expert, and of gate and up together.
fn gathered(kind: Kind) -> stream::Variant {
    match kind {
        Kind::Bf16 => gemm_bf16::M8,
        Kind::W4a16(ScaleType::F32) => gemm_w4a16::M8_S32,
        _ => gemm_w4a16::M8,
    }
}

/// How a product gathered by expert of so short a k is divided, where a kind has such a kernel.
fn short(kind: Kind, k: usize) -> Option<Short> {
    match kind {
        Kind::W4a16(ScaleType::Bf16) if is_short(k) => Some(gemm_w4a16::SHORT),
        Kind::W4a16(ScaleType::F32) if is_short(k) => Some(gemm_w4a16::SHORT_S32),
        _ => None,
    }
}

/// Pairs of an expert, on average, from which they are multiplied 16 at a time: fewer tiles of pairs, but each costs
/// more.
const MANY_PAIRS: usize = 6;

/// Pairs of a tile at most that kernels of a kind take.
pub(super) fn most_pairs(kind: Kind) -> usize {
    if kind == Kind::W4a16(ScaleType::Bf16) { gemm_w4a16::GATHERED16.mt * TILE_M } else { TILE_M }
}

/// How the pairs of gathered products come to be in tiles of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sorting {
    /// `expert_sort` has written them, each of up to so many pairs.
    Before(usize),
    /// Each block finds them for itself: nothing is launched for it.
    Within,
}

impl Sorting {
    /// Pairs of a tile at most.
    pub fn tile(self) -> usize {
        match self {
            Self::Before(tile) => tile,
            Self::Within => TILE_M,
        }
    }

    /// For products with the experts of all these matrices.
    pub fn of(weights: &[&ExpertWeights], pairs: usize) -> Self {
        let has = |kind| sorts_within(kind) && pairs <= FEW;
        let within = weights.iter().all(|w| w.pools().iter().all(|p| has(p.pool.kind)));
        if within { Self::Within } else { Self::Before(tile_of_experts(weights, pairs)) }
    }
}

/// Whether a kind has kernels that sort pairs for themselves.
pub(super) fn sorts_within(kind: Kind) -> bool {
    kind == Kind::W4a16(ScaleType::Bf16)
}

fn tile_of_experts(weights: &[&ExpertWeights], pairs: usize) -> usize {
    let most = weights.iter().map(|w| match pairs >= MANY_PAIRS * w.len() {
        true => w.pools().iter().map(|p| most_pairs(p.pool.kind)).min().unwrap_or(TILE_M),
        false => TILE_M,
    });
    most.min().unwrap_or(TILE_M)
}

/// How products with so large tiles of pairs are divided, where a kind has such kernels.
fn many(kind: Kind, sorting: Sorting) -> Option<Wide> {
    (sorting.tile() > TILE_M && most_pairs(kind) > TILE_M).then_some(gemm_w4a16::GATHERED16)
}

/// The kernel that multiplies rows gathered by expert with streamed weights; f32 is not streamed.
pub(super) fn grouped_entry(kind: Kind, k: usize, sorting: Sorting) -> Option<&'static Kernel<GroupedStreamArgs>> {
    let (short, many) = (short(kind, k).is_some(), many(kind, sorting).is_some());
    let within = sorting == Sorting::Within;
    match kind {
        Kind::F32 => None,
        Kind::Bf16 => Some(&gemm_bf16::GROUPED_GEMM_BF16),
        Kind::W4a16(ScaleType::Bf16) if many => Some(&gemm_w4a16::GROUPED_GEMM_W4A16_M16),
        Kind::W4a16(ScaleType::Bf16) if short && within => Some(&gemm_w4a16::GROUPED_GEMM_W4A16_WITHIN_SHORT),
        Kind::W4a16(ScaleType::Bf16) if within => Some(&gemm_w4a16::GROUPED_GEMM_W4A16_WITHIN),
        Kind::W4a16(ScaleType::Bf16) if short => Some(&gemm_w4a16::GROUPED_GEMM_W4A16_SHORT),
        Kind::W4a16(ScaleType::Bf16) => Some(&gemm_w4a16::GROUPED_GEMM_W4A16),
        Kind::W4a16(ScaleType::F32) if short => Some(&gemm_w4a16::GROUPED_GEMM_W4A16_S32_SHORT),
        Kind::W4a16(ScaleType::F32) => Some(&gemm_w4a16::GROUPED_GEMM_W4A16_S32),
    }
}

fn grouped_kernel_of(kind: Kind, k: usize, sorting: Sorting) -> &'static str {
    grouped_entry(kind, k, sorting).map_or("grouped_gemm_f32", Kernel::name)
}

/// The kernel that multiplies gate and up of experts of one kind together; f32 has none.
pub(super) fn gate_up_entry(kind: Kind, sorting: Sorting) -> Option<&'static Kernel<GateUpArgs>> {
    match kind {
        Kind::F32 => None,
        Kind::Bf16 => Some(&gemm_bf16::GATE_UP_GEMM_BF16),
        Kind::W4a16(ScaleType::Bf16) if many(kind, sorting).is_some() => Some(&gemm_w4a16::GATE_UP_GEMM_W4A16_M16),
        Kind::W4a16(ScaleType::Bf16) if sorting == Sorting::Within => Some(&gemm_w4a16::GATE_UP_GEMM_W4A16_WITHIN),
        Kind::W4a16(ScaleType::Bf16) => Some(&gemm_w4a16::GATE_UP_GEMM_W4A16),
        Kind::W4a16(ScaleType::F32) => Some(&gemm_w4a16::GATE_UP_GEMM_W4A16_S32),
    }
}

/// The kernel that multiplies gate and up of dense rows together, where there is one for so many.
pub(super) fn gated_entry(kind: Kind, n: usize, rows: usize) -> Option<&'static Kernel<GatedArgs>> {
    // It divides its work as `M8` does.
    match (Variant::of(kind, [n, CHUNK_K], rows, Kernels::Plain)?, kind) {
        (Variant::M8 | Variant::M8Few, Kind::Bf16) => Some(&gemm_bf16::GATED_GEMM_BF16),
        (Variant::M8 | Variant::M8Few, Kind::W4a16(ScaleType::Bf16)) => Some(&gemm_w4a16::GATED_GEMM_W4A16),
        _ => None,
    }
}

/// The kernel that multiplies one row with gate and up like this one together.
pub fn gated_kernel(weight: &HostWeight) -> Option<&'static str> {
    gated_entry(Kind::of(&weight.data), weight.n, 1).map(Kernel::name)
}

/// The kernel that multiplies `rows` rows with such a weight, on a device without clusters.
pub fn kernel(weight: &HostWeight, rows: usize) -> &'static str {
    let variant = Variant::of(Kind::of(&weight.data), [weight.n, weight.k], rows, Kernels::Plain);
    variant.and_then(|variant| variant.kernel(weight)).unwrap_or(GEMM_F32.name())
}

/// The kernel that multiplies gathered rows with such an expert.
pub fn grouped_kernel(expert: &HostWeight, sorting: Sorting) -> &'static str {
    grouped_kernel_of(Kind::of(&expert.data), expert.k, sorting)
}

/// The kernel that multiplies gathered rows with gate and up of such an expert together.
pub fn gate_up_kernel(expert: &HostWeight, sorting: Sorting) -> Option<&'static str> {
    gate_up_entry(Kind::of(&expert.data), sorting).map(Kernel::name)
}

impl Plan {
    /// `fast`: whether the rows may take [`Tiles::Warpgroups`].
    pub(super) fn dense(device: &Device, weight: &Weight, rows: usize, fast: bool) -> Self {
        let tiles = Tiles::Warpgroups;
        let fast = fast && rows > STREAMED_ROWS_FAST && tiles.runs_on(device) && tiles.takes(weight);
        let plan = if fast { Self::by(weight, rows, Variant::Tiled(tiles)) } else { None };
        plan.unwrap_or_else(|| Self::as_few(device, weight, rows))
    }

    fn as_few(device: &Device, weight: &Weight, rows: usize) -> Self {
        let (kind, n, k) = (weight.pool().kind, weight.n(), weight.k());
        Variant::of(kind, [n, k], rows, Kernels::of(device))
            .and_then(|variant| Self::by(weight, rows, variant))
            .unwrap_or_else(|| Self::of_f32(GEMM_F32.name(), weight.format(), n, k).rows(weight, rows, None, TILE_M))
    }

    /// By a kernel of choice; none where the format has no such kernel.
    pub(super) fn by(weight: &Weight, rows: usize, variant: Variant) -> Option<Self> {
        let (kind, format, n, k) = (weight.pool().kind, weight.format(), weight.n(), weight.k());
        let (kernel, words) = (variant.name_of(kind)?, kind.tile_words()?);
        let k_split = stream::k_split(k);
        let (plan, most) = match variant.tiling(kind)? {
            Tiling::Stream(stream) => {
                (Self::streamed(kernel, format, [n, k, k_split], stream, stream.nt, words), stream.mt * TILE_M)
            }
            Tiling::Wide(wide) | Tiling::Split(wide) => {
                let (tiles, shared) = (wide.rows() / TILE_N, wide.shared_bytes(words));
                let plan = Self::one(kernel, format, n, k, k_split, tiles, wide.threads(), shared);
                (Self { resident: ALL, ..plan }, wide.row_tiles() * TILE_M)
            }
            Tiling::Tiled(tiles) => {
                let (own, rows_per_block, shared) = tiles.block(kind, words);
                let plan = Self::one(kernel, format, n, k, tiles.slices(k), own, tiled::THREADS, shared);
                (plan, rows_per_block)
            }
        };
        Some(plan.rows(weight, rows, Some(variant), most))
    }

    /// Gate and up of dense rows together; `gate` is like both.
    pub(super) fn gated(gate: &Weight, rows: usize, kernel: &'static str) -> Option<Self> {
        let (kind, n, k) = (gate.pool().kind, gate.n(), gate.k());
        let plan =
            Self::streamed(kernel, gate.format(), [n, k, stream::k_split(k)], gathered(kind), 1, kind.tile_words()?);
        let plan = plan.rows(gate, rows, None, TILE_M);
        Some(Self { weight_bytes: 2 * plan.weight_bytes, matrices_of_row: 2, ..plan })
    }

    /// With `rows` rows of x, at most `most` of them a block.
    fn rows(self, weight: &Weight, rows: usize, variant: Option<Variant>, most: usize) -> Self {
        let batch = weight.batch();
        let (tiles, blocks) = (rows.div_ceil(TILE_M), rows.div_ceil(most));
        let rows_per_block = match variant {
            Some(Variant::Tiled(_)) => most,
            // Blocks of equal size: 65 rows are 40 and 25, not 64 and 1.
            _ => tiles.checked_div(blocks).map_or(0, |_| tiles.div_ceil(blocks)) * TILE_M,
        };
        let weight_bytes = batch * weight.pool().kind.matrix_bytes(self.n, self.k);
        let units = batch * blocks * self.units;
        Self { batch, rows, rows_per_block, weight_bytes, variant, units, matrices_of_row: batch, ..self }
    }

    /// `experts`: how many have this kind. At least one tile for each expert in use, at most as many as pairs.
    pub(super) fn grouped(experts: &ExpertPool, n: usize, k: usize, pairs: usize, sorting: Sorting) -> Self {
        let (kind, format) = (experts.pool.kind, experts.format);
        let kernel = grouped_kernel_of(kind, k, sorting);
        let Some(words) = kind.tile_words() else {
            return Self::of_f32(kernel, format, n, k).gathered(experts, [1, TILE_M], pairs);
        };
        let plan = match (many(kind, sorting), short(kind, k)) {
            (Some(wide), _) => {
                return Self::many(kernel, experts, [n, k], wide, wide.nt).gathered(
                    experts,
                    [1, sorting.tile()],
                    pairs,
                );
            }
            (None, Some(short)) => {
                let shared = short.shared_bytes(words);
                let plan = Self::one(kernel, format, n, k, 1, WARPS as usize, stream::THREADS, shared);
                Self { resident: short.blocks, ..plan }
            }
            (None, None) => {
                let variant = gathered(kind);
                Self::streamed(kernel, format, [n, k, stream::k_split_grouped(n, k)], variant, variant.nt, words)
            }
        };
        plan.gathered(experts, [1, TILE_M], pairs)
    }

    /// As [`Self::grouped`], of gate and up together; none where a kind has no such kernel.
    pub(super) fn gate_up(experts: &ExpertPool, n: usize, k: usize, pairs: usize, sorting: Sorting) -> Option<Self> {
        let (kind, format) = (experts.pool.kind, experts.format);
        let (kernel, words) = (gate_up_entry(kind, sorting)?.name(), kind.tile_words()?);
        if let Some(wide) = many(kind, sorting) {
            return Some(Self::many(kernel, experts, [n, k], wide, 1).gathered(experts, [2, sorting.tile()], pairs));
        }
        let split = stream::k_split_grouped(n, k);
        let plan = Self::streamed(kernel, format, [n, k, split], gathered(kind), 1, words);
        Some(plan.gathered(experts, [2, TILE_M], pairs))
    }

    /// Many rows an expert. `own`: tiles of a warp that are rows of the result.
    fn many(kernel: &'static str, experts: &ExpertPool, [n, k]: [usize; 2], wide: Wide, own: usize) -> Self {
        let shared = wide.shared_bytes(experts.pool.kind.tile_words().unwrap_or(0));
        let (split, tiles) = (stream::k_split_grouped(n, k), WARPS as usize * own);
        let plan = Self::one(kernel, experts.format, n, k, split, tiles, stream::THREADS, shared);
        Self { resident: wide.blocks, in_turn: true, ..plan }
    }

    /// With `pairs` pairs, up to `tile` a tile, each times `matrices` matrices of an expert.
    fn gathered(self, experts: &ExpertPool, [matrices, tile]: [usize; 2], pairs: usize) -> Self {
        let (batch, of_expert) = (experts.pool.count, matrices * experts.pool.kind.matrix_bytes(self.n, self.k));
        Self {
            batch,
            rows: pairs,
            rows_per_block: tile,
            weight_bytes: batch.min(pairs) * of_expert,
            units: pairs * self.units,
            matrices_of_row: matrices,
            ..self
        }
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
        variant: stream::Variant,
        own: usize,
        words: usize,
    ) -> Self {
        let tiles_per_block = WARPS as usize / k_split * own;
        let shared = variant.shared_bytes(words);
        let plan = Self::one(kernel, format, n, k, k_split, tiles_per_block, stream::THREADS, shared);
        Self { resident: if variant.alone() { ALL } else { variant.blocks }, ..plan }
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
            variant: None,
            in_turn: false,
            matrices_of_row: 1,
        }
    }

    /// Blocks of rows of a dense product.
    pub(super) fn row_blocks(&self) -> usize {
        self.rows.div_ceil(self.rows_per_block.max(1))
    }

    /// Launch dimensions where blocks take units in turn: as many blocks as the device holds at once, or have one each.
    pub(super) fn dims(&self, device: &Device) -> Dims {
        let info = device.info();
        let fit = (info.max_shared + RESERVED) / (self.shared + RESERVED);
        let blocks = match self.resident {
            ALL => self.units,
            resident => info.multiprocessors as usize * fit.clamp(1, resident) as usize,
        };
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
        // Slices go to different warps or blocks, or each warp takes them in turn.
        let in_turn = self.in_turn || self.variant.is_some_and(Variant::in_turn);
        let (by, of) = match self.variant.is_some_and(Variant::splits) {
            true => ("over", "blocks"),
            false if in_turn => ("in", "slices"),
            false => ("over", "warps"),
        };
        write!(
            f,
            "{} {batch} x [{n}, {k}] x {rows} rows: {}, {tile} x {rows_per_block} a block, k in {CHUNK_K}s {by} \
             {k_split} {of}, {units} units, blocks of {block}, {} shared, {} weight bytes",
            self.format, self.kernel, self.shared, self.weight_bytes
        )?;
        match self.variant {
            Some(Variant::Tiled(Tiles::Warpgroups)) => write!(f, ", after {}", tiled::panels_name(self.format)),
            _ => Ok(()),
        }
    }
}

/// How `linear` would run a product of `weight` with `rows` rows whose bits must be those of few.
pub fn explain(device: &Device, weight: &Weight, rows: usize) -> Plan {
    Plan::as_few(device, weight, rows)
}

/// How `linear` would run a product of `weight` with `rows` rows of a prompt.
pub fn explain_fast(device: &Device, weight: &Weight, rows: usize) -> Plan {
    Plan::dense(device, weight, rows, true)
}

/// How `grouped_linear` would run a product with `pairs` pairs: one launch for each format present.
pub fn explain_grouped(weights: &ExpertWeights, pairs: usize, sorting: Sorting) -> Vec<Plan> {
    weights.plans(pairs, sorting).collect()
}
