//! Checks of the kernels that choose tokens: picks, candidates, the tree, the walk, the end of a round.

use cuda_std::Global;
use gpu::args::state::{BONUS, COMMITTED, MAX_PATH, NEXT_BONUS, NO_ROW, NODES, PATH, PATH_LEN};
use gpu::args::tokens::record::{self, RECORD_WORDS};
use gpu::kernels::order;

use super::Random;
use super::compare::{Failed, Found, Probe, equal, near};
use crate::device::{self, Buffer};
use crate::kernels::{
    self, Accept, Argmax, ArgmaxWorkspace, Draw, Growth, SampleLimits, Sampling, TopK, TopKWorkspace, TreeBuild,
    initial_state, top_k_workspace,
};
use crate::reference::{self, Draft, Tree, bounds};

/// Logits on a grid: equal ones in every row, so that the lowest id counts.
pub fn argmax(p: &Probe) -> Found {
    let (rows, vocab) = (3, 9000);
    let mut random = Random::new(11);
    let logits: Vec<_> = (0..rows * vocab).map(|_| random.below(500) as f32 * 0.01).collect();
    let before = initial_state(0, 0, rows as u32 - 1);
    let (d_logits, state) = (p.device.upload(&logits)?, p.device.upload(&before)?);
    let picks = Picks::new(p, rows, vocab)?;
    p.launch(|| kernels::argmax(p.device, picks.args(&d_logits, &state)))?;
    let Picks { pick, best, second, .. } = picks;
    let want = reference::argmax(&logits, vocab);
    equal("best", &best.read()?, &want.iter().map(|w| w.best).collect::<Vec<_>>())?;
    equal("second", &second.read()?, &want.iter().map(|w| w.second).collect::<Vec<_>>())?;
    equal("state", &state.read()?, &before)?;
    equal("pick", &pick.read()?, &want.iter().map(|w| w.pick).collect::<Vec<_>>())
}

/// Buffers of picks.
struct Picks {
    pick: Buffer<i32>,
    best: Buffer<f32>,
    second: Buffer<f32>,
    parts: Buffer<u32>,
    tickets: Buffer<u32>,
    rows: usize,
    vocab: usize,
}

impl Picks {
    fn new(p: &Probe, rows: usize, vocab: usize) -> device::Result<Self> {
        let (parts, tickets) = kernels::argmax_workspace(rows, vocab);
        Ok(Self {
            pick: p.device.alloc(rows)?,
            best: p.device.alloc(rows)?,
            second: p.device.alloc(rows)?,
            parts: p.device.alloc(parts)?,
            tickets: p.device.zeros(tickets)?,
            rows,
            vocab,
        })
    }

    fn args(&self, logits: &Buffer<f32>, state: &Buffer<u32>) -> Argmax {
        Argmax {
            logits: logits.view(),
            pick: self.pick.view_mut(),
            best: self.best.view_mut(),
            second: self.second.view_mut(),
            state: state.view_mut(),
            workspace: ArgmaxWorkspace { parts: self.parts.view_mut(), tickets: self.tickets.view_mut() },
            rows: self.rows,
            vocab: self.vocab,
        }
    }
}

const SAMPLING: Sampling = Sampling { temperature: 0.8, top_k: 400, top_p: 0.9, min_p: 0.001, seed: 0x1234_5678_9ABC };

/// Draws from 9,000 tokens at three positions.
pub fn draw(p: &Probe) -> Found {
    let (rows, vocab, committed) = (3, 9000, 70);
    let logits: Vec<_> = Random::new(14).floats(rows * vocab).into_iter().map(|v| v * 9.0).collect();
    let (d_logits, state) = (p.device.upload(&logits)?, p.device.upload(&initial_state(committed, 0, 2))?);
    let (depths, picks) = (p.device.upload(&[0, 1, 1])?, Picks::new(p, rows, vocab)?);
    let (sampling, limits) = (Sampling::all(0.8, 99), Global::EMPTY);
    let args = Draw { picks: picks.args(&d_logits, &state), depths: depths.view(), limits, sampling };
    p.launch(|| kernels::draw(p.device, args))?;
    let all: Vec<usize> = (0..vocab).collect();
    let want = [0, 1, 1].iter().zip(logits.chunks(vocab));
    let want: Vec<_> = want.map(|(depth, row)| reference::draw(row, &all, &sampling, committed + depth + 1)).collect();
    equal("pick", &picks.pick.read()?, &want.iter().map(|w| w.pick).collect::<Vec<_>>())?;
    let best: Vec<_> = want.iter().map(|w| f64::from(w.best)).collect();
    near(&picks.best.read()?, &best, &vec![1.0; rows], bounds::NOISE)
}

/// All three filters, each of which cuts; the row's limits are its last token's.
pub fn sample_limits(p: &Probe) -> Found {
    let (rows, vocab) = (2, 9000);
    let logits: Vec<_> = Random::new(15).floats(rows * vocab).into_iter().map(|v| (v * 90.0).round() * 0.1).collect();
    let (d_logits, limits) = (p.device.upload(&logits)?, p.device.alloc(2 * rows)?);
    let workspace = p.device.alloc(kernels::sample_limits_workspace(rows, vocab))?;
    let args = SampleLimits {
        logits: d_logits.view(),
        limits: limits.view_mut(),
        workspace: workspace.view_mut(),
        sampling: SAMPLING,
        rows,
        vocab,
    };
    p.launch(|| kernels::sample_limits(p.device, args))?;
    let mut kept = Vec::new();
    let limits = limits.read()?;
    for (row, limit) in logits.chunks(vocab).zip(limits.chunks(2)) {
        let inside = |i: usize| (order::key(row[i]), !(i as u32)) >= (limit[0], !limit[1]);
        let mut want = reference::sample_kept(row, &SAMPLING);
        want.sort_unstable();
        kept.push(((0..vocab).filter(|&i| inside(i)).collect::<Vec<_>>(), want));
    }
    let (got, want): (Vec<_>, Vec<_>) = kept.into_iter().unzip();
    equal("kept ids", &got, &want)
}

/// Three chunks and their merge.
pub fn top_k(p: &Probe) -> Found {
    let (rows, vocab, k) = (2, 9003, 8);
    let logits: Vec<_> = Random::new(12).floats(rows * vocab).into_iter().map(|v| v * 12.0).collect();
    let before = initial_state(0, 0, 0);
    let (d_logits, state) = (p.device.upload(&logits)?, p.device.upload(&before)?);
    let (words, sums) = top_k_workspace(rows, vocab, k);
    let (words, sums) = (p.device.alloc(words)?, p.device.alloc(sums)?);
    let (ids, logp) = (p.device.alloc(rows * k)?, p.device.alloc(rows * k)?);
    let args = TopK {
        logits: d_logits.view(),
        ids: ids.view_mut(),
        logp: logp.view_mut(),
        state: state.view_mut(),
        workspace: TopKWorkspace { words: words.view_mut(), sums: sums.view_mut() },
        rows,
        vocab,
        k,
    };
    p.launch(|| kernels::top_k(p.device, args))?;
    let (want_ids, want_logp) = reference::top_k(&logits, vocab, k);
    equal("ids", &ids.read()?, &want_ids)?;
    equal("state", &state.read()?, &before)?;
    near(&logp.read()?, &want_logp, &vec![1.0; rows * k], bounds::LOG_PROBABILITY)
}

/// Seven levels of eight into 31 nodes; scores are f32 sums in both, so that the trees are equal.
pub fn tree_build_small(p: &Probe) -> Found {
    tree(p, 7, 8, 31)
}

/// The same drafts into 300 nodes.
pub fn tree_build(p: &Probe) -> Found {
    tree(p, 7, 8, 300)
}

/// More columns than shared memory has room for.
pub fn tree_build_wide(p: &Probe) -> Found {
    tree(p, 31, 150, 1024)
}

fn tree(p: &Probe, levels: usize, k: usize, budget: usize) -> Found {
    let bonus = 163_586;
    let mut random = Random::new(13);
    let ids: Vec<_> = (0..levels * k).map(|_| random.below(50) as i32).collect();
    let mut logp: Vec<_> = random.floats(levels * k).into_iter().map(|v| 3.0 * (v * 0.4 + 0.5).ln()).collect();
    logp.chunks_mut(k).for_each(|level| level.sort_by(|a, b| b.total_cmp(a)));
    let mut state = initial_state(40, bonus, 7);
    let (d_ids, d_logp, d_state) = (p.device.upload(&ids)?, p.device.upload(&logp)?, p.device.upload(&state)?);
    let rows = budget + 1;
    let (tokens, parents) = (p.device.alloc(rows)?, p.device.alloc(rows)?);
    let (depths, ancestors) = (p.device.alloc(rows)?, p.device.alloc(rows * rows.div_ceil(32))?);
    let args = TreeBuild {
        ids: d_ids.view(),
        logp: d_logp.view(),
        state: d_state.view_mut(),
        tokens: tokens.view_mut(),
        parents: parents.view_mut(),
        depths: depths.view_mut(),
        ancestors: ancestors.view_mut(),
        sequences: 1,
        levels,
        k,
        budget,
        growth: Growth::BEST_FIRST,
    };
    p.launch(|| kernels::tree_build(p.device, args))?;
    let draft = Draft { ids: &ids, logp: &logp, levels, k };
    let want = reference::tree_build(bonus as i32, draft, budget, Growth::BEST_FIRST);
    state[NODES] = want.nodes as u32;
    equal("tokens", &tokens.read()?, &want.tokens)?;
    equal("parents", &parents.read()?, &want.parents)?;
    equal("depths", &depths.read()?, &want.depths)?;
    equal("ancestors", &ancestors.read()?, &want.ancestors)?;
    equal("state", &d_state.read()?, &state)
}

/// A walk of five rows through a tree of 31 nodes.
pub fn accept(p: &Probe) -> Found {
    let nodes: Vec<_> = (0..31).map(|i| (i % 2, i as usize / 2)).collect();
    let (tree, pick) = (Tree::of(5, &nodes, 32), vec![1; 33]);
    let (tokens, parents) = (p.device.upload(&tree.tokens)?, p.device.upload(&tree.parents)?);
    let mut state = initial_state(100, 5, tree.nodes as u32);
    let (d_pick, d_state) = (p.device.upload(&pick)?, p.device.upload(&state)?);
    let record = p.device.alloc(RECORD_WORDS)?;
    let best: Vec<f32> = (0..33).map(|row| row as f32).collect();
    let (best, second) = (p.device.upload(&best)?, p.device.zeros(33)?);
    let args = Accept {
        tokens: tokens.view(),
        parents: parents.view(),
        pick: d_pick.view(),
        best: best.view(),
        second: second.view(),
        state: d_state.view_mut(),
        record: record.view_mut(),
        sequences: 1,
        rows: tree.tokens.len(),
    };
    p.launch(|| kernels::accept(p.device, args))?;
    let (path, next) = reference::accept(&tree.tokens, &tree.parents, &pick, tree.nodes, MAX_PATH);
    (state[PATH_LEN], state[NEXT_BONUS]) = (path.len() as u32, next as u32);
    path.iter().enumerate().for_each(|(i, &row)| state[PATH + i] = row as u32);
    equal("state", &d_state.read()?, &state)?;
    let mut words = vec![0; RECORD_WORDS];
    words[..record::PICKS].copy_from_slice(&[path.len() as u32, tree.nodes as u32, 0, NO_ROW]);
    for (i, &row) in path.iter().enumerate() {
        (words[record::PICKS + i], words[record::GAPS + i]) = (pick[row] as u32, (row as f32).to_bits());
    }
    equal("record", &record.read()?, &words)
}

/// A state after a walk along `path`.
pub fn walked(committed: usize, path: &[usize]) -> Vec<u32> {
    let mut state = initial_state(committed as u32, 11, 0).to_vec();
    (state[PATH_LEN], state[NEXT_BONUS]) = (path.len() as u32, 22);
    path.iter().enumerate().for_each(|(i, &row)| state[PATH + i] = row as u32);
    state
}

pub fn advance(p: &Probe) -> Result<f64, Failed> {
    let mut want = walked(10, &[0, 2, 3]);
    let state = p.device.upload(&want)?;
    p.launch(|| kernels::advance(p.device, state.view_mut()))?;
    (want[COMMITTED], want[BONUS]) = (13, 22);
    equal("state", &state.read()?, &want)
}
