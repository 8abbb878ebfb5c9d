//! `grouped_linear`: rows gathered by expert times that expert's weight.

use cuda_std::{Global, GlobalMut, Kernel};
use gpu::args::linear::{ABSENT, GemmShape, GroupedGemmArgs, GroupedRows, GroupedStreamArgs, StreamShape};
use gpu::kernels::gemm_f32::GROUPED_GEMM_F32;
use gpu::kernels::pairs::FEW;

use super::plan::{Plan, Sorting, grouped_entry, most_pairs, sorts_within};
use super::pool::{Kind, Pool};
use super::{Format, HostWeight, Upload};
use crate::device::{Buffer, Device, DeviceError, Result};
use crate::kernels::{Acts, contract};

/// Who reports experts that do not fit together.
const EXPERTS: &str = "experts";
/// Bytes that one load of a row may take.
const WIDE: usize = 16;
/// Words of `tiles` for one tile.
const TILE_WORDS: usize = 3;
/// Weight rows of a unit at least.
const TILE_ROWS: usize = gpu::kernels::stream::TILE_N;

/// One matrix `[n, k]` for each expert, each in its own format, pooled by format.
pub struct ExpertWeights {
    name: String,
    n: usize,
    k: usize,
    formats: Vec<Format>,
    kinds: Vec<Kind>,
    pools: Vec<ExpertPool>,
}

/// The experts of one kind.
pub(super) struct ExpertPool {
    pub pool: Pool,
    /// The format of its first expert, for the plan.
    pub format: Format,
    /// For each expert its matrix in the pool, or `ABSENT`.
    pub slots: Buffer<u32>,
}

impl ExpertWeights {
    /// Expert `e` is `experts[e]`.
    pub fn new(device: &Device, name: &str, experts: &[HostWeight]) -> Result<Self> {
        let (all, upload) = (Self::alloc(device, name, experts)?, Upload::new(device)?);
        experts.iter().enumerate().try_for_each(|(e, weight)| all.put(&upload, e, weight))?;
        Ok(all)
    }

    /// Room for `experts`, of which only shapes and formats are looked at.
    pub fn alloc(device: &Device, name: &str, experts: &[HostWeight]) -> Result<Self> {
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
            for (slot, (expert, _)) in of_kind.iter().enumerate() {
                slots[*expert] = slot as u32;
            }
            pools.push(ExpertPool { pool, format: first.format(), slots: device.upload(&slots)? });
        }
        let formats = experts.iter().map(HostWeight::format).collect();
        let kinds = experts.iter().map(|expert| Kind::of(&expert.data)).collect();
        Ok(Self { name: name.to_string(), n, k, formats, kinds, pools })
    }

    /// Uploads expert `e`, which is as it was when room was made for it.
    pub fn put(&self, upload: &Upload, e: usize, weight: &HostWeight) -> Result<()> {
        weight.check()?;
        let kind = Kind::of(&weight.data);
        let fits = (weight.n, weight.k, weight.batch) == (self.n, self.k, 1) && self.kinds.get(e) == Some(&kind);
        let pool = self.pools.iter().find(|p| p.pool.kind == kind).filter(|_| fits);
        let Some(ExpertPool { pool, .. }) = pool else {
            let what = format!("`{}`: expert {e} is not what there is room for", weight.name);
            return Err(DeviceError::Contract { kernel: EXPERTS, what });
        };
        let slot = self.kinds[..e].iter().filter(|&&other| other == kind).count();
        pool.put(upload, slot, weight)
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

    /// How each expert is multiplied.
    pub(super) fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    pub(super) fn pools(&self) -> &[ExpertPool] {
        &self.pools
    }

    /// One plan a pool.
    pub(super) fn plans(&self, pairs: usize, sorting: Sorting) -> impl Iterator<Item = Plan> {
        self.pools.iter().map(move |p| Plan::grouped(p, self.n, self.k, pairs, sorting))
    }
}

/// `y[pair, :] = W[expert of pair] x[pair / x_rows_per_token, :]`, rows of `x` and `y` packed.
pub struct Grouped<'a> {
    pub weights: &'a ExpertWeights,
    /// `.f32` is read by f32 weights, `.bf16` by the others: `[pairs / x_rows_per_token, k]`.
    pub x: Acts,
    /// Pairs that share a row of x: top_k where a token's row goes to all its experts, 1 where each pair has its own.
    pub x_rows_per_token: usize,
    pub sorting: Sorting,
    /// Of [`Sorting::Within`], `[pairs]`: the expert of each.
    pub ids: Global<u32>,
    /// Of [`Sorting::Before`], as the next; `[pairs]`: pairs sorted by expert.
    pub order: Global<u32>,
    /// `[1 + 3 * pairs]`: the number of tiles, then for each: expert, first index into `order`, count 1..=tile.
    pub tiles: Global<u32>,
    pub pairs: usize,
    /// Whether `ids`, or `order` and `tiles`, were written before the launch before this one.
    pub settled: bool,
    /// `[pairs, n]`, indexed by pair.
    pub y: GlobalMut<f32>,
}

impl Grouped<'_> {
    fn check(&self, name: &'static str, (format, kind): (Format, Kind), x_len: usize) -> Result<()> {
        let gathered = self.gathered(x_len);
        gathered.check(name, format, kind)?;
        gathered.holds(name, "y", self.y.len(), self.pairs * self.weights.n)
    }

    fn gathered(&self, x_len: usize) -> Gathered<'_> {
        let Self { weights, x_rows_per_token, pairs, sorting, ids, order, tiles, .. } = *self;
        Gathered { weights, x_len, x_rows_per_token, pairs, sorting, ids, order, tiles }
    }

    fn launch_f32(&self, device: &Device, (experts, plan): (&ExpertPool, Plan)) -> Result<()> {
        let x = self.x.f32;
        self.check(GROUPED_GEMM_F32.name(), (plan.format, Kind::F32), x.len())?;
        // A row of x has k elements and no gap.
        let wide = x.addr().is_multiple_of(WIDE as u64) && (plan.k * size_of::<f32>()).is_multiple_of(WIDE);
        let (n, k, k_split) = (plan.n as u32, plan.k as u32, plan.k_split as u32);
        let shape = GemmShape { n, k, k_split, wide: wide as u32 };
        let (weights, rows) = (experts.pool.f32(), self.gathered(x.len()).rows(experts, self.settled));
        device.launch(&GROUPED_GEMM_F32, plan.dims_f32(true), GroupedGemmArgs { weights, x, y: self.y, shape, rows })
    }

    fn launch_streamed(
        &self,
        device: &Device,
        (experts, plan): (&ExpertPool, Plan),
        entry: &Kernel<GroupedStreamArgs>,
    ) -> Result<()> {
        let x = self.x.bf16;
        self.check(entry.name(), (plan.format, experts.pool.kind), x.len())?;
        aligned_x(entry.name(), &self.weights.name, x.addr())?;
        let shape = StreamShape { n: plan.n as u32, k: plan.k as u32, k_split: plan.k_split as u32 };
        let (weights, rows) = (experts.pool.words(), self.gathered(x.len()).rows(experts, self.settled));
        device.launch_overlapping(entry, plan.dims(device), GroupedStreamArgs { weights, x, y: self.y, shape, rows })
    }
}

/// Rows of x of streamed products are read 16 bytes at a time; k is a multiple of 16 there, and rows have no gap.
pub(super) fn aligned_x(kernel: &'static str, weights: &str, addr: u64) -> Result<()> {
    contract(kernel, addr.is_multiple_of(WIDE as u64), || {
        format!("`{weights}`: x begins {} bytes past a multiple of {WIDE}", addr % WIDE as u64)
    })
}

/// Sizes of a gathered product, for the checks that all of them share.
pub(super) struct Gathered<'a> {
    pub weights: &'a ExpertWeights,
    pub x_len: usize,
    pub x_rows_per_token: usize,
    pub pairs: usize,
    pub sorting: Sorting,
    pub ids: Global<u32>,
    pub order: Global<u32>,
    pub tiles: Global<u32>,
}

impl Gathered<'_> {
    fn what(&self) -> String {
        let Self { weights, pairs, .. } = *self;
        format!("`{}` [{}, {}, {}] x {pairs} pairs", weights.name, weights.len(), weights.n, weights.k)
    }

    pub fn holds(&self, name: &'static str, part: &str, found: usize, expected: usize) -> Result<()> {
        contract(name, found >= expected, || format!("{}: {part} holds {found}, expected {expected}", self.what()))
    }

    pub fn check(&self, name: &'static str, format: Format, kind: Kind) -> Result<()> {
        let Self { weights, x_len, x_rows_per_token: share, pairs, .. } = *self;
        let tile = self.sorting.tile();
        contract(name, (1..=most_pairs(kind)).contains(&tile), || {
            format!("{}: tiles of {tile} pairs; 1 to {} are possible", self.what(), most_pairs(kind))
        })?;
        contract(name, x_len > 0, || format!("{}: {format} weights read activations that are absent", self.what()))?;
        contract(name, share > 0 && pairs.is_multiple_of(share), || {
            format!("{}: {share} pairs a row of x, which does not divide them", self.what())
        })?;
        let units = pairs.checked_mul(weights.n).is_some_and(|all| all <= u32::MAX as usize * TILE_ROWS);
        contract(name, pairs <= i32::MAX as usize && units, || format!("{}: more than a grid can hold", self.what()))?;
        self.holds(name, "x", x_len, pairs / share * weights.k)?;
        match self.sorting {
            Sorting::Before(_) => {
                self.holds(name, "order", self.order.len(), pairs)?;
                self.holds(name, "tiles", self.tiles.len(), 1 + TILE_WORDS * pairs)
            }
            Sorting::Within => {
                contract(name, sorts_within(kind), || format!("{}: {format} weights want sorted pairs", self.what()))?;
                contract(name, pairs <= FEW, || format!("{}: more than {FEW} want to be sorted", self.what()))?;
                self.holds(name, "ids", self.ids.len(), pairs)
            }
        }
    }

    /// As kernels see them.
    pub fn rows(&self, experts: &ExpertPool, settled: bool) -> GroupedRows {
        let (mut ids, mut slots) = (Global::EMPTY, experts.slots.view());
        if self.sorting == Sorting::Within {
            ids = self.ids.slice(0, self.pairs);
            // Where all experts have one format, an expert is its own slot.
            if self.weights.pools.len() == 1 {
                slots = Global::EMPTY;
            }
        }
        GroupedRows {
            order: self.order,
            tiles: self.tiles,
            slots,
            pairs_per_row: self.x_rows_per_token as u32,
            settled: settled as u32,
            ids,
            experts: self.weights.len() as u32,
        }
    }
}

/// Queues a product: one launch for each format present among the experts.
pub fn grouped_linear(device: &Device, p: &Grouped) -> Result<()> {
    if p.pairs == 0 {
        return Ok(());
    }
    for part in p.weights.pools.iter().zip(p.weights.plans(p.pairs, p.sorting)) {
        match grouped_entry(part.0.pool.kind, p.weights.k, p.sorting) {
            None => p.launch_f32(device, part)?,
            Some(entry) => p.launch_streamed(device, part, entry)?,
        }
    }
    Ok(())
}
