//! Attention over the latent cache, for a tree of rows.

use std::rc::Rc;

use cuda_std::{GlobalMut, bf16};
use gpu::args::attention::{KEY, LATENT};

use super::{Case, Cases, Options, Run, refused, sets};
use crate::device::{Buffer, Device, Result};
use crate::kernels::{Cache, KvFormat, MlaAttention, MlaBlock, MlaPlan, initial_state, mla_attention_as, mla_plan};
use crate::reference;
use crate::selfcheck::Random;

/// Heads and context: K2.6 on one GPU, and one of eight equal parts of its heads.
const K26: [(usize, usize); 5] = [(64, 1024), (64, 8192), (64, 32768), (8, 8192), (8, 32768)];
const ROWS: [usize; 4] = [1, 8, 32, 64];
/// Where the CPU device checks the arithmetic.
const TINY: [(usize, usize); 1] = [(4, 150)];
const FEW_ROWS: [usize; 2] = [1, 5];
/// Softmax scale: scores of a few units for random values.
const SCALE: f32 = 0.15;
/// Queries that are compared with sums in f64.
const COMPARED: usize = 3;
const SEED: u64 = 27;

/// `HEADSxCONTEXT`, or `HEADSxCONTEXT:BLOCK/PARTS` for a plan other than the launcher's.
struct Shape {
    heads: usize,
    context: usize,
    plan: Option<MlaPlan>,
}

impl std::str::FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (size, plan) = text.split_once(':').map_or((text, None), |(size, plan)| (size, Some(plan)));
        let two = |text: &str, by| {
            let (a, b) = text.split_once(by)?;
            Some((a.to_string(), b.parse::<usize>().ok()?))
        };
        let sized = || {
            let (heads, context) = two(size, 'x')?;
            let heads = heads.parse().ok().filter(|&heads: &usize| heads > 0)?;
            (context > 0).then_some((heads, context))
        };
        let planned = |plan| {
            let (name, parts) = two(plan, '/')?;
            let block = MlaBlock::ALL.into_iter().find(|block| block.name() == name)?;
            Some(MlaPlan { block, parts })
        };
        let bad = || format!("shape `{text}`: expected HEADSxCONTEXT or HEADSxCONTEXT:BLOCK/PARTS");
        let (heads, context) = sized().ok_or_else(bad)?;
        let plan = plan.map(|plan| planned(plan).ok_or_else(bad)).transpose()?;
        Ok(Self { heads, context, plan })
    }
}

/// Parents drawn among the last few rows, as bits.
fn ancestors(random: &mut Random, rows: usize) -> Vec<u32> {
    let words = rows.div_ceil(32);
    let mut bits = vec![0u32; rows * words];
    for row in 0..rows {
        if row > 0 {
            let parent = row - 1 - random.below(row.min(3));
            let (before, own) = bits.split_at_mut(row * words);
            own[..words].copy_from_slice(&before[parent * words..(parent + 1) * words]);
        }
        bits[row * words + row / 32] |= 1 << (row % 32);
    }
    bits
}

/// One set of memory.
struct Memory {
    q: Buffer<bf16>,
    cache: Buffer<u8>,
}

/// Attention of a tree.
pub fn mla<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let usual =
        |list: &[(usize, usize)]| list.iter().map(|&(heads, context)| Shape { heads, context, plan: None }).collect();
    let shapes: Vec<Shape> = match options.shapes.is_empty() {
        true if device.is_cuda() => usual(&K26),
        true => usual(&TINY),
        false => options.shapes.iter().map(|text| text.parse().map_err(refused)).collect::<Result<_>>()?,
    };
    let rows = match (options.rows.is_empty(), device.is_cuda()) {
        (false, _) => options.rows.clone(),
        (true, true) => ROWS.to_vec(),
        (true, false) => FEW_ROWS.to_vec(),
    };
    let cases = shapes.into_iter().map(Rc::new).flat_map(move |shape| {
        let rows = rows.clone();
        rows.into_iter().map(move |rows| (shape.clone(), rows))
    });
    Ok(Box::new(cases.map(move |(shape, rows)| case(device, &shape, rows, options.kv))))
}

fn case(device: &Device, shape: &Shape, rows: usize, kv: KvFormat) -> Result<Case> {
    let mut random = Random::new(SEED);
    let Shape { heads, context, plan } = *shape;
    let (queries, slots) = (rows * heads, context + rows);
    let plan = plan.unwrap_or_else(|| mla_plan(device, slots, rows, heads));
    let (host_q, host_cache) = (random.bf16s(queries * KEY), random.bf16s(slots * KEY));
    // The error is that of the kernel: values of the reference are those that the cache stands for.
    let (bytes, host_cache): (Vec<u8>, _) = match kv {
        KvFormat::Bf16 => (host_cache.iter().flat_map(|v| v.to_le_bytes()).collect(), host_cache),
        KvFormat::F8 => {
            let bytes = reference::f8_rows(&host_cache.iter().map(|v| v.to_f64()).collect::<Vec<_>>());
            let values = reference::f8_values(&bytes);
            (bytes, values)
        }
    };
    let bits = ancestors(&mut random, rows);
    let count = sets(device, slots * kv.row_bytes());
    let memories = (0..count)
        .map(|_| Ok(Memory { q: device.upload(&host_q)?, cache: device.upload(&bytes)? }))
        .collect::<Result<Vec<_>>>()?;
    let memories = Rc::new(memories);
    let tree = Rc::new(device.upload(&bits)?);
    let state = Rc::new(device.upload(&initial_state(context as u32, 0, 0))?);
    let workspace = Rc::new(device.alloc(plan.workspace(rows, heads))?);
    let out = Rc::new(device.alloc::<f32>(queries * LATENT)?);
    let rounded = Rc::new(device.alloc::<bf16>(queries * LATENT)?);
    // Timed as `value_up` wants it: in bf16 alone.
    let run_of = |i: usize, unrounded: bool| -> Run {
        let (memories, tree, state) = (memories.clone(), tree.clone(), state.clone());
        let (workspace, out, rounded) = (workspace.clone(), out.clone(), rounded.clone());
        Box::new(move |device| {
            let p = MlaAttention {
                q: memories[i].q.view(),
                cache: Cache { format: kv, bytes: memories[i].cache.view_mut() },
                ancestors: tree.view(),
                state: state.view(),
                scale: SCALE,
                rows,
                heads,
                workspace: workspace.view_mut(),
                out_f32: if unrounded { out.view_mut() } else { GlobalMut::EMPTY },
                out_bf16: rounded.view_mut(),
            };
            mla_attention_as(device, p, plan)
        })
    };
    run_of(0, true)(device)?;
    let found = out.read()?;
    let mut error: f64 = 0.0;
    for _ in 0..COMPARED {
        let (row, head) = (random.below(rows), random.below(heads));
        let at = row * heads + head;
        let seen = reference::visible_slots(&bits, rows, row, context);
        let keys: Vec<bf16> = seen.iter().flat_map(|j| host_cache[j * KEY..(j + 1) * KEY].to_vec()).collect();
        let q = &host_q[at * KEY..(at + 1) * KEY];
        let want = reference::mla_attention(q, &keys, &[1], seen.len() - 1, 1, 1, SCALE);
        let largest = want.iter().fold(f64::MIN_POSITIVE, |a, b| a.max(b.abs()));
        for (found, want) in found[at * LATENT..(at + 1) * LATENT].iter().zip(&want) {
            let distance = (f64::from(*found) - want).abs() / largest;
            // NaN would be lost in `max`.
            error = if distance.is_nan() { f64::INFINITY } else { error.max(distance) };
        }
    }
    let in_f8 = if kv == KvFormat::F8 { " in f8" } else { "" };
    Ok(Case {
        operator: "mla",
        shape: format!("{heads} heads, {context} keys{in_f8}, {}/{}", plan.block.name(), plan.parts),
        rows,
        bytes: slots * kv.row_bytes() + queries * (KEY + LATENT) * size_of::<bf16>(),
        flops: 2 * queries * slots * (KEY + LATENT),
        runs: (0..memories.len()).map(|i| run_of(i, false)).collect(),
        error: Some(error),
    })
}
