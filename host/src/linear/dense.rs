//! `linear`: rows of x times a weight.

use cuda_std::{GlobalMut, Kernel};
use gpu::args::linear::{DenseRows, GemmArgs, GemmShape, StreamArgs, StreamShape};
use gpu::kernels::gemm_f32::GEMM_F32;
use gpu::kernels::stream::{LANE_K, MAX_SPLIT, TILE_N};

use super::plan::Plan;
use super::tiled::{self, Many, Tiles};
use super::variant::Variant;
use super::{Format, Weight};
use crate::device::{Device, Result};
use crate::kernels::{Acts, contract};

/// Bytes that one load of a row may take.
const WIDE: u64 = 16;
/// f32 of such a load.
const WIDE_F32: usize = WIDE as usize / size_of::<f32>();
/// Largest grid along y and z.
const MAX_GRID: usize = 65_535;

/// `y[r, b, :] = W[b] x[r, b, :]`, or added to what `y` holds.
///
/// Row `r` of batch entry `b` begins at element `r * x_stride + b * x_batch` of `x` and at `r * y_stride + b * y_batch`
/// of `y`. A weight with batch 1 is the ordinary product.
pub struct Product<'a> {
    pub weight: &'a Weight,
    /// `.f32` is read by f32 weights, `.bf16` by the others.
    pub x: Acts,
    pub rows: usize,
    pub x_stride: usize,
    pub x_batch: usize,
    pub y: GlobalMut<f32>,
    pub y_stride: usize,
    pub y_batch: usize,
    pub accumulate: bool,
    /// What many rows may take.
    pub many: Many,
}

impl<'a> Product<'a> {
    /// `y[rows, n] = W x[rows, k]`, rows one after the other.
    pub fn plain(weight: &'a Weight, x: Acts, rows: usize, y: GlobalMut<f32>) -> Self {
        let (x_stride, y_stride) = (weight.k(), weight.n());
        Self { weight, x, rows, x_stride, x_batch: 0, y, y_stride, y_batch: 0, accumulate: false, many: Many::AsFew }
    }
}

impl Product<'_> {
    /// Elements from the first row of the first batch entry to the end of the last row of the last.
    fn span(&self, stride: usize, batch: usize, width: usize) -> usize {
        (self.rows - 1) * stride + (self.weight.batch() - 1) * batch + width
    }

    fn check(&self, name: &'static str, plan: &Plan, x_len: usize) -> Result<()> {
        let Self { weight, rows, x_stride, x_batch, y_stride, y_batch, .. } = *self;
        let (n, k, batch) = (weight.n(), weight.k(), weight.batch());
        let what = || format!("`{}` [{batch}, {n}, {k}] x {rows} rows", weight.name());
        let x = weight.format();
        contract(name, x_len > 0, || format!("{}: {x} weights read activations that are absent", what()))?;
        let need = self.span(x_stride, x_batch, k);
        contract(name, x_len >= need, || format!("{}: x holds {x_len}, expected {need}", what()))?;
        let need = self.span(y_stride, y_batch, n);
        contract(name, self.y.len() >= need, || format!("{}: y holds {}, expected {need}", what(), self.y.len()))?;
        let apart = |inner: usize, outer: usize, count: usize| inner >= n && outer >= (count - 1) * inner + n;
        let rows_inside = rows == 1 || batch > 1 && apart(y_batch, y_stride, batch);
        let apart = match (rows, batch) {
            (1, 1) => true,
            (_, 1) => y_stride >= n,
            (1, _) => y_batch >= n,
            _ => rows_inside || apart(y_stride, y_batch, rows),
        };
        contract(name, apart, || format!("{}: y strides {y_stride} and {y_batch} overlap", what()))?;
        let fits = [rows, plan.units * MAX_SPLIT, x_stride, y_stride].iter().all(|&size| size <= i32::MAX as usize)
            && (weight.format() != Format::F32
                || n.div_ceil(TILE_N * plan.tiles_per_block) <= MAX_GRID && batch <= MAX_GRID);
        contract(name, fits, || format!("{}: more than a grid can hold", what()))
    }

    pub(super) fn dense_rows(&self, plan: &Plan) -> DenseRows {
        DenseRows {
            x_stride: self.x_stride as u64,
            x_batch: self.x_batch as u64,
            y_stride: self.y_stride as u64,
            y_batch: self.y_batch as u64,
            rows: self.rows as u32,
            rows_per_block: plan.rows_per_block as u32,
            accumulate: self.accumulate as u32,
        }
    }

    fn launch_f32(&self, device: &Device, plan: Plan) -> Result<()> {
        let (x, name) = (self.x.f32, GEMM_F32.name());
        contract(name, self.weight.format() == Format::F32, || {
            let (name, format) = (self.weight.name(), self.weight.format());
            format!("`{name}`: {format} weights have no kernel for {} rows", self.rows)
        })?;
        self.check(name, &plan, x.len())?;
        let sizes = [self.weight.k(), self.x_stride, self.x_batch];
        let wide = x.addr().is_multiple_of(WIDE) && sizes.iter().all(|size| size.is_multiple_of(WIDE_F32));
        let (n, k, k_split) = (plan.n as u32, plan.k as u32, plan.k_split as u32);
        let shape = GemmShape { n, k, k_split, wide: wide as u32 };
        let (weights, rows) = (self.weight.pool().f32(), self.dense_rows(&plan));
        device.launch(&GEMM_F32, plan.dims_f32(false), GemmArgs { weights, x, y: self.y, shape, rows })
    }

    /// That sizes fit, and that lanes can read 16 bytes of x at once.
    pub(super) fn check_rows(&self, plan: &Plan) -> Result<()> {
        let (name, x) = (plan.kernel, self.x.bf16);
        self.check(name, plan, x.len())?;
        let strides = [(self.x_stride, self.rows), (self.x_batch, self.weight.batch())];
        let aligned = strides.iter().all(|&(stride, count)| count == 1 || stride.is_multiple_of(LANE_K));
        contract(name, aligned && x.addr().is_multiple_of(WIDE), || {
            let (at, k, stride, batch) = (x.addr() % WIDE, LANE_K, self.x_stride, self.x_batch);
            let name = self.weight.name();
            format!(
                "`{name}`: x begins {at} bytes past a multiple of {WIDE} with strides {stride} and {batch}; rows must \
                     begin at multiples of {k} elements"
            )
        })
    }

    fn launch_streamed(&self, device: &Device, plan: Plan, entry: &'static Kernel<StreamArgs>) -> Result<()> {
        self.check_rows(&plan)?;
        let args = StreamArgs {
            weights: self.weight.pool().words(),
            x: self.x.bf16,
            y: self.y,
            shape: StreamShape { n: plan.n as u32, k: plan.k as u32, k_split: plan.k_split as u32 },
            rows: self.dense_rows(&plan),
            batch: plan.batch as u32,
            row_blocks: plan.row_blocks() as u32,
        };
        let mut dims =
            if matches!(plan.variant, Some(Variant::Tiled(_))) { tiled::dims_of(&plan) } else { plan.dims(device) };
        if device.has_clusters() && plan.variant.is_some_and(Variant::splits) {
            dims.grid[0] *= MAX_SPLIT as u32;
            return device.launch_clusters(entry, dims, MAX_SPLIT as u32, args);
        }
        device.launch_overlapping(entry, dims, args)
    }
}

/// Queues a product.
pub fn linear(device: &Device, p: &Product) -> Result<()> {
    launch(device, p, Plan::dense(device, p.weight, p.rows, matches!(p.many, Many::Fast(_))))
}

/// As [`linear`], by the kernel `variant` of the weight's format. An error where there is none, or where the device
/// cannot run it. [`Tiles::Warpgroups`] want [`Many::Fast`].
pub fn linear_by(device: &Device, p: &Product, variant: Variant) -> Result<()> {
    let (name, format) = (p.weight.name(), p.weight.format());
    match Plan::by(p.weight, p.rows, variant) {
        Some(plan) if variant.runs_on(device) => launch(device, p, plan),
        Some(_) => contract("linear", false, || format!("`{name}`: variant {variant} does not run on this device")),
        None => contract("linear", false, || format!("`{name}`: {format} weights have no variant {variant}")),
    }
}

fn launch(device: &Device, p: &Product, plan: Plan) -> Result<()> {
    if p.rows == 0 {
        return Ok(());
    }
    if plan.variant == Some(Variant::Tiled(Tiles::Warpgroups)) {
        p.check_rows(&plan)?;
        return match p.many {
            Many::Fast(memory) => tiled::launch_warpgroups(device, p, &plan, memory),
            Many::AsFew => contract(plan.kernel, false, || format!("`{}`: no memory for panels", p.weight.name())),
        };
    }
    match plan.variant.and_then(|variant| variant.kernel_of(p.weight.pool().kind)) {
        // Refused but for f32 weights.
        None => p.launch_f32(device, plan),
        Some(entry) => p.launch_streamed(device, plan, entry),
    }
}
