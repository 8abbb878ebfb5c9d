//! `linear`: rows of x times a weight.

use cuda_std::{Element, Global, GlobalMut, Kernel, bf16};
use gpu::args::linear::{DenseRows, GemmArgs, GemmShape};
use gpu::kernels::gemm::LANE_K;
use gpu::kernels::gemm_bf16::{GEMM_BF16_M8, GEMM_BF16_M64};
use gpu::kernels::gemm_f32::GEMM_F32;
use gpu::kernels::gemm_w4a16::{GEMM_W4A16_M8, GEMM_W4A16_M64, GEMM_W4A16_S32_M8, GEMM_W4A16_S32_M64};

use super::plan::{Plan, explain};
use super::pool::Kind;
use super::{ScaleType, Weight};
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
}

impl<'a> Product<'a> {
    /// `y[rows, n] = W x[rows, k]`, rows one after the other.
    pub fn plain(weight: &'a Weight, x: Acts, rows: usize, y: GlobalMut<f32>) -> Self {
        let (x_stride, y_stride) = (weight.k(), weight.n());
        Self { weight, x, rows, x_stride, x_batch: 0, y, y_stride, y_batch: 0, accumulate: false }
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
        let fits = rows <= i32::MAX as usize && plan.grid[1] as usize <= MAX_GRID && batch <= MAX_GRID;
        contract(name, fits, || format!("{}: more than a grid can hold", what()))
    }

    fn launch<W: Copy + Send + Sync, X: Element>(
        &self,
        device: &Device,
        plan: Plan,
        entry: &Kernel<GemmArgs<W, X>>,
        weights: W,
        x: Global<X>,
        wide: bool,
    ) -> Result<()> {
        let shape = GemmShape { n: plan.n as u32, k: plan.k as u32, k_split: plan.k_split, wide: wide as u32 };
        let rows = DenseRows {
            x_stride: self.x_stride as u64,
            x_batch: self.x_batch as u64,
            y_stride: self.y_stride as u64,
            y_batch: self.y_batch as u64,
            rows: self.rows as u32,
            rows_per_block: plan.rows_per_block as u32,
            accumulate: self.accumulate as u32,
        };
        device.launch(entry, plan.dims(), GemmArgs { weights, x, y: self.y, shape, rows })
    }

    fn launch_bf16<W: Copy + Send + Sync>(
        &self,
        device: &Device,
        plan: Plan,
        few: &Kernel<GemmArgs<W, bf16>>,
        many: &Kernel<GemmArgs<W, bf16>>,
        weights: W,
    ) -> Result<()> {
        let entry = if plan.row_tiles == 1 { few } else { many };
        let x = self.x.bf16;
        self.check(entry.name(), &plan, x.len())?;
        let strides = [(self.x_stride, self.rows), (self.x_batch, self.weight.batch())];
        let aligned = strides.iter().all(|&(stride, count)| count == 1 || stride.is_multiple_of(LANE_K));
        contract(entry.name(), aligned && x.addr().is_multiple_of(WIDE), || {
            let (at, k, stride, batch) = (x.addr() % WIDE, LANE_K, self.x_stride, self.x_batch);
            let name = self.weight.name();
            format!(
                "`{name}`: x begins {at} bytes past a multiple of {WIDE} with strides {stride} and {batch}; rows must \
                     begin at multiples of {k} elements"
            )
        })?;
        self.launch(device, plan, entry, weights, x, true)
    }
}

/// Queues a product.
pub fn linear(device: &Device, p: &Product) -> Result<()> {
    let pool = p.weight.pool();
    if p.rows == 0 {
        return Ok(());
    }
    let plan = explain(p.weight, p.rows);
    match pool.kind {
        Kind::F32 => {
            let x = p.x.f32;
            p.check(GEMM_F32.name(), &plan, x.len())?;
            let sizes = [p.weight.k(), p.x_stride, p.x_batch];
            let wide = x.addr().is_multiple_of(WIDE) && sizes.iter().all(|size| size.is_multiple_of(WIDE_F32));
            p.launch(device, plan, &GEMM_F32, pool.f32(), x, wide)
        }
        Kind::Bf16 => p.launch_bf16(device, plan, &GEMM_BF16_M8, &GEMM_BF16_M64, pool.bf16()),
        Kind::W4a16(ScaleType::Bf16) => {
            p.launch_bf16(device, plan, &GEMM_W4A16_M8, &GEMM_W4A16_M64, pool.w4a16::<bf16>())
        }
        Kind::W4a16(ScaleType::F32) => {
            p.launch_bf16(device, plan, &GEMM_W4A16_S32_M8, &GEMM_W4A16_S32_M64, pool.w4a16::<f32>())
        }
    }
}
