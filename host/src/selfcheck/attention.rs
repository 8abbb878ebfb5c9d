//! Checks of the attention side: queries, cache rows, both attentions, and the moves after an accepted path.

use cuda_std::bf16;
use gpu::args::attention::{KEY, LATENT, ROPE};
use gpu::kernels::mla_attention::PART_KEYS;

use super::Random;
use super::compare::{Found, Probe, close, close_bf16, equal, rounded};
use super::tokens::walked;
use crate::device::{self, Buffer, Device};
use crate::kernels::{
    self, BlockAttention, Cache, Commit, GatherRows, HeadNormRope, KvAppend, KvFormat, MlaAttention, MlaBlock, MlaPlan,
    Query, Rope, initial_state,
};
use crate::reference::{self, Tree, bounds};

const EPS: f32 = 1e-6;
/// A scale for random values in -1..1: scores of a few units.
const SCALE: f32 = 0.15;

/// Rotation tables of random angles on host and device, `[positions, pairs]`.
struct Tables {
    cos: Vec<f32>,
    sin: Vec<f32>,
    on_device: [Buffer<f32>; 2],
}

impl Tables {
    fn random(device: &Device, random: &mut Random, positions: usize, pairs: usize) -> device::Result<Self> {
        let angles = random.floats(positions * pairs);
        let cos: Vec<_> = angles.iter().map(|a| (3.0 * a).cos()).collect();
        let sin: Vec<_> = angles.iter().map(|a| (3.0 * a).sin()).collect();
        let on_device = [device.upload(&cos)?, device.upload(&sin)?];
        Ok(Self { cos, sin, on_device })
    }

    fn rope(&self) -> Rope {
        Rope { cos: self.on_device[0].view(), sin: self.on_device[1].view() }
    }
}

/// A tree of `rows` rows, two children a node.
fn tree(rows: usize) -> Tree {
    let nodes: Vec<_> = (1..rows).map(|row| (row as i32, (row - 1) / 2)).collect();
    Tree::of(0, &nodes, rows - 1)
}

fn positions(tree: &Tree, committed: usize) -> Vec<usize> {
    tree.depths.iter().map(|&depth| committed + depth as usize).collect()
}

pub fn query(p: &Probe) -> Found {
    let (rows, heads, nope, committed) = (5, 3, 128, 7);
    let (tree, mut random) = (tree(rows), Random::new(21));
    let (q, q_lat) = (random.floats(rows * heads * (nope + ROPE)), random.floats(rows * heads * LATENT));
    let tables = Tables::random(p.device, &mut random, committed + rows, ROPE / 2)?;
    let (dq, dlat) = (p.device.upload(&q)?, p.device.upload(&q_lat)?);
    let (depths, state) = (p.device.upload(&tree.depths)?, p.device.upload(&initial_state(committed as u32, 0, 0))?);
    let out = p.device.alloc(rows * heads * KEY)?;
    let args = Query {
        q: dq.view(),
        q_lat: dlat.view(),
        rope: tables.rope(),
        depths: depths.view(),
        state: state.view(),
        out: out.view_mut(),
        rows,
        heads,
        nope,
    };
    p.launch(|| kernels::query(p.device, args))?;
    let want = reference::query(&q, &q_lat, &tables.cos, &tables.sin, &positions(&tree, committed), heads);
    close_bf16("out", &out.read()?, &want, bounds::ROUNDED)
}

/// New rows behind the committed ones, which stay as they are.
pub fn kv_append(p: &Probe) -> Found {
    let (rows, committed) = (6, 9);
    let (tree, mut random) = (tree(rows), Random::new(22));
    let (t, weight) = (random.floats(rows * KEY), random.floats(LATENT));
    let tables = Tables::random(p.device, &mut random, committed + rows, ROPE / 2)?;
    let (dt, dw) = (p.device.upload(&t)?, p.device.upload(&weight)?);
    let (depths, state) = (p.device.upload(&tree.depths)?, p.device.upload(&initial_state(committed as u32, 0, 0))?);
    let before = vec![bf16::ONE; (committed + rows + 1) * KEY];
    let cache = p.device.upload(&before)?;
    let args = KvAppend {
        t: dt.view(),
        weight: dw.view(),
        eps: EPS,
        rope: tables.rope(),
        depths: depths.view(),
        state: state.view(),
        cache: Cache::bf16(cache.view_mut()),
        rows,
    };
    p.launch(|| kernels::kv_append(p.device, args))?;
    let (mut got, new) = (cache.read()?, committed * KEY..(committed + rows) * KEY);
    let want = reference::kv_append(&t, &weight, EPS, &tables.cos, &tables.sin, &positions(&tree, committed));
    let error = close_bf16("new rows", &got[new.clone()], &want, bounds::ROUNDED)?;
    got[new].fill(bf16::ONE);
    equal("the other rows", &got, &before)?;
    Ok(error)
}

/// As [`kv_append`], into a cache of codes: their values, and the other rows untouched.
pub fn kv_append_f8(p: &Probe) -> Found {
    let (rows, committed) = (6, 9);
    let (tree, mut random) = (tree(rows), Random::new(28));
    let (t, weight) = (random.floats(rows * KEY), random.floats(LATENT));
    let tables = Tables::random(p.device, &mut random, committed + rows, ROPE / 2)?;
    let (dt, dw) = (p.device.upload(&t)?, p.device.upload(&weight)?);
    let (depths, state) = (p.device.upload(&tree.depths)?, p.device.upload(&initial_state(committed as u32, 0, 0))?);
    let each = KvFormat::F8.row_bytes();
    let before = vec![7u8; (committed + rows + 1) * each];
    let cache = p.device.upload(&before)?;
    let args = KvAppend {
        t: dt.view(),
        weight: dw.view(),
        eps: EPS,
        rope: tables.rope(),
        depths: depths.view(),
        state: state.view(),
        cache: Cache::f8(cache.view_mut()),
        rows,
    };
    p.launch(|| kernels::kv_append(p.device, args))?;
    let (mut got, new) = (cache.read()?, committed * each..(committed + rows) * each);
    let want = reference::kv_append(&t, &weight, EPS, &tables.cos, &tables.sin, &positions(&tree, committed));
    let error = close_bf16("new rows", &reference::f8_values(&got[new.clone()]), &want, bounds::F8)?;
    got[new].fill(7);
    equal("the other rows", &got, &before)?;
    Ok(error)
}

/// Whether a device has the shared memory for a kernel: the launcher of some has others for those that have not.
pub fn fits(device: &Device, kernel: &str) -> bool {
    let is = |block: &MlaBlock| KvFormat::ALL.iter().any(|&kv| block.kernel(kv).name() == kernel);
    let block = MlaBlock::ALL.into_iter().find(is);
    block.is_none_or(|block| block.runs_on(device))
}

/// A few queries in one block.
pub fn mla_16(p: &Probe, kv: KvFormat) -> Found {
    mla(p, kv, MlaBlock::Rows16, 1, 100, 3, 2)
}

/// 33 queries: the second block is not full.
pub fn mla_32(p: &Probe, kv: KvFormat) -> Found {
    mla(p, kv, MlaBlock::Rows32, 1, 100, 11, 3)
}

pub fn mla_compact_16(p: &Probe, kv: KvFormat) -> Found {
    mla(p, kv, MlaBlock::Compact16, 1, 40, 3, 2)
}

pub fn mla_compact_32(p: &Probe, kv: KvFormat) -> Found {
    mla(p, kv, MlaBlock::Compact32, 1, 40, 11, 3)
}

/// 68 queries, by `wgmma`: the second block is not full.
pub fn mla_wide_64(p: &Probe, kv: KvFormat) -> Found {
    mla(p, kv, MlaBlock::Wide64, 1, 100, 17, 4)
}

pub fn mla_wide_halves(p: &Probe, kv: KvFormat) -> Found {
    mla(p, kv, MlaBlock::WideHalves, 2, 150, 17, 4)
}

pub fn mla_parts(p: &Probe, parts: usize) -> Found {
    mla(p, KvFormat::Bf16, MlaBlock::Compact16, parts, parts * PART_KEYS as usize + 8, 2, 4)
}

fn mla(p: &Probe, kv: KvFormat, block: MlaBlock, parts: usize, committed: usize, rows: usize, heads: usize) -> Found {
    let (plan, slots) = (MlaPlan { block, parts }, committed + rows + 4);
    let (tree, mut random) = (tree(rows), Random::new(23));
    let q = random.bf16s(rows * heads * KEY);
    let values = random.bf16s((committed + rows) * KEY);
    let (mut bytes, values): (Vec<u8>, _) = match kv {
        KvFormat::Bf16 => (values.iter().flat_map(|v| v.to_le_bytes()).collect(), values),
        KvFormat::F8 => {
            let bytes = reference::f8_rows(&values.iter().map(|v| v.to_f64()).collect::<Vec<_>>());
            let values = reference::f8_values(&bytes);
            (bytes, values)
        }
    };
    // NaN in either format.
    bytes.resize(slots * kv.row_bytes(), 0xFF);
    let (dq, d_cache, bits) = (p.device.upload(&q)?, p.device.upload(&bytes)?, p.device.upload(&tree.ancestors)?);
    let state = p.device.upload(&initial_state(committed as u32, 0, 0))?;
    let workspace = p.device.alloc(plan.workspace(rows, heads))?;
    let (out, out_bf16) = (p.device.alloc(rows * heads * LATENT)?, p.device.alloc(rows * heads * LATENT)?);
    let args = MlaAttention {
        q: dq.view(),
        cache: Cache { format: kv, bytes: d_cache.view_mut() },
        ancestors: bits.view(),
        state: state.view(),
        scale: SCALE,
        rows,
        heads,
        workspace: workspace.view_mut(),
        out_f32: out.view_mut(),
        out_bf16: out_bf16.view_mut(),
    };
    p.launch(|| kernels::mla_attention_as(p.device, args, plan))?;
    let out = out.read()?;
    rounded(&out, &out_bf16.read()?)?;
    let want = reference::mla_attention(&q, &values, &tree.ancestors, committed, rows, heads, SCALE);
    close("out", &out, &want, bounds::ATTENTION)
}

pub fn block_64(p: &Probe) -> Found {
    block(p, 4, 2, 64, None)
}

pub fn block_128(p: &Probe) -> Found {
    block(p, 2, 1, 128, Some(70))
}

fn block(p: &Probe, heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> Found {
    let (committed, rows, scale) = (121, 8, 0.3);
    let (mut random, visible) = (Random::new(24), committed + rows);
    let q = random.bf16s(rows * heads * head_dim);
    let mut cache = || {
        let mut values = random.bf16s(visible * kv_heads * head_dim);
        values.resize((visible + 20) * kv_heads * head_dim, bf16::NAN);
        values
    };
    let (k, v) = (cache(), cache());
    let (dq, dk, dv) = (p.device.upload(&q)?, p.device.upload(&k)?, p.device.upload(&v)?);
    let state = p.device.upload(&initial_state(committed as u32, 0, 0))?;
    let (out, out_bf16) = (p.device.alloc(q.len())?, p.device.alloc(q.len())?);
    let args = BlockAttention {
        q: dq.view(),
        k: dk.view(),
        v: dv.view(),
        state: state.view(),
        scale,
        rows,
        heads,
        kv_heads,
        head_dim,
        window,
        out_f32: out.view_mut(),
        out_bf16: out_bf16.view_mut(),
    };
    p.launch(|| kernels::block_attention(p.device, args))?;
    let out = out.read()?;
    rounded(&out, &out_bf16.read()?)?;
    let want = reference::block_attention(&q, &k, &v, committed, window, heads, kv_heads, head_dim, scale);
    close("out", &out, &want, bounds::ATTENTION)
}

/// One row of heads, behind the cache's committed rows.
pub fn head_norm_rope(p: &Probe) -> Found {
    let (heads, head_dim, committed, base) = (9, 128, 4, 2);
    let (mut random, row, width) = (Random::new(25), committed + base, heads * head_dim);
    let (x, weight) = (random.floats(width), random.floats(head_dim));
    let tables = Tables::random(p.device, &mut random, row + 1, head_dim / 2)?;
    let (dx, dw) = (p.device.upload(&x)?, p.device.upload(&weight)?);
    let state = p.device.upload(&initial_state(committed as u32, 0, 0))?;
    let out = p.device.alloc((row + 1) * width)?;
    let args = HeadNormRope {
        x: dx.view(),
        weight: dw.view(),
        eps: EPS,
        rope: tables.rope(),
        state: state.view(),
        out: out.view_mut(),
        rows: 1,
        heads,
        head_dim,
        stride: width,
        base,
        to_cache: true,
    };
    p.launch(|| kernels::head_norm_rope(p.device, args))?;
    let angles = Some((&tables.cos[..], &tables.sin[..]));
    let want = reference::head_norm_rope(&x, head_dim, Some(&weight), EPS, angles, row);
    close_bf16("heads", &out.read()?[row * width..], &want, bounds::ROUNDED)
}

pub fn commit(p: &Probe) -> Found {
    let (layers, slots, width, committed, path) = (3, 16, KEY, 10, [0, 2, 3, 5]);
    let mut cache = Random::new(26).bf16s(layers * slots * width);
    let (d_cache, state) = (p.device.upload(&cache)?, p.device.upload(&walked(committed, &path))?);
    let args = Commit { cache: d_cache.view_mut(), state: state.view(), layers, slots, width };
    p.launch(|| kernels::commit(p.device, args))?;
    reference::commit(&mut cache, slots, width, committed, &path);
    equal("cache", &d_cache.read()?, &cache)
}

/// Rows behind the path repeat row 0.
pub fn gather_rows(p: &Probe) -> Found {
    let (width, path, count) = (1028, [0, 2, 3, 6], 5);
    let src = Random::new(27).floats(7 * width);
    let (d_src, dst) = (p.device.upload(&src)?, p.device.alloc(count * width)?);
    let state = p.device.upload(&walked(9, &path))?;
    let args = GatherRows { src: d_src.view(), dst: dst.view_mut(), state: state.view(), count, width };
    p.launch(|| kernels::gather_rows(p.device, args))?;
    let rows = path.into_iter().chain([0]);
    let want: Vec<_> = rows.flat_map(|row| &src[row * width..(row + 1) * width]).copied().collect();
    equal("dst", &dst.read()?, &want)
}
