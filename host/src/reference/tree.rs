//! Twins of `gpu::kernels::{tree_build, accept}`. Scores are f32 sums as on the device: the order of selection is
//! exact.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::kernels::Growth;

/// A tree of `budget + 1` rows, as `tree_build` writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Selected nodes, the root not counted.
    pub nodes: usize,
    pub tokens: Vec<i32>,
    pub parents: Vec<i32>,
    pub depths: Vec<u32>,
    /// `[rows, ceil(rows / 32)]`.
    pub ancestors: Vec<u32>,
}

impl Tree {
    /// The root alone among `budget + 1` rows.
    pub fn root(bonus: i32, budget: usize) -> Self {
        let rows = budget + 1;
        let mut tree = Self {
            nodes: 0,
            tokens: vec![0; rows],
            parents: vec![-1; rows],
            depths: vec![0; rows],
            ancestors: vec![0; rows * rows.div_ceil(32)],
        };
        tree.tokens[0] = bonus;
        (0..rows).for_each(|row| tree.see(row, row));
        tree
    }

    /// The nodes given by token and parent, in order.
    pub fn of(bonus: i32, nodes: &[(i32, usize)], budget: usize) -> Self {
        let mut tree = Self::root(bonus, budget);
        nodes.iter().for_each(|&(token, parent)| tree.add(token, parent));
        tree
    }

    /// Whether `row` sees `other`.
    pub fn sees(&self, row: usize, other: usize) -> bool {
        self.ancestors[row * self.words() + other / 32] >> (other % 32) & 1 == 1
    }

    fn words(&self) -> usize {
        self.tokens.len().div_ceil(32)
    }

    fn see(&mut self, row: usize, other: usize) {
        let word = row * self.words() + other / 32;
        self.ancestors[word] |= 1 << (other % 32);
    }

    fn add(&mut self, token: i32, parent: usize) {
        self.nodes += 1;
        let row = self.nodes;
        self.tokens[row] = token;
        self.parents[row] = parent as i32;
        self.depths[row] = self.depths[parent] + 1;
        (0..row)
            .filter(|&other| self.sees(parent, other))
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|o| self.see(row, o));
    }
}

/// Drafted candidates: `ids` and `logp [levels, k]`, each row of `logp` descending.
#[derive(Clone, Copy)]
pub struct Draft<'a> {
    pub ids: &'a [i32],
    pub logp: &'a [f32],
    pub levels: usize,
    pub k: usize,
}

impl Draft<'_> {
    /// The first level that holds NaN or +inf in a column that `budget` nodes can reach.
    pub fn broken_level(&self, budget: usize) -> Option<usize> {
        (0..self.levels.min(budget)).find(|&level| {
            let reached = self.k.min(budget - level);
            self.logp[level * self.k..][..reached].iter().any(|v| v.is_nan() || *v == f32::INFINITY)
        })
    }
}

/// A child that may be taken next.
struct Candidate {
    score: f32,
    parent: usize,
    rank: usize,
    level: usize,
}

impl Candidate {
    fn precedes(&self, other: &Self) -> Ordering {
        let by_score = self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal);
        by_score
            .then(Reverse(self.parent).cmp(&Reverse(other.parent)))
            .then(Reverse(self.rank).cmp(&Reverse(other.rank)))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.precedes(other) == Ordering::Equal
    }
}
impl Eq for Candidate {}
impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.precedes(other)
    }
}

impl Draft<'_> {
    /// The log-probability that counts: none is above 0.
    fn logp(&self, level: usize, rank: usize) -> f32 {
        self.logp[level * self.k + rank].min(0.0)
    }

    fn id(&self, level: usize, rank: usize) -> i32 {
        self.ids[level * self.k + rank]
    }
}

/// Whether a prefix of that score may be taken.
fn takes(growth: Growth, score: f32) -> bool {
    score > f32::NEG_INFINITY && score >= growth.floor
}

/// The best-first tree with a heap: a node's next sibling and first child enter when it is taken.
pub fn tree_build(bonus: i32, draft: Draft, budget: usize, growth: Growth) -> Tree {
    let mut tree = Tree::root(bonus, budget);
    if draft.broken_level(budget).is_some() {
        return tree;
    }
    let mut scores = vec![0.0];
    let mut heap = BinaryHeap::new();
    let push = |heap: &mut BinaryHeap<Candidate>, scores: &[f32], parent: usize, rank: usize, level: usize| {
        if level < draft.levels && rank < draft.k {
            let score: f32 = scores[parent] + draft.logp(level, rank);
            if takes(growth, score) {
                heap.push(Candidate { score, parent, rank, level });
            }
        }
    };
    while growth.spine && tree.nodes < budget.min(draft.levels) {
        let score = scores[tree.nodes] + draft.logp(tree.nodes, 0);
        if !takes(growth, score) {
            break;
        }
        tree.add(draft.id(tree.nodes, 0), tree.nodes);
        scores.push(score);
    }
    // Row i is at depth i so far, and its first child is row i + 1, if there is one.
    let spine = tree.nodes;
    (0..=spine).for_each(|row| push(&mut heap, &scores, row, (row < spine) as usize, row));
    while tree.nodes < budget {
        let Some(best) = heap.pop() else { break };
        tree.add(draft.id(best.level, best.rank), best.parent);
        scores.push(best.score);
        push(&mut heap, &scores, best.parent, best.rank + 1, best.level);
        push(&mut heap, &scores, tree.nodes, 0, best.level + 1);
    }
    tree
}

/// Every prefix of ranks with its score, the root (empty) first; a parent stands before its children.
pub fn all_prefixes(draft: Draft) -> Vec<(Vec<usize>, f32)> {
    let mut prefixes = vec![(Vec::new(), 0.0)];
    let mut from = 0;
    for level in 0..draft.levels {
        let to = prefixes.len();
        for parent in from..to {
            for rank in 0..draft.k {
                let (mut ranks, score) = prefixes[parent].clone();
                ranks.push(rank);
                prefixes.push((ranks, score + draft.logp(level, rank)));
            }
        }
        from = to;
    }
    prefixes
}

/// The same tree from the definition: each time, look at all prefixes, and take the best whose parent is in the tree.
pub fn tree_build_by_definition(bonus: i32, draft: Draft, budget: usize, growth: Growth) -> Tree {
    let mut tree = Tree::root(bonus, budget);
    if draft.broken_level(budget).is_some() {
        return tree;
    }
    let prefixes = all_prefixes(draft);
    let mut taken = vec![Vec::new()];
    while tree.nodes < budget {
        let best = prefixes
            .iter()
            .filter(|(ranks, score)| !ranks.is_empty() && takes(growth, *score) && !taken.contains(ranks))
            .filter_map(|(ranks, score)| {
                let (&rank, before) = ranks.split_last()?;
                let parent = taken.iter().position(|t| t == before)?;
                Some((Candidate { score: *score, parent, rank, level: before.len() }, ranks))
            })
            .max_by(|a, b| a.0.cmp(&b.0));
        let spine = prefixes.iter().find(|(ranks, score)| {
            growth.spine
                && ranks.len() == tree.nodes + 1
                && ranks.iter().all(|&rank| rank == 0)
                && takes(growth, *score)
        });
        let best = match (spine, best) {
            (Some((ranks, score)), _) => {
                Some((Candidate { score: *score, parent: tree.nodes, rank: 0, level: tree.nodes }, ranks))
            }
            (None, best) => best,
        };
        let Some((best, ranks)) = best else { break };
        tree.add(draft.id(best.level, best.rank), best.parent);
        taken.push(ranks.clone());
    }
    tree
}

/// The walk along `pick` (one a row) among the first `nodes + 1` rows: the path, at most `longest` rows, and the token
/// behind it.
pub fn accept(tokens: &[i32], parents: &[i32], pick: &[i32], nodes: usize, longest: usize) -> (Vec<usize>, i32) {
    let mut path = vec![0];
    loop {
        let at = path[path.len() - 1];
        let child = (1..=nodes).find(|&row| parents[row] == at as i32 && tokens[row] == pick[at]);
        match child {
            Some(row) if path.len() < longest => path.push(row),
            _ => return (path, pick[at]),
        }
    }
}
