//! What a DDTree round does between its passes: candidates, the tree, the target's tokens, the walk, the move.
//!
//! Their inputs have just been written by other kernels and lie in L2, but for the logits of many rows and the cache;
//! they are timed over memory that no cache holds all the same, as everything here is.

use std::rc::Rc;

use cuda_std::Global;
use gpu::args::state::{self, BONUS, NEXT_BONUS, NODES, PATH, PATH_LEN, STATE_WORDS};
use gpu::args::tokens::record::RECORD_WORDS;

use super::{Case, Cases, Options, Run, case, different, prepared, rows, sets, size};
use crate::device::{Buffer, Device, Result};
use crate::kernels::{self, ArgmaxWorkspace, Growth, KvFormat, Sampling, TopKWorkspace, initial_state};
use crate::reference::{self, Draft, Tree};
use crate::selfcheck::Random;

/// Positions that K2.6's drafter drafts.
const LEVELS: usize = 7;
const VOCAB: usize = 163_840;
const FEW_TOKENS: usize = 9001;
/// Layers of K2.6, and slots a layer here.
const LAYERS: usize = 61;
const SLOTS: usize = 2048;
const COMMITTED: u32 = 900;
/// Rows whose token is compared with the twin's.
const COMPARED_ROWS: usize = 8;
const BUDGETS: [usize; 4] = [16, 64, 256, 1024];
const SEED: u64 = 27;
const WORD: usize = size_of::<u32>();

/// Log-probabilities as drafters have them: a good first choice that gets worse with the depth.
fn marginals(random: &mut Random, k: usize) -> (Vec<i32>, Vec<f32>) {
    let ids = (0..LEVELS * k).map(|_| random.below(VOCAB) as i32).collect();
    let mut logp = Vec::new();
    for level in 0..LEVELS {
        let spread = 2.5 - 0.2 * level as f32;
        let mut row: Vec<f32> = (0..k).map(|i| -spread * (1.0 + i as f32).ln() - 0.1 * random.unit().abs()).collect();
        let all: f32 = row.iter().map(|v| v.exp()).sum();
        row.iter_mut().for_each(|v| *v -= all.ln());
        row.sort_by(|a, b| b.total_cmp(a));
        logp.extend(row);
    }
    (ids, logp)
}

/// `tree_build`, by budget; the shape is the number of candidates a depth.
pub fn tree<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let one = |shape: &String| size(&Options { shapes: vec![shape.clone()], ..options.clone() }, 0);
    let mut asked = options.shapes.iter().map(one).collect::<Result<Vec<_>>>()?;
    if asked.is_empty() {
        asked.push(0);
    }
    let budgets = rows(device, options, &BUDGETS);
    let cases = asked.into_iter().flat_map(move |k| budgets.clone().into_iter().map(move |budget| (budget, k)));
    Ok(Box::new(cases.map(move |(budget, k)| tree_case(device, budget, if k > 0 { k } else { budget.clamp(1, 64) }))))
}

fn tree_case(device: &Device, budget: usize, k: usize) -> Result<Case> {
    let rows = budget + 1;
    let words = rows.div_ceil(32);
    let bytes = WORD * (2 * LEVELS * k + rows * (3 + words));
    let mut random = Random::new(SEED);
    let mut error = None;
    let runs = (0..sets(device, bytes)).map(|_| {
        let (ids, logp) = marginals(&mut random, k);
        let (d_ids, d_logp) = (device.upload(&ids)?, device.upload(&logp)?);
        let state = device.upload(&initial_state(COMMITTED, 5, 0))?;
        let (tokens, parents) = (device.alloc(rows)?, device.alloc(rows)?);
        let (depths, ancestors) = (device.alloc(rows)?, device.alloc(rows * words)?);
        let run = move |device: &Device, parents: &Buffer<i32>| {
            let args = kernels::TreeBuild {
                ids: d_ids.view(),
                logp: d_logp.view(),
                state: state.view_mut(),
                tokens: tokens.view_mut(),
                parents: parents.view_mut(),
                depths: depths.view_mut(),
                ancestors: ancestors.view_mut(),
                sequences: 1,
                levels: LEVELS,
                k,
                budget,
                growth: Growth::BEST_FIRST,
            };
            kernels::tree_build(device, args)
        };
        if error.is_none() {
            run(device, &parents)?;
            let draft = Draft { ids: &ids, logp: &logp, levels: LEVELS, k };
            let want = reference::tree_build(5, draft, budget, Growth::BEST_FIRST).parents;
            error = Some(different(&parents.read()?, &want));
        }
        Ok(Box::new(move |device: &Device| run(device, &parents)) as Run)
    });
    let runs = runs.collect::<Result<_>>()?;
    Ok(Case { operator: "tree", shape: format!("{LEVELS}x{k}"), rows: budget, bytes, flops: 0, runs, error })
}

fn vocabulary(device: &Device, options: &Options) -> Result<usize> {
    size(options, if device.is_cuda() { VOCAB } else { FEW_TOKENS })
}

/// Logits on a grid of 2^-10, a few of each row well above the others.
fn logits(device: &Device, random: &mut Random, rows: usize, vocab: usize) -> Result<(Buffer<f32>, Vec<f32>)> {
    let one = |random: &mut Random| (random.unit() * 5.0 + random.unit() * 5.0 + random.unit() * 5.0) * 1.2;
    let values: Vec<f32> = (0..rows * vocab).map(|_| one(random)).collect();
    Ok((device.upload(&values)?, values))
}

/// `top_k`: 64 candidates of each depth; the shape is the vocabulary, the rows are k.
pub fn top_k<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let vocab = vocabulary(device, options)?;
    Ok(Box::new(rows(device, options, &[16, 64, 256, 1024]).into_iter().map(move |k| top_k_case(device, vocab, k))))
}

fn top_k_case(device: &Device, vocab: usize, k: usize) -> Result<Case> {
    let bytes = LEVELS * vocab * WORD;
    let mut random = Random::new(SEED);
    let mut error = None;
    let runs = (0..sets(device, bytes)).map(|_| {
        let (d_logits, logits) = logits(device, &mut random, LEVELS, vocab)?;
        let (words, sums) = kernels::top_k_workspace(LEVELS, vocab, k);
        let (words, sums) = (device.alloc(words)?, device.alloc(sums)?);
        let (ids, logp) = (device.alloc(LEVELS * k)?, device.alloc(LEVELS * k)?);
        let state = device.upload(&initial_state(0, 0, 0))?;
        let run = move |device: &Device, ids: &Buffer<i32>| {
            let args = kernels::TopK {
                logits: d_logits.view(),
                ids: ids.view_mut(),
                logp: logp.view_mut(),
                state: state.view_mut(),
                workspace: TopKWorkspace { words: words.view_mut(), sums: sums.view_mut() },
                rows: LEVELS,
                vocab,
                k,
            };
            kernels::top_k(device, args)
        };
        if error.is_none() {
            run(device, &ids)?;
            error = Some(different(&ids.read()?, &reference::top_k(&logits, vocab, k).0));
        }
        Ok(Box::new(move |device: &Device| run(device, &ids)) as Run)
    });
    let runs = runs.collect::<Result<_>>()?;
    Ok(Case { operator: "topk", shape: format!("{LEVELS}x{vocab}"), rows: k, bytes, flops: 0, runs, error })
}

/// How a row's token is taken.
#[derive(Clone, Copy)]
enum Pick {
    Greedy,
    Draw(Sampling),
}

/// `argmax`, `draw` without filters and `draw` with all of them, by rows of logits; the shape is the vocabulary.
pub fn pick<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let vocab = vocabulary(device, options)?;
    let all = Sampling::all(1.0, 1);
    let kinds = [
        ("argmax", Pick::Greedy),
        ("draw", Pick::Draw(all)),
        ("draw top-p", Pick::Draw(Sampling { top_p: 0.95, ..all })),
        ("draw top-k", Pick::Draw(Sampling { top_k: 50, top_p: 0.95, min_p: 0.01, ..all })),
    ];
    let rows = rows(device, options, &[1, 8, 17, 65]);
    let cases = kinds.into_iter().flat_map(move |kind| rows.clone().into_iter().map(move |rows| (kind, rows)));
    Ok(Box::new(cases.map(move |((operator, pick), rows)| pick_case(device, operator, pick, vocab, rows))))
}

fn pick_case(device: &Device, operator: &'static str, pick: Pick, vocab: usize, rows: usize) -> Result<Case> {
    let bytes = rows * vocab * WORD;
    let mut random = Random::new(SEED);
    let depths = vec![1; rows];
    let mut error = None;
    let runs = (0..sets(device, bytes)).map(|_| {
        let (logits, values) = logits(device, &mut random, rows, vocab)?;
        let (parts, tickets) = kernels::argmax_workspace(rows, vocab);
        let (parts, tickets) = (device.alloc(parts)?, device.zeros(tickets)?);
        let (ids, best, second) = (device.alloc(rows)?, device.alloc(rows)?, device.alloc(rows)?);
        let (depths, limits) = (device.upload(&depths)?, device.alloc(2 * rows)?);
        let scratch = device.alloc(kernels::sample_limits_workspace(rows, vocab))?;
        let state = device.upload(&initial_state(COMMITTED, 0, rows as u32 - 1))?;
        let run = move |device: &Device, ids: &Buffer<i32>| {
            let picks = kernels::Argmax {
                logits: logits.view(),
                pick: ids.view_mut(),
                best: best.view_mut(),
                second: second.view_mut(),
                state: state.view_mut(),
                workspace: ArgmaxWorkspace { parts: parts.view_mut(), tickets: tickets.view_mut() },
                rows,
                vocab,
            };
            let Pick::Draw(sampling) = pick else { return kernels::argmax(device, picks) };
            let mut out = Global::EMPTY;
            if sampling.filters() {
                let (logits, limits, workspace) = (logits.view(), limits.view_mut(), scratch.view_mut());
                let args = kernels::SampleLimits { logits, limits, workspace, sampling, rows, vocab };
                kernels::sample_limits(device, args)?;
                out = limits.as_ref();
            }
            kernels::draw(device, kernels::Draw { picks, depths: depths.view(), limits: out, sampling })
        };
        if error.is_none() {
            run(device, &ids)?;
            let want: Vec<_> = values.chunks(vocab).take(COMPARED_ROWS).map(|row| token_of(row, pick)).collect();
            error = Some(different(&ids.read()?[..want.len()], &want));
        }
        Ok(Box::new(move |device: &Device| run(device, &ids)) as Run)
    });
    let runs = runs.collect::<Result<_>>()?;
    Ok(Case { operator, shape: vocab.to_string(), rows, bytes, flops: 0, runs, error })
}

/// The token that a row one below the root takes.
fn token_of(logits: &[f32], pick: Pick) -> i32 {
    let Pick::Draw(sampling) = pick else { return reference::argmax(logits, logits.len())[0].pick };
    let kept = reference::sample_kept(logits, &sampling);
    reference::draw(logits, &kept, &sampling, COMMITTED + 2).pick
}

/// `accept`, by rows: a walk of eight of them.
pub fn accept<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    size(options, 1)?;
    Ok(Box::new(rows(device, options, &[17, 65, 257, 1025]).into_iter().map(move |rows| accept_case(device, rows))))
}

fn accept_case(device: &Device, rows: usize) -> Result<Case> {
    let bytes = WORD * (5 * rows + STATE_WORDS + RECORD_WORDS);
    // A chain of seven, and the other nodes below it in turn; each row picks its child in the chain.
    let nodes: Vec<(i32, usize)> =
        (1..rows).map(|row| if row <= LEVELS { (row as i32, row - 1) } else { (-2, row % LEVELS) }).collect();
    let tree = Tree::of(0, &nodes, rows - 1);
    let pick: Vec<i32> = (1..=rows as i32).collect();
    let mut error = None;
    let runs = (0..sets(device, bytes)).map(|_| {
        let (tokens, parents) = (device.upload(&tree.tokens)?, device.upload(&tree.parents)?);
        let (pick, best, second) = (device.upload(&pick)?, device.zeros(rows)?, device.zeros(rows)?);
        let state = device.upload(&initial_state(COMMITTED, 0, tree.nodes as u32))?;
        let record = device.alloc(RECORD_WORDS)?;
        let run = move |device: &Device, state: &Buffer<u32>| {
            let args = kernels::Accept {
                tokens: tokens.view(),
                parents: parents.view(),
                pick: pick.view(),
                best: best.view(),
                second: second.view(),
                state: state.view_mut(),
                record: record.view_mut(),
                sequences: 1,
                rows,
            };
            kernels::accept(device, args)
        };
        if error.is_none() {
            run(device, &state)?;
            error = Some(different(&[state.read()?[PATH_LEN] as usize], &[(LEVELS + 1).min(rows)]));
        }
        Ok(Box::new(move |device: &Device| run(device, &state)) as Run)
    });
    let runs = runs.collect::<Result<_>>()?;
    Ok(Case { operator: "accept", shape: "a path of 8".into(), rows, bytes, flops: 0, runs, error })
}

/// `commit` of all layers, by rows of the path, and `advance`; the shape is the number of layers.
pub fn commit<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let layers = size(options, if device.is_cuda() { LAYERS } else { 2 })?;
    let commits =
        rows(device, options, &[8, 1, 32]).into_iter().map(move |rows| commit_case(device, layers, rows, options.kv));
    Ok(Box::new(commits.chain(std::iter::once_with(|| advance_case(device)))))
}

fn advance_case(device: &Device) -> Result<Case> {
    case(device, "advance", "a path of 8".into(), 1, 2 * 2 * WORD, |_| {
        let mut state = initial_state(COMMITTED, 5, 16);
        (state[PATH_LEN], state[NEXT_BONUS]) = (LEVELS as u32 + 1, 7);
        let on_device = Rc::new(device.upload(&state)?);
        let result = on_device.clone();
        let error = move || {
            let found = result.read()?;
            Ok(different(&[found[state::COMMITTED], found[BONUS]], &[COMMITTED + LEVELS as u32 + 1, 7]))
        };
        Ok(prepared(move |device| kernels::advance(device, on_device.view_mut()), error))
    })
}

fn commit_case(device: &Device, layers: usize, rows: usize, kv: KvFormat) -> Result<Case> {
    let width = kv.row_bytes();
    // The root stays; every other row is read and written.
    let bytes = 2 * layers * rows.saturating_sub(1) * width;
    let mut state = initial_state(COMMITTED, 0, 64);
    (state[PATH_LEN], state[NODES]) = (rows as u32, 2 * rows as u32);
    (0..rows).for_each(|r| state[PATH + r] = 2 * r as u32);
    let state = Rc::new(device.upload(&state)?);
    // What is compared: the rows of the tree in the last layer.
    let tree = Random::new(SEED).floats(2 * rows * width).into_iter().map(|v| (v * 127.0) as i8 as u8);
    let (tree, at) = (tree.collect::<Vec<_>>(), ((layers - 1) * SLOTS + COMMITTED as usize) * width);
    let mut error = None;
    let runs = (0..sets(device, bytes.max(1 << 20))).map(|_| {
        let (cache, state) = (device.zeros::<u8>(layers * SLOTS * width)?, state.clone());
        let run = move |device: &Device, cache: &Buffer<u8>| {
            let (cache, state) = (cache.view_mut(), state.view());
            kernels::commit(device, kernels::Commit { cache, state, layers, slots: SLOTS, width })
        };
        if error.is_none() {
            cache.write(at, &tree)?;
            run(device, &cache)?;
            let mut found = vec![0; rows * width];
            cache.read_into(at, &mut found)?;
            let want: Vec<u8> = tree.chunks(width).step_by(2).flatten().copied().collect();
            error = Some(different(&found, &want));
        }
        Ok(Box::new(move |device: &Device| run(device, &cache)) as Run)
    });
    let runs = runs.collect::<Result<_>>()?;
    Ok(Case { operator: "commit", shape: format!("{layers} layers of {kv}"), rows, bytes, flops: 0, runs, error })
}
