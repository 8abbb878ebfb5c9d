//! What stands before and after attention: queries and cache rows rotated to their positions, the drafter's heads, and
//! the drafter's own attention. `mla` has the target's.

use std::rc::Rc;

use cuda_std::bf16;
use gpu::args::attention::{KEY, LATENT, ROPE};

use super::{Case, Cases, Options, case, distance, prepared, refused, rows, size};
use crate::device::{Buffer, Device, Result};
use crate::kernels::{self, Cache, KvFormat, Rope, initial_state};
use crate::reference;

/// K2.6: heads, values of a head's query without rotation; its drafter: key heads, values of a head.
const HEADS: usize = 64;
const NOPE: usize = 128;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
/// Committed tokens where only a position is wanted of them.
const COMMITTED: usize = 900;
const ROWS: [usize; 3] = [1, 8, 64];
const FEW_HEADS: usize = 3;
/// Contexts of the drafter's attention: all of a short one, and the window in which it is served.
const CONTEXTS: [&str; 2] = ["1024", "4096"];
const BLOCK: usize = 8;
const EPS: f32 = 1e-5;
const F32: usize = size_of::<f32>();
const BF16: usize = size_of::<bf16>();

/// Cosines and sines of angles as positions have them, `[positions, pairs]`.
struct Tables {
    cos: Vec<f32>,
    sin: Vec<f32>,
    on_device: [Buffer<f32>; 2],
}

impl Tables {
    fn new(device: &Device, positions: usize, pairs: usize) -> Result<Self> {
        let angle = |at: usize| (at / pairs) as f32 * 50_000f32.powf(-((at % pairs) as f32) / pairs as f32);
        let cos: Vec<f32> = (0..positions * pairs).map(|at| angle(at).cos()).collect();
        let sin: Vec<f32> = (0..positions * pairs).map(|at| angle(at).sin()).collect();
        let on_device = [device.upload(&cos)?, device.upload(&sin)?];
        Ok(Self { cos, sin, on_device })
    }

    fn rope(&self) -> Rope {
        Rope { cos: self.on_device[0].view(), sin: self.on_device[1].view() }
    }
}

fn widened(values: Vec<bf16>) -> Vec<f32> {
    values.into_iter().map(bf16::to_f32).collect()
}

/// `query`, `kv_append` and the drafter's `head_norm_rope`; the shape is the number of heads.
pub fn rope<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    type OneCase = fn(&Device, usize, usize, KvFormat) -> Result<Case>;
    const ALL: [OneCase; 3] = [query, kv_append, drafter_heads];
    let heads = size(options, if device.is_cuda() { HEADS } else { FEW_HEADS })?;
    let rows = rows(device, options, &ROWS);
    let cases = ALL.into_iter().flat_map(move |one| rows.clone().into_iter().map(move |rows| (one, rows)));
    Ok(Box::new(cases.map(move |(one, rows)| one(device, heads, rows, options.kv))))
}

/// A chain: row r at depth r.
fn chain(device: &Device, rows: usize) -> Result<(Buffer<u32>, Buffer<u32>, Vec<usize>)> {
    let depths: Vec<u32> = (0..rows as u32).collect();
    let state = device.upload(&initial_state(COMMITTED as u32, 0, 0))?;
    Ok((device.upload(&depths)?, state, (COMMITTED..COMMITTED + rows).collect()))
}

fn query(device: &Device, heads: usize, rows: usize, _: KvFormat) -> Result<Case> {
    let bytes = rows * heads * ((ROPE + LATENT) * F32 + KEY * BF16);
    let tables = Rc::new(Tables::new(device, COMMITTED + rows, ROPE / 2)?);
    case(device, "query", format!("{heads} heads"), rows, bytes, |random| {
        let (q, q_lat) = (random.floats(rows * heads * (NOPE + ROPE)), random.floats(rows * heads * LATENT));
        let (dq, dlat, of_run, tables) = (device.upload(&q)?, device.upload(&q_lat)?, tables.clone(), tables.clone());
        let (depths, state, positions) = chain(device, rows)?;
        let out = Rc::new(device.alloc(rows * heads * KEY)?);
        let result = out.clone();
        let run = move |device: &Device| {
            let args = kernels::Query {
                q: dq.view(),
                q_lat: dlat.view(),
                rope: of_run.rope(),
                depths: depths.view(),
                state: state.view(),
                out: out.view_mut(),
                rows,
                heads,
                nope: NOPE,
            };
            kernels::query(device, args)
        };
        let error = move || {
            let want = reference::query(&q, &q_lat, &tables.cos, &tables.sin, &positions, heads);
            Ok(distance(&widened(result.read()?), &want))
        };
        Ok(prepared(run, error))
    })
}

/// One latent row a token, whatever the number of heads.
fn kv_append(device: &Device, _: usize, rows: usize, kv: KvFormat) -> Result<Case> {
    let bytes = rows * (KEY * F32 + kv.row_bytes()) + LATENT * F32;
    let tables = Rc::new(Tables::new(device, COMMITTED + rows, ROPE / 2)?);
    case(device, "append", format!("{LATENT} + {ROPE} in {kv}"), rows, bytes, |random| {
        let (t, weight) = (random.floats(rows * KEY), random.floats(LATENT));
        let (dt, dw, of_run, tables) = (device.upload(&t)?, device.upload(&weight)?, tables.clone(), tables.clone());
        let (depths, state, positions) = chain(device, rows)?;
        let cache = Rc::new(device.alloc::<u8>((COMMITTED + rows) * kv.row_bytes())?);
        let result = cache.clone();
        let run = move |device: &Device| {
            let args = kernels::KvAppend {
                t: dt.view(),
                weight: dw.view(),
                eps: EPS,
                rope: of_run.rope(),
                depths: depths.view(),
                state: state.view(),
                cache: Cache { format: kv, bytes: cache.view_mut() },
                rows,
            };
            kernels::kv_append(device, args)
        };
        let error = move || {
            let found = result.read()?.split_off(COMMITTED * kv.row_bytes());
            let want = reference::kv_append(&t, &weight, EPS, &tables.cos, &tables.sin, &positions);
            Ok(match kv {
                KvFormat::Bf16 => {
                    let found = found.chunks_exact(BF16).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect();
                    distance(&widened(found), &want)
                }
                KvFormat::F8 => {
                    let want =
                        reference::f8_values(&reference::f8_rows(&want)).into_iter().map(f64::from).collect::<Vec<_>>();
                    distance(&widened(reference::f8_values(&found)), &want)
                }
            })
        };
        Ok(prepared(run, error))
    })
}

/// A block's queries; keys are alike, of fewer heads.
fn drafter_heads(device: &Device, heads: usize, rows: usize, _: KvFormat) -> Result<Case> {
    let width = heads * HEAD_DIM;
    let tables = Rc::new(Tables::new(device, COMMITTED + rows, HEAD_DIM / 2)?);
    case(device, "heads", format!("{heads} of {HEAD_DIM}"), rows, rows * width * (F32 + BF16), |random| {
        let (x, weight) = (random.floats(rows * width), random.floats(HEAD_DIM));
        let (dx, dw, of_run, tables) = (device.upload(&x)?, device.upload(&weight)?, tables.clone(), tables.clone());
        let (_, state, _) = chain(device, rows)?;
        let out = Rc::new(device.alloc(rows * width)?);
        let result = out.clone();
        let run = move |device: &Device| {
            let args = kernels::HeadNormRope {
                x: dx.view(),
                weight: dw.view(),
                eps: EPS,
                rope: of_run.rope(),
                state: state.view(),
                out: out.view_mut(),
                rows,
                heads,
                head_dim: HEAD_DIM,
                stride: width,
                base: 0,
                to_cache: false,
            };
            kernels::head_norm_rope(device, args)
        };
        let error = move || {
            let angles = (&tables.cos[..], &tables.sin[..]);
            let row = |(r, x)| reference::head_norm_rope(x, HEAD_DIM, Some(&weight), EPS, Some(angles), COMMITTED + r);
            let want: Vec<f64> = x.chunks(width).enumerate().flat_map(row).collect();
            Ok(distance(&widened(result.read()?), &want))
        };
        Ok(prepared(run, error))
    })
}

/// The drafter's attention over a block of 8 by rows; the shape is the context, `CONTEXT:64` for heads of 64 values.
pub fn block<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let shapes: Vec<String> = match (options.shapes.is_empty(), device.is_cuda()) {
        (false, _) => options.shapes.clone(),
        (true, true) => CONTEXTS.map(String::from).to_vec(),
        (true, false) => vec!["40".into()],
    };
    let parse = |text: &String| {
        let (context, dim) = text.split_once(':').map_or((&text[..], Some(HEAD_DIM)), |(c, d)| (c, d.parse().ok()));
        let dim = dim.filter(|dim| [64, 128].contains(dim));
        context.parse().ok().zip(dim).ok_or_else(|| refused(format!("shape `{text}`: expected CONTEXT or CONTEXT:64")))
    };
    let shapes = shapes.iter().map(parse).collect::<Result<Vec<(usize, usize)>>>()?;
    let rows = rows(device, options, &[BLOCK]);
    let cases = shapes.into_iter().flat_map(move |shape| rows.clone().into_iter().map(move |rows| (shape, rows)));
    Ok(Box::new(cases.map(move |((context, head_dim), rows)| block_case(device, context, head_dim, rows))))
}

fn block_case(device: &Device, context: usize, head_dim: usize, rows: usize) -> Result<Case> {
    let heads = if device.is_cuda() { HEADS } else { 2 * KV_HEADS };
    let (values, width) = (rows * heads * head_dim, KV_HEADS * head_dim);
    let (slots, scale) = (context + rows, 1.0 / (head_dim as f32).sqrt());
    let (bytes, flops) = (2 * slots * width * BF16 + 2 * values * BF16, 4 * values * slots);
    let shape = format!("{heads} / {KV_HEADS} heads of {head_dim}, {context} keys");
    let found = case(device, "block", shape, rows, bytes, |random| {
        let q = random.bf16s(values);
        let (k, v) = (random.bf16s(slots * width), random.bf16s(slots * width));
        let (dq, dk, dv) = (device.upload(&q)?, device.upload(&k)?, device.upload(&v)?);
        let state = device.upload(&initial_state(context as u32, 0, 0))?;
        let out = Rc::new(device.alloc(values)?);
        let result = out.clone();
        let run = move |device: &Device| {
            let args = kernels::BlockAttention {
                q: dq.view(),
                k: dk.view(),
                v: dv.view(),
                state: state.view(),
                scale,
                rows,
                heads,
                kv_heads: KV_HEADS,
                head_dim,
                window: None,
                out_f32: cuda_std::GlobalMut::EMPTY,
                out_bf16: out.view_mut(),
            };
            kernels::block_attention(device, args)
        };
        let error = move || {
            let want = reference::block_attention(&q, &k, &v, context, None, heads, KV_HEADS, head_dim, scale);
            Ok(distance(&widened(result.read()?), &want))
        };
        Ok(prepared(run, error))
    })?;
    Ok(Case { flops, ..found })
}
