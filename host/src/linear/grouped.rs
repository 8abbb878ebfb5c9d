//! `grouped_linear`: rows gathered by expert times that expert's weight.

use cuda_std::{Element, Global, GlobalMut, Kernel, bf16};
use gpu::args::linear::{ABSENT, GemmShape, GroupedGemmArgs, GroupedRows};
use gpu::kernels::gemm_bf16::GROUPED_GEMM_BF16;
use gpu::kernels::gemm_f32::GROUPED_GEMM_F32;
use gpu::kernels::gemm_w4a16::{GROUPED_GEMM_W4A16, GROUPED_GEMM_W4A16_S32};

use super::plan::Plan;
use super::pool::{Kind, Pool};
use super::{Format, HostWeight, ScaleType};
use crate::device::{Buffer, Device, DeviceError, Result};
use crate::kernels::{Acts, contract};

/// Who reports experts that do not fit together.
const EXPERTS: &str = "experts";
/// Bytes that one load of a row may take.
const WIDE: usize = 16;
/// Words of `tiles` for one tile.
const TILE_WORDS: usize = 3;

/// One matrix `[n, k]` for each expert, each in its own format, pooled by format.
pub struct ExpertWeights {
    name: String,
    n: usize,
    k: usize,
    formats: Vec<Format>,
    pools: Vec<ExpertPool>,
}

/// The experts of one kind.
struct ExpertPool {
    pool: Pool,
    /// The format of its first expert, for the plan.
    format: Format,
    /// For each expert its matrix in the pool, or `ABSENT`.
    slots: Buffer<u32>,
}

impl ExpertWeights {
    /// Expert `e` is `experts[e]`.
    pub fn new(device: &Device, name: &str, experts: &[HostWeight]) -> Result<Self> {
        let Some(&HostWeight { n, k, .. }) = experts.first() else {
            return Err(DeviceError::Contract { kernel: EXPERTS, what: format!("`{name}`: no experts") });
        };
        for expert in experts {
            expert.check()?;
            contract(EXPERTS, (expert.n, expert.k, expert.batch) == (n, k, 1), || {
                let HostWeight { name: one, n: rows, k: columns, batch, .. } = *expert;
                format!("`{name}`: expected [1, {n}, {k}] as the first, found [{batch}, {rows}, {columns}] in `{one}`")
            })?;
        }
        let mut pools = Vec::new();
        for kind in Kind::ALL {
            let of_kind: Vec<_> = experts.iter().enumerate().filter(|(_, e)| Kind::of(&e.data) == kind).collect();
            let Some((_, first)) = of_kind.first() else { continue };
            let pool = Pool::alloc(device, kind, of_kind.len(), n, k)?;
            let mut slots = vec![ABSENT; experts.len()];
            for (slot, (expert, weight)) in of_kind.iter().enumerate() {
                pool.put(device, slot, weight)?;
                slots[*expert] = slot as u32;
            }
            pools.push(ExpertPool { pool, format: first.format(), slots: device.upload(&slots)? });
        }
        let formats = experts.iter().map(HostWeight::format).collect();
        Ok(Self { name: name.to_string(), n, k, formats, pools })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn n(&self) -> usize {
        self.n
    }

    pub fn k(&self) -> usize {
        self.k
    }

    /// How many experts.
    pub fn len(&self) -> usize {
        self.formats.len()
    }

    pub fn is_empty(&self) -> bool {
        self.formats.is_empty()
    }

    /// The format of each expert.
    pub fn formats(&self) -> &[Format] {
        &self.formats
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.pools.iter().map(|p| p.pool.bytes() + p.slots.bytes()).sum()
    }

    /// One plan a pool.
    pub(super) fn plans(&self, pairs: usize) -> impl Iterator<Item = Plan> {
        self.pools.iter().map(move |p| Plan::grouped(p.pool.kind, p.format, p.pool.count, self.n, self.k, pairs))
    }
}

/// `y[pair, :] = W[expert of pair] x[pair / x_rows_per_token, :]`, rows of `x` and `y` packed.
pub struct Grouped<'a> {
    pub weights: &'a ExpertWeights,
    /// `.f32` is read by f32 weights, `.bf16` by the others: `[pairs / x_rows_per_token, k]`.
    pub x: Acts,
    /// Pairs that share a row of x: top_k where a token's row goes to all its experts, 1 where each pair has its own.
    pub x_rows_per_token: usize,
    /// `[pairs]`: pairs sorted by expert.
    pub order: Global<u32>,
    /// `[1 + 3 * pairs]`: the number of tiles, then for each: expert, first index into `order`, count 1..=8.
    pub tiles: Global<u32>,
    pub pairs: usize,
    /// `[pairs, n]`, indexed by pair.
    pub y: GlobalMut<f32>,
}

impl Grouped<'_> {
    fn check(&self, name: &'static str, format: Format, x_len: usize) -> Result<()> {
        let Self { weights, x_rows_per_token: share, pairs, .. } = *self;
        let what = || format!("`{}` [{}, {}, {}] x {pairs} pairs", weights.name, weights.len(), weights.n, weights.k);
        contract(name, x_len > 0, || format!("{}: {format} weights read activations that are absent", what()))?;
        contract(name, share > 0 && pairs.is_multiple_of(share), || {
            format!("{}: {share} pairs a row of x, which does not divide them", what())
        })?;
        contract(name, pairs <= i32::MAX as usize, || format!("{}: more than a grid can hold", what()))?;
        let sizes = [
            ("x", x_len, pairs / share * weights.k),
            ("y", self.y.len(), pairs * weights.n),
            ("order", self.order.len(), pairs),
            ("tiles", self.tiles.len(), 1 + TILE_WORDS * pairs),
        ];
        for (part, found, expected) in sizes {
            contract(name, found >= expected, || format!("{}: {part} holds {found}, expected {expected}", what()))?;
        }
        Ok(())
    }

    fn launch<W: Copy + Send + Sync, X: Element>(
        &self,
        device: &Device,
        (experts, plan): (&ExpertPool, Plan),
        entry: &Kernel<GroupedGemmArgs<W, X>>,
        weights: W,
        x: Global<X>,
    ) -> Result<()> {
        self.check(entry.name(), plan.format, x.len())?;
        let aligned = x.addr().is_multiple_of(WIDE as u64);
        // A row of x has k elements and no gap: bf16 weights and w4a16 have multiples of 16.
        let wide = aligned && (plan.k * size_of::<X>()).is_multiple_of(WIDE);
        contract(entry.name(), wide || plan.format == Format::F32, || {
            format!("`{}`: x begins {} bytes past a multiple of {WIDE}", self.weights.name, x.addr() % WIDE as u64)
        })?;
        let shape = GemmShape { n: plan.n as u32, k: plan.k as u32, k_split: plan.k_split, wide: wide as u32 };
        let rows = GroupedRows {
            order: self.order,
            tiles: self.tiles,
            slots: experts.slots.view(),
            pairs_per_row: self.x_rows_per_token as u32,
        };
        device.launch(entry, plan.dims(), GroupedGemmArgs { weights, x, y: self.y, shape, rows })
    }
}

/// Queues a product: one launch for each format present among the experts.
pub fn grouped_linear(device: &Device, p: &Grouped) -> Result<()> {
    if p.pairs == 0 {
        return Ok(());
    }
    for part in p.weights.pools.iter().zip(p.weights.plans(p.pairs)) {
        let pool = &part.0.pool;
        let x = p.x.bf16;
        match pool.kind {
            Kind::F32 => p.launch(device, part, &GROUPED_GEMM_F32, pool.f32(), p.x.f32)?,
            Kind::Bf16 => p.launch(device, part, &GROUPED_GEMM_BF16, pool.bf16(), x)?,
            Kind::W4a16(ScaleType::Bf16) => p.launch(device, part, &GROUPED_GEMM_W4A16, pool.w4a16::<bf16>(), x)?,
            Kind::W4a16(ScaleType::F32) => p.launch(device, part, &GROUPED_GEMM_W4A16_S32, pool.w4a16::<f32>(), x)?,
        }
    }
    Ok(())
}
