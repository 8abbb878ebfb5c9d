//! A block's tiles of [`super::mla_attention`]: where they lie in shared memory, how keys get there, the two products.
//!
//! ```text
//! queries | latent of stage 0, of stage 1 | side 0, 1, 2 | maxima, sums, bases, flags
//! ```
//!
//! All tiles are panels of 64 columns, 128 bytes a row: 9 of queries, 8 of latents (the values), one of rotary keys.
//! The 16-byte pieces of a row are permuted by its number (piece p of row r lies at p xor r mod 8), so that copies,
//! `ldmatrix` and `ldmatrix.trans` each touch all banks once.
//!
//! The latents of an f8 cache come as they lie there, codes and scales, to where the other cache's second stage is, and
//! are widened into the first before a round ([`widen`]).
//!
//! The three sides are smaller than what passes through them in a round: side 0 holds the rotary keys of stage 0, side
//! 2 those of stage 1. Once all warps have the scores of a stage, its rotary keys are dead and its weights take their
//! place; and the side of the other stage together with side 1 carries the halves of the scores from warp to warp,
//! because the next rotary keys are fetched only behind that.

use cuda_std::async_copy::cp_async_16_or_zero;
use cuda_std::{Global, Shared, bf16, dynamic_shared, math, mma, thread, warp};

use super::fragments::{PIECE, Sums, TILE};
use super::mla_attention::THREADS;
use crate::args::attention::{F8_GROUP, F8_ROTARY, F8_ROW, F8_SCALES, KEY, LATENT};
use crate::unroll::unroll;

/// Columns of a panel.
pub const PANEL: usize = 64;
/// Panels of a latent, and of a key.
const LATENT_PANELS: usize = LATENT / PANEL;
const KEY_PANELS: usize = KEY / PANEL;
/// Pieces of a panel's row, and of a key.
const PANEL_PIECES: usize = PANEL / PIECE;
const LATENT_PIECES: usize = LATENT / PIECE;
const KEY_PIECES: usize = KEY / PIECE;
/// Warps of a block; half of them for each half of a panel's columns in the product of scores.
pub const WARPS: usize = (THREADS / warp::WARP) as usize;
const HALVES: usize = 2;
const PLACES: usize = WARPS / HALVES;
/// Keys whose latents a block copies in one go.
const COPY_KEYS: usize = THREADS as usize / LATENT_PIECES;
/// Neighbouring pieces of a query that a block copies in one go, one tile of queries.
const COPY_LANES: usize = THREADS as usize / TILE;
/// A row of an f8 cache in words of two bytes, pieces of its codes and scales, and the distance of such rows in shared
/// memory: half of the banks from one to the next.
const F8_WORDS: usize = F8_ROW / size_of::<bf16>();
const F8_PIECES: usize = F8_ROTARY / size_of::<bf16>() / PIECE;
pub const F8_STRIDE: usize = LATENT / 2 + PANEL / 2;
/// Codes of a piece.
const CODES: usize = 2 * PIECE;
/// Neighbouring keys whose weights are summed together.
pub const SUM_KEYS: usize = 16;

const _: () = assert!(WARPS == LATENT_PANELS, "a warp owns one panel of values");
const _: () = assert!(F8_STRIDE >= F8_PIECES * PIECE && F8_STRIDE <= LATENT);
const _: () = assert!(F8_STRIDE / PIECE % 8 == 4 && F8_GROUP.is_multiple_of(PANEL));

/// How a block is divided: `tiles` tiles of 16 queries in all; a warp scores `own` of them against `keys8` times 8
/// keys.
#[derive(Clone, Copy)]
pub struct Shape {
    pub tiles: usize,
    pub own: usize,
    pub keys8: usize,
}

impl Shape {
    /// Packed queries of a block.
    pub const fn rows(self) -> usize {
        self.tiles * TILE
    }

    /// Groups of warps along the keys.
    pub const fn columns(self) -> usize {
        PLACES * self.own / self.tiles
    }

    /// Keys of a round.
    pub const fn keys(self) -> usize {
        8 * self.keys8 * self.columns()
    }

    /// Sums that a warp keeps of a row.
    pub const fn sums(self) -> usize {
        self.keys8.div_ceil(SUM_KEYS / 8)
    }

    const fn panel_bytes(rows: usize) -> usize {
        rows * PANEL * size_of::<bf16>()
    }

    /// Bytes of a side: the rotary keys, or the weights, or half of the scores that change hands.
    const fn side_bytes(self) -> usize {
        let scores = THREADS as usize * self.own * self.keys8 * 2 * size_of::<f32>() / 2;
        let (keys, weights) = (Self::panel_bytes(self.keys()), Self::panel_bytes(self.rows()));
        let most = if keys > weights { keys } else { weights };
        if scores > most { scores } else { most }
    }

    const fn latent_at(self) -> usize {
        KEY_PANELS * Self::panel_bytes(self.rows())
    }

    const fn sides_at(self) -> usize {
        self.latent_at() + 2 * LATENT_PANELS * Self::panel_bytes(self.keys())
    }

    const fn stats_at(self) -> usize {
        self.sides_at() + 3 * self.side_bytes()
    }

    /// Words behind the tiles: maxima and sums of each group of warps, bases, two flags.
    const fn stats(self) -> usize {
        self.rows() * (self.columns() + self.columns() * self.sums() + 1) + 2
    }

    /// Bytes of dynamic shared memory of a block.
    pub const fn shared_bytes(self) -> u32 {
        (self.stats_at() + self.stats() * size_of::<f32>()) as u32
    }
}

/// A block's shared memory.
#[derive(Clone, Copy)]
pub struct Tiles {
    pub queries: Shared<bf16>,
    /// `[WARPS groups, rows]`: largest score of a round.
    pub maxima: Shared<f32>,
    /// `[groups, rows]`.
    pub sums: Shared<f32>,
    /// `[rows]`: what is subtracted from scores.
    pub bases: Shared<f32>,
    /// Whether a base must grow, one flag for even rounds and one for odd.
    pub flags: Shared<u32>,
    shape: Shape,
}

impl Tiles {
    #[inline(always)]
    pub fn new(shape: Shape) -> Self {
        let (rows, columns) = (shape.rows(), shape.columns());
        let at = |words: usize| (shape.stats_at() + words * size_of::<f32>()) as u32;
        let sums = columns * shape.sums();
        Self {
            queries: dynamic_shared(0, (rows * KEY) as u32),
            maxima: dynamic_shared(at(0), (columns * rows) as u32),
            sums: dynamic_shared(at(columns * rows), (sums * rows) as u32),
            bases: dynamic_shared(at((columns + sums) * rows), rows as u32),
            flags: dynamic_shared(at((columns + sums + 1) * rows), 2),
            shape,
        }
    }

    /// Latents of a stage.
    #[inline(always)]
    pub fn latent(self, stage: usize) -> Shared<bf16> {
        let values = self.shape.keys() * LATENT;
        dynamic_shared((self.shape.latent_at() + stage * values * size_of::<bf16>()) as u32, values as u32)
    }

    /// Rotary keys of a stage, then its weights.
    #[inline(always)]
    pub fn side(self, stage: usize) -> Shared<bf16> {
        let bytes = self.shape.side_bytes();
        dynamic_shared((self.shape.sides_at() + 2 * stage * bytes) as u32, (bytes / size_of::<bf16>()) as u32)
    }

    /// Scores that change hands in a round of `stage`: the two sides that are not its own.
    #[inline(always)]
    pub fn exchange(self, stage: usize) -> Shared<f32> {
        let bytes = self.shape.side_bytes();
        let from = self.shape.sides_at() + (1 - stage) * bytes;
        dynamic_shared(from as u32, (2 * bytes / size_of::<f32>()) as u32)
    }
}

/// This thread of the block. The remainder has no effect, but tells the compiler which bits are zero.
#[inline(always)]
pub fn thread_index() -> usize {
    (thread::thread_idx_x() % THREADS) as usize
}

/// Where a lane is: its warp's part of the scores, and its place in the fragments (see [`cuda_std::mma`]).
#[derive(Clone, Copy)]
pub struct Place {
    pub warp: usize,
    /// Half of each panel's columns, and afterwards of each tile's rows.
    pub half: usize,
    /// First query tile of the warp.
    pub tile0: usize,
    /// Group of warps along the keys.
    pub column: usize,
    pub lane: usize,
    pub group: usize,
    pub quad: usize,
}

impl Place {
    #[inline(always)]
    pub fn new(shape: Shape, thread: usize) -> Self {
        let (warp, lane) = (thread / warp::WARP as usize, thread % warp::WARP as usize);
        let place = warp % PLACES;
        Self {
            warp,
            half: warp / PLACES,
            tile0: place / shape.columns() * shape.own,
            column: place % shape.columns(),
            lane,
            group: lane / 4,
            quad: lane % 4,
        }
    }
}

impl Place {
    /// First key of a round that this lane's warp scores.
    #[inline(always)]
    pub fn first_key<const KEYS8: usize>(self) -> u32 {
        (self.column * KEYS8 * 8) as u32
    }
}

/// Element of piece `piece` of row `row` of a panel.
#[inline(always)]
pub fn piece_at(row: usize, piece: usize) -> usize {
    row * PANEL + (piece ^ (row % PANEL_PIECES)) * PIECE
}

/// Starts the copy of the block's queries; zeros behind the last.
#[inline(always)]
pub fn copy_queries(q: Global<bf16>, tiles: Tiles, query0: usize, queries: usize) {
    let rows = tiles.shape.rows();
    let t = thread_index();
    let (row, first) = (t / COPY_LANES, t % COPY_LANES);
    unroll!(tile in 0 1 below tiles.shape.tiles; {
        let (row, query) = (tile * TILE + row, query0 + tile * TILE + row);
        unroll!(i in 0 1 2 3 4; {
            let piece = first + i * COPY_LANES;
            if piece < KEY_PIECES {
                let to = piece / PANEL_PIECES * rows * PANEL + piece_at(row, piece % PANEL_PIECES);
                cp_async_16_or_zero(tiles.queries, to, q, query * KEY + piece * PIECE, query < queries);
            }
        });
    });
}

/// The keys that a block is copying: the round that starts at `key`, up to `last`; zeros behind it.
#[derive(Clone, Copy)]
pub struct Fetch<const F8: bool> {
    /// In words of two bytes, whatever they hold.
    pub cache: Global<bf16>,
    pub key: u32,
    pub last: u32,
    pub stage: usize,
}

impl<const F8: bool> Fetch<F8> {
    /// Words of a cache row, and where its rotary key begins.
    const ROW: usize = if F8 { F8_WORDS } else { KEY };
    const ROTARY: usize = if F8 { F8_ROTARY / size_of::<bf16>() } else { LATENT };

    /// Copies of [`Fetch::latent`] that make a stage.
    pub const fn parts(shape: Shape) -> usize {
        shape.keys() / COPY_KEYS
    }

    /// Starts the copy of part `part` of the latents.
    #[inline(always)]
    pub fn latent(self, tiles: Tiles, part: usize) {
        let t = thread_index();
        let (row, piece) = (part * COPY_KEYS + t / LATENT_PIECES, t % LATENT_PIECES);
        let to = piece / PANEL_PIECES * tiles.shape.keys() * PANEL + piece_at(row, piece % PANEL_PIECES);
        self.copy(tiles.latent(self.stage), to, row, piece * PIECE);
    }

    /// Starts the copy of the rotary keys.
    #[inline(always)]
    pub fn rotary(self, tiles: Tiles) {
        let mut i = thread_index();
        while i < tiles.shape.keys() * PANEL_PIECES {
            let (row, piece) = (i / PANEL_PIECES, i % PANEL_PIECES);
            self.copy(tiles.side(self.stage), piece_at(row, piece), row, Self::ROTARY + piece * PIECE);
            i += THREADS as usize;
        }
    }

    /// Starts all copies of the codes and scales of an f8 cache.
    #[inline(always)]
    pub fn codes(self, tiles: Tiles) {
        let mut i = thread_index();
        while i < tiles.shape.keys() * F8_PIECES {
            let (row, piece) = (i / F8_PIECES, i % F8_PIECES);
            self.copy(tiles.latent(1), row * F8_STRIDE + piece * PIECE, row, piece * PIECE);
            i += THREADS as usize;
        }
    }

    #[inline(always)]
    fn copy(self, to: Shared<bf16>, at: usize, row: usize, column: usize) {
        let from = (self.key as usize + row) * Self::ROW + column;
        cp_async_16_or_zero(to, at, self.cache, from, (row as u32) < self.last.saturating_sub(self.key));
    }
}

/// Scores of a warp: half of the columns, then (of half of the rows) all.
pub type Scores<const OWN: usize, const KEYS8: usize> = [[[f32; 4]; KEYS8]; OWN];

/// `s += q . k` over this warp's half of one panel.
#[inline(always)]
pub fn add_panel<const OWN: usize, const KEYS8: usize>(
    s: &mut Scores<OWN, KEYS8>,
    queries: Shared<bf16>,
    keys: Shared<bf16>,
    at: Place,
) {
    // Lane l names row l mod 16 and piece l / 16 of two for queries, row l mod 8 and piece l / 8 of four for keys.
    let (row, swizzle) = (at.lane % TILE, at.lane % PANEL_PIECES);
    let first = 4 * at.half;
    let query = row * PANEL + ((first + at.lane / TILE) ^ swizzle) * PIECE;
    let key = (at.column * KEYS8 * 8 + swizzle) * PANEL + ((first + at.lane / 8) ^ swizzle) * PIECE;
    let mut a = [[[0u32; 4]; 2]; OWN];
    unroll!(tile in 0 1 below OWN; {
        let tile0 = (at.tile0 + tile) * TILE * PANEL;
        a[tile] = [mma::ldmatrix_x4(queries, tile0 + query), mma::ldmatrix_x4(queries, tile0 + (query ^ (2 * PIECE)))];
    });
    let mut b = [[0u32; 4]; KEYS8];
    unroll!(n in 0 1 2 3 below KEYS8; {
        b[n] = mma::ldmatrix_x4(keys, key + n * 8 * PANEL);
    });
    // Products that follow each other go to different sums: one waits for the last to its own.
    unroll!(k in 0 1; {
        unroll!(n in 0 1 2 3 below KEYS8; {
            unroll!(tile in 0 1 below OWN; {
                mma::mma_m16n8k16(&mut s[tile][n], a[tile][k], [b[n][2 * k], b[n][2 * k + 1]]);
            });
        });
    });
}

/// `acc += w . v` over keys `16 step ..` of a round: all the block's rows, this warp's panel of values.
#[inline(always)]
pub fn add_values<const TILES: usize>(
    acc: &mut [Sums; TILES],
    weights: Shared<bf16>,
    panel: Shared<bf16>,
    lane: usize,
    step: usize,
) {
    let (row, swizzle) = (lane % TILE, lane % PANEL_PIECES);
    let piece = (lane / TILE) ^ swizzle;
    let value = (step * TILE + row) * PANEL;
    let mut v = [[0u32; 4]; 4];
    unroll!(j in 0 1 2 3; {
        v[j] = mma::ldmatrix_x4_trans(panel, value + (piece ^ (2 * j)) * PIECE);
    });
    let weight = row * PANEL + (piece ^ (2 * step)) * PIECE;
    unroll!(tile in 0 1 below TILES; {
        let w = mma::ldmatrix_x4(weights, tile * TILE * PANEL + weight);
        unroll!(j in 0 1 2 3; {
            mma::mma_m16n8k16(&mut acc[tile][2 * j], w, [v[j][0], v[j][1]]);
            mma::mma_m16n8k16(&mut acc[tile][2 * j + 1], w, [v[j][2], v[j][3]]);
        });
    });
}

/// Widens the codes of `keys` keys to panels of latents, by `threads` threads: each lane a piece of 16, two rows and
/// four panels a warp at a time, so that loads and stores touch all banks once.
#[inline(always)]
pub fn widen(codes: Shared<bf16>, to: Shared<bf16>, keys: usize, thread: usize, threads: usize) {
    let (warp, lane) = (thread / warp::WARP as usize, thread % warp::WARP as usize);
    let (quarter, panel0) = (lane % 4, lane / 8);
    let mut row = 2 * warp + lane / 4 % 2;
    while row < keys {
        let from = row * F8_STRIDE;
        unroll!(half in 0 1; {
            let panel = panel0 + half * LATENT_PANELS / 2;
            let scale = codes.ld4(from + F8_SCALES / 2 + panel / (F8_GROUP / PANEL) * 2);
            let factor = math::e4m3_factor(f32::from_bits(scale));
            let [a, b, c, d] = codes.ld16(from + (panel * PANEL + quarter * CODES) / 2);
            let ([a0, a1], [b0, b1]) = (math::e4m3_pairs(a, factor), math::e4m3_pairs(b, factor));
            let ([c0, c1], [d0, d1]) = (math::e4m3_pairs(c, factor), math::e4m3_pairs(d, factor));
            let panel = panel * keys * PANEL;
            to.st16(panel + piece_at(row, 2 * quarter), [a0, a1, b0, b1]);
            to.st16(panel + piece_at(row, 2 * quarter + 1), [c0, c1, d0, d1]);
        });
        row += 2 * (threads / warp::WARP as usize);
    }
}
