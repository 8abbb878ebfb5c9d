//! Launchers of [`gpu::kernels::query`], [`gpu::kernels::kv_append`] and [`gpu::kernels::head_norm_rope`]: what
//! attention reads, rotated and rounded.

use cuda_std::{Global, GlobalMut, Kernel, bf16};
use gpu::args::attention::{HeadNormRopeArgs, KEY, KvAppendArgs, LATENT, QueryArgs, ROPE};
use gpu::kernels::{head_norm_rope as head_kernel, kv_append as kv_kernel, query as query_kernel};

use super::{Cache, KvFormat, aligned, contract, state_holds};
use crate::device::{Device, Dims, Result};

/// Rotation tables on the device, `[positions, dim / 2]` each.
#[derive(Clone, Copy)]
pub struct Rope {
    pub cos: Global<f32>,
    pub sin: Global<f32>,
}

impl Rope {
    /// No rotation.
    pub const NONE: Self = Self { cos: Global::EMPTY, sin: Global::EMPTY };

    fn check(self, kernel: &'static str, pairs: usize) -> Result<()> {
        let (cos, sin) = (self.cos.len(), self.sin.len());
        contract(kernel, cos == sin && cos.is_multiple_of(pairs), || {
            format!("tables of {cos} cosines and {sin} sines, expected rows of {pairs} each")
        })
    }
}

/// Absorbed queries: `out[r, h] = [bf16(q_lat[r, h]) | bf16(rotate(q[r, h, nope..], S + depths[r]))]`.
pub struct Query {
    /// `[rows, heads, nope + ROPE]`.
    pub q: Global<f32>,
    /// `[rows, heads, LATENT]`.
    pub q_lat: Global<f32>,
    pub rope: Rope,
    /// `[rows]`.
    pub depths: Global<u32>,
    pub state: Global<u32>,
    /// `[rows, heads, KEY]`.
    pub out: GlobalMut<bf16>,
    pub rows: usize,
    pub heads: usize,
    pub nope: usize,
}

/// Queues the queries of `rows` rows.
pub fn query(device: &Device, p: Query) -> Result<()> {
    let name = query_kernel::QUERY.name();
    let queries = p.rows * p.heads;
    state_holds(name, p.state.len())?;
    p.rope.check(name, ROPE / 2)?;
    contract(name, p.depths.len() >= p.rows, || format!("{} depths for {} rows", p.depths.len(), p.rows))?;
    let holds = [("q", p.q.len(), p.nope + ROPE), ("q_lat", p.q_lat.len(), LATENT), ("the output", p.out.len(), KEY)];
    for (what, len, each) in holds {
        contract(name, len >= queries * each, || {
            format!("{what} holds {len}, expected [{}, {}, {each}]", p.rows, p.heads)
        })?;
    }
    aligned(name, "the output", p.out.addr(), 4)?;
    let args = QueryArgs {
        q: p.q,
        q_lat: p.q_lat,
        cos: p.rope.cos,
        sin: p.rope.sin,
        depths: p.depths,
        state: p.state,
        out: p.out,
        heads: p.heads as u32,
        nope: p.nope as u32,
    };
    let dims = Dims { grid: [queries as u32, 1, 1], block: [query_kernel::THREADS, 1, 1], shared: 0 };
    device.launch_overlapping(&query_kernel::QUERY, dims, args)
}

/// New cache rows of one layer: slot S + r gets `[bf16(rms_norm(t[r, ..LATENT])) | bf16(rotate(t[r, LATENT..]))]`, its
/// latent in e4m3 with scales if the cache is f8.
pub struct KvAppend {
    /// `[rows, KEY]`.
    pub t: Global<f32>,
    /// `[LATENT]`.
    pub weight: Global<f32>,
    pub eps: f32,
    pub rope: Rope,
    /// `[rows]`.
    pub depths: Global<u32>,
    pub state: Global<u32>,
    /// Of one layer. Slots up to S + rows must exist: the kernel traps past the last.
    pub cache: Cache,
    pub rows: usize,
}

/// Queues the append of `rows` rows. The committed length stays.
pub fn kv_append(device: &Device, p: KvAppend) -> Result<()> {
    let kernel: &Kernel<KvAppendArgs> = match p.cache.format {
        KvFormat::Bf16 => &kv_kernel::KV_APPEND,
        KvFormat::F8 => &kv_kernel::KV_APPEND_F8,
    };
    let name = kernel.name();
    state_holds(name, p.state.len())?;
    p.rope.check(name, ROPE / 2)?;
    contract(name, p.depths.len() >= p.rows, || format!("{} depths for {} rows", p.depths.len(), p.rows))?;
    contract(name, p.weight.len() == LATENT, || format!("weight has {}, expected {LATENT}", p.weight.len()))?;
    contract(name, p.t.len() >= p.rows * KEY, || format!("t holds {}, expected [{}, {KEY}]", p.t.len(), p.rows))?;
    p.cache.check(name, p.rows)?;
    aligned(name, "t", p.t.addr(), 16)?;
    aligned(name, "weight", p.weight.addr(), 16)?;
    aligned(name, "cache", p.cache.bytes.addr(), 8)?;
    let args = KvAppendArgs {
        t: p.t,
        weight: p.weight,
        cos: p.rope.cos,
        sin: p.rope.sin,
        depths: p.depths,
        state: p.state,
        cache: p.cache.bytes,
        eps: p.eps,
    };
    let dims = Dims { grid: [p.rows as u32, 1, 1], block: [kv_kernel::THREADS, 1, 1], shared: 0 };
    device.launch_overlapping(kernel, dims, args)
}

/// The drafter's heads: norm over a head (if `weight`), rotation of halves (if `rope`), rounded to row
/// `(S if to_cache else 0) + base + r` of `out`; position S + base + r.
pub struct HeadNormRope {
    /// `[rows, heads, head_dim]`.
    pub x: Global<f32>,
    /// `[head_dim]`, or `EMPTY`.
    pub weight: Global<f32>,
    pub eps: f32,
    /// Of `head_dim`, or `Rope::NONE`.
    pub rope: Rope,
    pub state: Global<u32>,
    /// Rows of `stride`, `heads * head_dim` of each are written. The kernel traps past the end.
    pub out: GlobalMut<bf16>,
    pub rows: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub stride: usize,
    pub base: usize,
    pub to_cache: bool,
}

/// Queues `rows` rows of heads.
pub fn head_norm_rope(device: &Device, p: HeadNormRope) -> Result<()> {
    let name = head_kernel::HEAD_NORM_ROPE.name();
    let width = p.heads * p.head_dim;
    state_holds(name, p.state.len())?;
    contract(name, p.head_dim > 0 && p.head_dim.is_multiple_of(2), || {
        format!("head_dim is {}; an even number is possible", p.head_dim)
    })?;
    p.rope.check(name, p.head_dim / 2)?;
    contract(name, p.weight.is_empty() || p.weight.len() == p.head_dim, || {
        format!("weight has {}, head_dim is {}", p.weight.len(), p.head_dim)
    })?;
    contract(name, width <= p.stride, || format!("{} heads of {} in a stride of {}", p.heads, p.head_dim, p.stride))?;
    contract(name, p.x.len() >= p.rows * width, || {
        format!("x holds {}, expected [{}, {}, {}]", p.x.len(), p.rows, p.heads, p.head_dim)
    })?;
    contract(name, p.rows == 0 || p.out.len() >= (p.base + p.rows - 1) * p.stride + width, || {
        format!("the output holds {}, {} rows of {} after {} are written", p.out.len(), p.rows, p.stride, p.base)
    })?;
    let args = HeadNormRopeArgs {
        x: p.x,
        weight: p.weight,
        cos: p.rope.cos,
        sin: p.rope.sin,
        state: p.state,
        out: p.out,
        heads: p.heads as u32,
        head_dim: p.head_dim as u32,
        stride: p.stride as u32,
        base: p.base as u32,
        to_cache: p.to_cache as u32,
        eps: p.eps,
    };
    let grid = [p.rows as u32, (p.heads as u32).div_ceil(head_kernel::HEADS), 1];
    device.launch(&head_kernel::HEAD_NORM_ROPE, Dims { grid, block: [head_kernel::THREADS, 1, 1], shared: 0 }, args)
}
