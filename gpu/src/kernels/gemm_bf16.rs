//! Products with bf16 weights `[n, k]`, rows as in the file; k a multiple of 16. See [`super::gemm`] for who owns what.
//!
//! A lane reads 16 bytes of two weight rows for 32 k: eight rows of 64 contiguous bytes a warp and load, no repacking.
//! Each step of 32 k is summed by tensor cores from zero and then added to the running sum, rounded to nearest (the
//! hardware's own long sums truncate).

use cuda_std::{Global, bf16, kernel};

use super::gemm::{
    CHUNK_K, FRAGMENT, LANE_K, Lane, MmaWeights, Part, Rows, STEP_K, STEPS, Weights, accumulate_mma, dense, grouped,
    unroll,
};
use crate::args::linear::{Bf16Weights, GemmArgs, GroupedGemmArgs};

impl MmaWeights for Bf16Weights {
    /// Step by step, the lane's rows `g` and `g + 8`.
    type Chunk = [[[u32; 4]; 2]; STEPS];

    #[inline(always)]
    fn load(&self, part: Part, lane: Lane, chunk: usize) -> Self::Chunk {
        let [low, high] = part.weight_rows(lane);
        let mut held = [[[0; 4]; 2]; STEPS];
        unroll!(step < STEPS, {
            let k = chunk * CHUNK_K + step * STEP_K + lane.c * LANE_K;
            if k < part.k {
                held[step] = [self.rows.ld16_stream(low * part.k + k), self.rows.ld16_stream(high * part.k + k)];
            }
        });
        held
    }

    #[inline(always)]
    fn operands(chunk: &Self::Chunk, step: usize) -> [[u32; 4]; 2] {
        let [low, high] = chunk[step];
        [[low[0], high[0], low[1], high[1]], [low[2], high[2], low[3], high[3]]]
    }

    #[inline(always)]
    fn fold(_: &Self::Chunk, _: usize, products: [f32; FRAGMENT], sums: &mut [f32; FRAGMENT]) {
        unroll!(i < FRAGMENT, { sums[i] += products[i] });
    }
}

impl Weights for Bf16Weights {
    type X = bf16;

    #[inline(always)]
    fn accumulate<R: Rows, const TILES: usize>(
        &self,
        part: Part,
        x: Global<bf16>,
        rows: R,
        sums: &mut [[f32; FRAGMENT]; TILES],
    ) {
        accumulate_mma(self, part, x, rows, sums);
    }
}

/// Up to 8 rows a block.
#[kernel]
pub fn gemm_bf16_m8(a: GemmArgs<Bf16Weights, bf16>) {
    dense::<_, 1>(a);
}

/// Up to 64 rows a block: the weights are read once for all of them.
#[kernel]
pub fn gemm_bf16_m64(a: GemmArgs<Bf16Weights, bf16>) {
    dense::<_, 8>(a);
}

/// Rows gathered by expert.
#[kernel]
pub fn grouped_gemm_bf16(a: GroupedGemmArgs<Bf16Weights, bf16>) {
    grouped(a);
}
