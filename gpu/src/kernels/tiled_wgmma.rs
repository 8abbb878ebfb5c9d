//! Products for many rows by warpgroups (`wgmma`, sm_90a): weights are the first operand, from registers, and rows of x
//! the second, in shared memory, where bulk copies bring them from the panels that [`super::panels`] has made.
//!
//! ```text
//!               m: 128 rows of x             a block owns 8 tiles of 16 weight rows, one a warp, and 128 rows of x,
//!            +-------------------+           all of which each warp multiplies, for all of k
//!      n     | warp 0            |
//!   weights  | ...               |           stage of shared memory, two chunks of 64 k:
//!            | warp 7            |             x       two panels
//!            +-------------------+             weights [8 tiles][2 chunks], as they lie in memory
//! ```
//!
//! A warp brings its weights, the first one the rows of x too. Two barriers in shared memory a stage say when it is
//! full and when all warps have read it, so no warp waits for the slowest of a block: while one warpgroup adds up, the
//! other multiplies. A warp makes the operands of the next two chunks while the tensor cores multiply two.
//!
//! * bf16 weights are operands as they lie.
//! * 4-bit weights become `q * s` in f16, exactly: see [`math::dequant_scaled`]. All scales of a matrix are multiplied
//!   by one power of two that brings them into f16's range; the caller takes this kernel only for matrices of which
//!   that leaves every scale exact. x is f16 too, with a power of two a row. Both are undone in f32 at the end.
//!
//! The sums: 256 k from zero by the tensor cores, then added in f32, in ascending order of k. No slices: last bits
//! differ from those of the other kernels. They do not depend on other rows or their number.

use cuda_std::{kernel, math};

use super::gemm_bf16::Bf16;
use super::gemm_w4a16::{Scale, W4a16};
use super::panels::{PAIR, PAIR_WORDS};
use super::stream::{Format, WARPS};
use crate::args::linear::PanelProductArgs;

pub use super::panels::ROWS;

/// Tiles of weights of a block.
pub const TILES: usize = WARPS as usize;

/// A format whose weights can be operands of `wgmma`.
pub trait Operand: Format {
    /// Whether operands are f16, not bf16.
    const HALF: bool;

    /// The first operands of both products of a step. `factor`: see [`PanelProductArgs`].
    fn operand(chunk: &Self::Chunk, step: usize, factor: f32) -> [[u32; 4]; 2];
}

impl Operand for Bf16 {
    const HALF: bool = false;

    #[inline(always)]
    fn operand(chunk: &Self::Chunk, step: usize, _: f32) -> [[u32; 4]; 2] {
        Self::operands(chunk, step)
    }
}

impl<S: Scale> Operand for W4a16<S> {
    const HALF: bool = true;

    #[inline(always)]
    fn operand(chunk: &Self::Chunk, step: usize, factor: f32) -> [[u32; 4]; 2] {
        let [first, second] = Self::codes(chunk, step);
        let scales = Self::scales(chunk, step).map(|scale| math::pack_half(scale * factor, scale * factor));
        [math::dequant_scaled(first, scales), math::dequant_scaled(second, scales)]
    }
}

/// The exponents that scales may have once `factor` has been applied: eight times the largest is below 65,504, and the
/// last of eight digits of the least is 2^-24.
pub const LARGEST_SCALE: i32 = 12;
pub const LEAST_SCALE: i32 = -17;

/// Words of a stage.
const fn stage_words(tile_words: usize) -> usize {
    PAIR_WORDS + TILES * PAIR * tile_words
}

/// Bytes of dynamic shared memory: the stages, then two barriers each.
pub const fn shared_bytes(depth: usize, tile_words: usize) -> u32 {
    (depth * (stage_words(tile_words) * size_of::<u32>() + 2 * size_of::<u64>())) as u32
}

/// Stages of bf16 weights.
pub const BF16_DEPTH: usize = 3;
/// Stages of 4-bit weights.
pub const W4A16_DEPTH: usize = 5;

/// The hardware's rule for rows of 128 bytes wants panels at multiples of this.
const PANEL_ALIGN: usize = 1024;

const _: () = {
    let bf16_scaled = <cuda_std::bf16 as Scale>::TILE_WORDS;
    assert!((stage_words(Bf16::TILE_WORDS) * size_of::<u32>()).is_multiple_of(PANEL_ALIGN));
    assert!((stage_words(bf16_scaled) * size_of::<u32>()).is_multiple_of(PANEL_ALIGN));
    assert!(shared_bytes(BF16_DEPTH, Bf16::TILE_WORDS) <= crate::SHARED_LIMIT_LARGE);
    assert!(shared_bytes(W4A16_DEPTH, bf16_scaled) <= crate::SHARED_LIMIT_LARGE);
};

#[cfg(any(not(target_arch = "nvptx64"), target_feature = "sm_90a"))]
mod product {
    use cuda_std::bulk::{self, Barriers};
    use cuda_std::{Global, Shared, dynamic_shared, thread, warp, wgmma};

    use super::super::panels::{PAIR, PAIR_WORDS, ROWS, pairs};
    use super::super::stream::{CHUNK_K, FRAGMENT, Lane, TILE_M, TILE_N, WARPS, chunk_index};
    use super::super::stream_rows::{Rows, Strided};
    use super::super::tiled::{Place, THREADS};
    use super::{Operand, TILES, stage_words};
    use crate::args::linear::PanelProductArgs;
    use crate::unroll::unroll;

    const LANES: usize = warp::WARP as usize;
    /// Tiles of rows of x.
    const MT: usize = ROWS / TILE_M;
    /// Sums of a warp: its 16 weight rows, all rows of x.
    type Sums = [[f32; FRAGMENT]; MT];
    /// First operands of a pair of chunks: chunk, step, product of 16 k, register.
    type Operands = [[[[u32; 4]; 2]; 2]; PAIR];

    /// A stage, and which time around the ring it is.
    #[derive(Clone, Copy)]
    struct At {
        stage: u32,
        parity: u32,
    }

    impl At {
        #[inline(always)]
        fn next(self, depth: u32) -> Self {
            let wraps = self.stage + 1 == depth;
            Self { stage: if wraps { 0 } else { self.stage + 1 }, parity: self.parity ^ wraps as u32 }
        }
    }

    /// The block's stages and what fills them.
    #[derive(Clone, Copy)]
    struct Stages<const DEPTH: usize> {
        barriers: Barriers,
        panels: Global<u32>,
        /// The warp's tile.
        weights: Global<u32>,
        chunks: u32,
    }

    impl<const DEPTH: usize> Stages<DEPTH> {
        #[inline(always)]
        fn words(tile_words: usize, stage: u32) -> Shared<u32> {
            let words = stage_words(tile_words);
            dynamic_shared((stage as usize * words * size_of::<u32>()) as u32, words as u32)
        }

        /// Starts filling a stage with the weights of pair `pair` of the chunks, those of the warp's tile, and
        /// announces all that the warp will bring: the first one brings the rows of x too. One lane of each warp.
        #[inline(always)]
        fn fill_weights(&self, tile_words: usize, warp: usize, stage: u32, pair: u32) {
            let (to, full) = (Self::words(tile_words, stage), stage as usize);
            let own = PAIR * tile_words;
            let words = if warp == 0 { own + PAIR_WORDS } else { own };
            self.barriers.arrive_expecting(full, (words * size_of::<u32>()) as u32);
            let (from, at) = (pair as usize * own, PAIR_WORDS + warp * own);
            if pair * (PAIR as u32) + 1 < self.chunks {
                bulk::copy(to, at, self.weights, from, own, self.barriers, full);
            } else {
                // Behind the last chunk x is zero: any weights of the tile will do.
                bulk::copy(to, at, self.weights, from, tile_words, self.barriers, full);
                bulk::copy(to, at + tile_words, self.weights, from, tile_words, self.barriers, full);
            }
        }

        /// The same with the rows of x. One thread.
        #[inline(always)]
        fn fill_x(&self, tile_words: usize, stage: u32, pair: u32) {
            let to = Self::words(tile_words, stage);
            let from = pair as usize * PAIR_WORDS;
            bulk::copy(to, 0, self.panels, from, PAIR_WORDS, self.barriers, stage as usize);
        }

        /// The operands of a warp of a stage.
        #[inline(always)]
        fn operands<F: Operand>(stage: u32, factor: f32) -> Operands {
            let thread = (thread::opaque(thread::thread_idx_x()) % THREADS) as usize;
            let lane = Lane { g: thread % LANES / 4, c: thread % 4 };
            let (words, warp) = (Self::words(F::TILE_WORDS, stage), thread / LANES);
            let mut a = [[[[0; 4]; 2]; 2]; PAIR];
            unroll!(i in 0 1; {
                let held = F::load(words, PAIR_WORDS + (warp * PAIR + i) * F::TILE_WORDS, lane);
                unroll!(step in 0 1; { a[i][step] = F::operand(&held, step, factor) });
            });
            a
        }

        #[inline(always)]
        fn panel(tile_words: usize, stage: u32) -> [Shared<u32>; PAIR] {
            let words = Self::words(tile_words, stage);
            [words.slice(0, PAIR_WORDS / PAIR), words.slice(PAIR_WORDS / PAIR, PAIR_WORDS / PAIR)]
        }
    }

    #[inline(always)]
    fn multiply<F: Operand, const DEPTH: usize>(a: &PanelProductArgs) -> Sums {
        let place = Place::of((a.shape.n, a.row_blocks), TILES as u32, thread::block_idx_x());
        let (warp, lane) = (warp::warp_id() as usize, warp::lane_id());
        // Tiles past the last are read as the last, whose sums are not stored.
        let last = a.shape.n.div_ceil(TILE_N as u32) - 1;
        let tile = (place.run * TILES as u32 + warp as u32).min(last);
        let pairs = pairs(a.shape.k);
        let panels = (place.matrix * a.row_blocks + place.block) as usize * pairs as usize * PAIR_WORDS;
        let (n, k) = (a.shape.n, a.shape.k);
        let chunks = k.div_ceil(CHUNK_K as u32);
        let start = chunk_index(place.matrix, n, k, tile, 0) as usize * F::TILE_WORDS;
        let bars = (DEPTH * stage_words(F::TILE_WORDS) * size_of::<u32>()) as u32;
        let stages = Stages::<DEPTH> {
            // Full, then empty.
            barriers: Barriers::new(dynamic_shared(bars, 2 * DEPTH as u32)),
            panels: a.panels.slice(panels, pairs as usize * PAIR_WORDS),
            weights: a.weights.slice(start, chunks as usize * F::TILE_WORDS),
            chunks,
        };
        let leads = thread::thread_idx_x() == 0;
        if leads {
            unroll!(stage in 0 1 2 3 4 5 6 7 below DEPTH; {
                stages.barriers.init(stage, WARPS);
                stages.barriers.init(DEPTH + stage, WARPS);
            });
            bulk::fence_init();
        }
        thread::sync_threads();
        let first = pairs.min(DEPTH as u32);
        if lane == 0 {
            let mut pair = 0;
            while pair < first {
                stages.fill_weights(F::TILE_WORDS, warp, pair, pair);
                pair += 1;
            }
        }
        // Weights are older than the launch before this one, rows of x are not.
        thread::wait_for_previous();
        thread::start_next();
        if leads {
            let mut pair = 0;
            while pair < first {
                stages.fill_x(F::TILE_WORDS, pair, pair);
                pair += 1;
            }
        }
        // The warp has read a stage.
        let leave = |at: At| {
            warp::sync_warp();
            if lane == 0 {
                stages.barriers.arrive(DEPTH + at.stage as usize);
            }
        };
        // Fills the stage that held pair `pair` anew. It comes a pair late: all warps have left it by now, or nearly.
        let refill = |at: At, pair: u32| {
            let next = pair + DEPTH as u32;
            if lane == 0 && next < pairs {
                if leads {
                    stages.barriers.wait(DEPTH + at.stage as usize, at.parity);
                    stages.fill_x(F::TILE_WORDS, at.stage, next);
                }
                stages.fill_weights(F::TILE_WORDS, warp, at.stage, next);
            }
        };
        let start = |stage: u32, a: &Operands| {
            let panel = Stages::<DEPTH>::panel(F::TILE_WORDS, stage);
            if F::HALF { wgmma::start_pair::<true>(a, panel) } else { wgmma::start_pair::<false>(a, panel) }
        };
        let add = |stage: u32, a: &Operands, sums: &mut Sums| {
            let panel = Stages::<DEPTH>::panel(F::TILE_WORDS, stage);
            if F::HALF { wgmma::add_pair::<true>(sums, a, panel) } else { wgmma::add_pair::<false>(sums, a, panel) }
        };
        let operands = |at: At| {
            stages.barriers.wait(at.stage as usize, at.parity);
            Stages::<DEPTH>::operands::<F>(at.stage, a.factor)
        };

        let mut sums: Sums = [[0.0; FRAGMENT]; MT];
        let mut at = At { stage: 0, parity: 0 };
        let mut before = at;
        let mut pair = 0;
        let mut even = operands(at);
        loop {
            let mut products = start(at.stage, &even);
            if pair > 0 {
                refill(before, pair - 1);
            }
            if pair + 1 < pairs {
                let next = at.next(DEPTH as u32);
                let mut odd = operands(next);
                add(next.stage, &odd, &mut products);
                wgmma::wait_sums::<1>(&mut products, &mut even);
                leave(at);
                let last = next;
                // Behind the last there are no more: its own again.
                let next = if pair + 2 < pairs { last.next(DEPTH as u32) } else { last };
                even = operands(next);
                refill(at, pair);
                wgmma::wait_sums::<0>(&mut products, &mut odd);
                leave(last);
                (before, at) = (last, next);
            } else {
                wgmma::wait_sums::<0>(&mut products, &mut even);
            }
            unroll!(m in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 below MT; {
                unroll!(i in 0 1 2 3; { sums[m][i] += products[m][i] });
            });
            pair += 2;
            if pair >= pairs {
                return sums;
            }
        }
    }

    #[inline(always)]
    pub fn dense<F: Operand, const DEPTH: usize>(a: PanelProductArgs) {
        let totals = multiply::<F, DEPTH>(&a);
        let place = Place::of((a.shape.n, a.row_blocks), TILES as u32, thread::opaque(thread::block_idx_x()));
        let rows = Strided::of(a.rows, place.matrix, place.block);
        let undo = (place.matrix * a.row_blocks + place.block) as usize * ROWS;
        let thread = (thread::opaque(thread::thread_idx_x()) % THREADS) as usize;
        let (warp, lane) = (thread / LANES, thread % LANES);
        let first = (place.run as usize * TILES + warp) * TILE_N + lane / 4;
        unroll!(m in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 below MT; {
            unroll!(column in 0 1; {
                let row = m * TILE_M + lane % 4 * 2 + column;
                if row < rows.count() {
                    let undo = if F::HALF { a.undo.get(undo + row) } else { 1.0 };
                    unroll!(half in 0 1; {
                        let n = first + half * TILE_M;
                        if n < a.shape.n as usize {
                            let mut sum = totals[m][half * 2 + column];
                            if F::HALF {
                                sum = sum * undo * a.undo_factor;
                            }
                            let to = rows.y(row) + n;
                            a.y.set(to, if a.rows.accumulate != 0 { a.y.get(to) + sum } else { sum });
                        }
                    });
                }
            });
        });
    }
}

#[cfg(not(any(not(target_arch = "nvptx64"), target_feature = "sm_90a")))]
mod product {
    pub fn dense<F: super::Operand, const DEPTH: usize>(_: super::PanelProductArgs) {
        cuda_std::thread::trap("wgmma on a target without");
    }
}

/// bf16 weights.
#[kernel]
pub fn gemm_bf16_wgmma(a: PanelProductArgs) {
    product::dense::<Bf16, BF16_DEPTH>(a);
}

/// 4-bit weights, bf16 scales.
#[kernel]
pub fn gemm_w4a16_wgmma(a: PanelProductArgs) {
    product::dense::<W4a16<cuda_std::bf16>, W4A16_DEPTH>(a);
}
