//! The tree builder against the heap and against the definition: ties, -inf, NaN, equal siblings, every budget.

use gpu::args::state::{BONUS, COMMITTED, ERROR, ERROR_DRAFT, ERROR_ROUTER, ERROR_ROW, NODES, STATE_WORDS};
use kdtree::device::{Buffer, Device};
use kdtree::kernels::{Builder, Growth, TreeBuild, initial_state, tree_build, tree_build_by};
use kdtree::reference::{self, Draft, Tree};

use super::support::{Outcome, Random, Suite, check, equal};

const BONUS_ID: u32 = 163_586;

pub fn cases(suite: &mut Suite) {
    suite.both("tree_build::exact_list", exact_list);
    suite.both("tree_build::budgets_0_to_64", budgets);
    for (levels, k) in [(1, 1), (1, 64), (31, 1), (31, 64), (7, 8), (2, 3), (7, 64)] {
        suite.both(format!("tree_build::{levels} levels of {k}"), move |d| against_heap(d, levels, k));
    }
    for (levels, k, budget) in
        [(7, 64, 1024), (7, 1024, 1024), (31, 5, 1024), (3, 9, 1000), (7, 300, 257), (1, 1024, 1024)]
    {
        suite.both(format!("tree_build::{budget} of {levels}x{k}"), move |d| large(d, levels, k, budget));
    }
    suite.cuda("tree_build::every_budget", every_budget);
    suite.both("tree_build::large_ties", large_ties);
    suite.both("tree_build::positive_logp", positive);
    suite.both("tree_build::floor", floor);
    suite.both("tree_build::spine", spine);
    suite.both("tree_build::by_definition", by_definition);
    suite.both("tree_build::ties", ties);
    suite.both("tree_build::certain_drafts", certain);
    suite.both("tree_build::no_levels", no_levels);
    suite.both("tree_build::minus_infinity", minus_infinity);
    suite.both("tree_build::nan", nan);
    suite.both("tree_build::an_earlier_error", earlier);
    suite.both("tree_build::properties", properties);
    suite.both("tree_build::refuses", refuses);
}

/// Buffers of one tree, used for many.
pub struct Bench<'a> {
    device: &'a Device,
    state: Buffer<u32>,
    tokens: Buffer<i32>,
    parents: Buffer<i32>,
    depths: Buffer<u32>,
    ancestors: Buffer<u32>,
}

const MOST_ROWS: usize = 1025;
const MOST_WORDS: usize = 33;

impl<'a> Bench<'a> {
    pub fn new(device: &'a Device) -> Result<Self, libtest_mimic::Failed> {
        Ok(Self {
            device,
            state: device.alloc(STATE_WORDS)?,
            tokens: device.alloc(MOST_ROWS)?,
            parents: device.alloc(MOST_ROWS)?,
            depths: device.alloc(MOST_ROWS)?,
            ancestors: device.alloc(MOST_ROWS * MOST_WORDS)?,
        })
    }

    /// The tree and the state, the same from every kernel that can build it.
    fn build(&self, draft: Draft, budget: usize, state: &[u32]) -> Result<(Tree, Vec<u32>), libtest_mimic::Failed> {
        self.grow(draft, budget, Growth::BEST_FIRST, state)
    }

    fn grow(
        &self,
        draft: Draft,
        budget: usize,
        growth: Growth,
        state: &[u32],
    ) -> Result<(Tree, Vec<u32>), libtest_mimic::Failed> {
        let built = self.grow_by(Builder::Block, draft, budget, growth, state)?;
        if Builder::Warp.can(budget, draft.k) {
            let small = self.grow_by(Builder::Warp, draft, budget, growth, state)?;
            check(small == built, || format!("one warp builds {small:?}, one block {built:?}"))?;
        }
        Ok(built)
    }

    fn grow_by(
        &self,
        builder: Builder,
        draft: Draft,
        budget: usize,
        growth: Growth,
        state: &[u32],
    ) -> Result<(Tree, Vec<u32>), libtest_mimic::Failed> {
        let (ids, logp) = (self.device.upload(draft.ids)?, self.device.upload(draft.logp)?);
        self.state.write(0, state)?;
        for buffer in [&self.tokens, &self.parents] {
            buffer.fill(0xFF)?;
        }
        for buffer in [&self.depths, &self.ancestors] {
            buffer.fill(0xFF)?;
        }
        let p = TreeBuild {
            ids: ids.view(),
            logp: logp.view(),
            state: self.state.view_mut(),
            tokens: self.tokens.view_mut(),
            parents: self.parents.view_mut(),
            depths: self.depths.view_mut(),
            ancestors: self.ancestors.view_mut(),
            sequences: 1,
            levels: draft.levels,
            k: draft.k,
            budget,
            growth,
        };
        tree_build_by(self.device, p, builder)?;
        let (rows, state) = (budget + 1, self.state.read()?);
        let words = rows * rows.div_ceil(32);
        let tree = Tree {
            nodes: state[NODES] as usize,
            tokens: self.tokens.read()?[..rows].to_vec(),
            parents: self.parents.read()?[..rows].to_vec(),
            depths: self.depths.read()?[..rows].to_vec(),
            ancestors: self.ancestors.read()?[..words].to_vec(),
        };
        Ok((tree, state))
    }

    /// The tree equals that of the heap, and the state holds its size and nothing new.
    pub fn same(&self, draft: Draft, budget: usize) -> Result<Tree, libtest_mimic::Failed> {
        self.grown(draft, budget, Growth::BEST_FIRST)
    }

    pub fn grown(&self, draft: Draft, budget: usize, growth: Growth) -> Result<Tree, libtest_mimic::Failed> {
        let before = initial_state(40, BONUS_ID, 7);
        let (tree, state) = self.grow(draft, budget, growth, &before)?;
        let want = reference::tree_build(BONUS_ID as i32, draft, budget, growth);
        let what = |part: &str| format!("{part} of the tree of {budget} from {} x {}", draft.levels, draft.k);
        equal(&what("nodes"), &[tree.nodes], &[want.nodes])?;
        equal(&what("tokens"), &tree.tokens, &want.tokens)?;
        equal(&what("parents"), &tree.parents, &want.parents)?;
        equal(&what("depths"), &tree.depths, &want.depths)?;
        equal(&what("ancestors"), &tree.ancestors, &want.ancestors)?;
        let mut after = before;
        after[NODES] = want.nodes as u32;
        equal("state", &state, &after)?;
        Ok(tree)
    }
}

/// Rows of descending values with ids that may repeat.
pub fn draw(random: &mut Random, levels: usize, k: usize, value: impl Fn(&mut Random) -> f32) -> (Vec<i32>, Vec<f32>) {
    let ids = (0..levels * k).map(|_| random.below(50) as i32).collect();
    let mut logp = Vec::new();
    for _ in 0..levels {
        let mut row: Vec<f32> = (0..k).map(|_| value(random)).collect();
        row.sort_by(|a, b| b.total_cmp(a));
        logp.extend(row);
    }
    (ids, logp)
}

pub fn smooth(random: &mut Random) -> f32 {
    let u = f64::from(random.unit()) * 0.5 + 0.5;
    (u + 1e-6).ln() as f32 * 3.0
}

/// By hand: 0.6 0.3 | 0.5 0.4, as logarithms.
fn exact_list(device: &Device) -> Outcome {
    let logp: Vec<f32> = [0.6f32, 0.3, 0.5, 0.4].iter().map(|p| p.ln()).collect();
    let ids = [10, 0, 20, 21];
    let bench = Bench::new(device)?;
    let tree = bench.same(Draft { ids: &ids, logp: &logp, levels: 2, k: 2 }, 6)?;
    // 0.6; 0.6 * 0.5 = 0.3 equals the sibling up to a rounding, so the two may stand either way here.
    let list: Vec<(i32, i32, u32)> = (1..=6).map(|r| (tree.tokens[r], tree.parents[r], tree.depths[r])).collect();
    let a = [(10, 0, 1), (20, 1, 2), (0, 0, 1), (21, 1, 2), (20, 3, 2), (21, 3, 2)];
    let b = [(10, 0, 1), (0, 0, 1), (20, 1, 2), (21, 1, 2), (20, 2, 2), (21, 2, 2)];
    check(list == a || list == b, || format!("{list:?}"))?;
    equal("ancestors", &tree.ancestors[..2], &[1, 3])?;
    // Exact scores: -1 -2 | -1.5 -1.75: -1, -2 (smaller parent), -2.5, -2.75, -3.5, -3.75.
    let logp = [-1.0, -2.0, -1.5, -1.75];
    let tree = bench.same(Draft { ids: &ids, logp: &logp, levels: 2, k: 2 }, 8)?;
    equal("tokens", &tree.tokens, &[BONUS_ID as i32, 10, 0, 20, 21, 20, 21, 0, 0])?;
    equal("parents", &tree.parents, &[-1, 0, 0, 1, 1, 2, 2, -1, -1])?;
    equal("depths", &tree.depths, &[0, 1, 1, 2, 2, 2, 2, 0, 0])?;
    let rows = [1, 3, 5, 0b1011, 0b10011, 0b100101, 0b1000101, 1 << 7, 1 << 8];
    equal("ancestors", &tree.ancestors, &rows)
}

fn budgets(device: &Device) -> Outcome {
    let mut random = Random::new(41);
    let bench = Bench::new(device)?;
    for budget in 0..=64 {
        let (ids, logp) = draw(&mut random, 7, 8, smooth);
        bench.same(Draft { ids: &ids, logp: &logp, levels: 7, k: 8 }, budget)?;
    }
    Ok(())
}

fn against_heap(device: &Device, levels: usize, k: usize) -> Outcome {
    let mut random = Random::new(43);
    let bench = Bench::new(device)?;
    for budget in [0, 1, 5, 6, 7, 31, 32, 33, 63, 64, 65, 100] {
        let (ids, logp) = draw(&mut random, levels, k, smooth);
        bench.same(Draft { ids: &ids, logp: &logp, levels, k }, budget)?;
    }
    Ok(())
}

/// Small trees from the definition, and the optimum: the scores taken are the largest of all prefixes.
fn by_definition(device: &Device) -> Outcome {
    let mut random = Random::new(47);
    let bench = Bench::new(device)?;
    for round in 0..60 {
        let (levels, k, budget) = (1 + random.below(4), 1 + random.below(4), random.below(13));
        let tied = |r: &mut Random| r.below(4) as f32 * -0.5;
        let (ids, logp) = match round % 2 {
            0 => draw(&mut random, levels, k, smooth),
            _ => draw(&mut random, levels, k, tied),
        };
        let draft = Draft { ids: &ids, logp: &logp, levels, k };
        let tree = bench.same(draft, budget)?;
        check(tree == reference::tree_build_by_definition(BONUS_ID as i32, draft, budget, Growth::BEST_FIRST), || {
            format!("round {round}: not the tree of the definition")
        })?;
        let mut scores: Vec<f32> = reference::all_prefixes(draft)[1..].iter().map(|p| p.1).collect();
        scores.sort_by(|a, b| b.total_cmp(a));
        let ranks = ranks_of(&tree, draft);
        equal("scores", &scores_of(&tree, draft, &ranks), &scores[..tree.nodes])?;
    }
    Ok(())
}

/// The rank of each node among the siblings: its place in the order of selection.
fn ranks_of(tree: &Tree, draft: Draft) -> Vec<usize> {
    let rank = |row: usize| (1..row).filter(|&r| tree.parents[r] == tree.parents[row]).count();
    (0..=tree.nodes).map(|row| if row == 0 { 0 } else { rank(row).min(draft.k - 1) }).collect()
}

fn scores_of(tree: &Tree, draft: Draft, ranks: &[usize]) -> Vec<f32> {
    let mut scores = vec![0.0];
    for row in 1..=tree.nodes {
        let level = tree.depths[row] as usize - 1;
        scores.push(scores[tree.parents[row] as usize] + draft.logp[level * draft.k + ranks[row]]);
    }
    scores[1..].to_vec()
}

fn ties(device: &Device) -> Outcome {
    let mut random = Random::new(53);
    let bench = Bench::new(device)?;
    for _ in 0..40 {
        let (levels, k, budget) = (1 + random.below(8), 1 + random.below(9), random.below(65));
        let (ids, logp) = draw(&mut random, levels, k, |r| -(r.below(3) as f32));
        bench.same(Draft { ids: &ids, logp: &logp, levels, k }, budget)?;
    }
    // All equal: ties go to the smaller parent, then the smaller rank.
    let tree = bench.same(Draft { ids: &[7; 12], logp: &[-1.0; 12], levels: 3, k: 4 }, 10)?;
    equal("parents", &tree.parents[1..], &[0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
}

/// Probability 1 costs nothing: a child ties with its parent's siblings of score zero, -0 included.
fn certain(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let logp = [0.0, -0.0, -0.0, -3.0, 0.0, f32::NEG_INFINITY];
    let tree = bench.same(Draft { ids: &[0; 6], logp: &logp, levels: 3, k: 2 }, 9)?;
    equal("parents", &tree.parents[1..7], &[0, 0, 1, 2, 3, 4])
}

fn no_levels(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    for budget in [0, 1, 40] {
        let tree = bench.same(Draft { ids: &[], logp: &[], levels: 0, k: 1 }, budget)?;
        equal("nodes", &[tree.nodes], &[0])?;
    }
    Ok(())
}

fn minus_infinity(device: &Device) -> Outcome {
    let mut random = Random::new(59);
    let bench = Bench::new(device)?;
    let some = |r: &mut Random| if r.below(3) == 0 { f32::NEG_INFINITY } else { smooth(r) };
    for _ in 0..30 {
        let (levels, k, budget) = (1 + random.below(5), 1 + random.below(5), random.below(65));
        let (ids, logp) = draw(&mut random, levels, k, some);
        bench.same(Draft { ids: &ids, logp: &logp, levels, k }, budget)?;
    }
    let none = [f32::NEG_INFINITY; 6];
    equal("nodes", &[bench.same(Draft { ids: &[1; 6], logp: &none, levels: 2, k: 3 }, 5)?.nodes], &[0])?;
    // Sums that overflow are -inf too.
    let tree = bench.same(Draft { ids: &[1; 3], logp: &[-3e38; 3], levels: 3, k: 1 }, 5)?;
    equal("nodes", &[tree.nodes], &[1])
}

fn nan(device: &Device) -> Outcome {
    let mut random = Random::new(61);
    let bench = Bench::new(device)?;
    let (levels, k) = (4, 6);
    for budget in [0, 1, 2, 5, 6, 7, 9, 64] {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for (level, column) in [(0, 0), (0, 5), (1, 4), (2, 0), (3, 5)] {
                let (ids, mut logp) = draw(&mut random, levels, k, smooth);
                logp[level * k + column] = bad;
                logp[3 * k + 5] = bad;
                let draft = Draft { ids: &ids, logp: &logp, levels, k };
                let (tree, state) = bench.build(draft, budget, &initial_state(1, 2, 3))?;
                let reached = |level: usize, column: usize| level < budget && column < budget - level;
                let row = [(level, column), (3, 5)].into_iter().filter(|&(l, c)| reached(l, c)).map(|(l, _)| l).min();
                match row {
                    Some(row) => {
                        check(tree == Tree::root(2, budget), || format!("budget {budget}: a tree with {bad} in it"))?;
                        equal("error and its row", &state[ERROR..=ERROR_ROW], &[ERROR_DRAFT, row as u32])?;
                    }
                    None => {
                        check(tree == reference::tree_build(2, draft, budget, Growth::BEST_FIRST), || {
                            "a column out of reach counts".into()
                        })?;
                        equal("error", &state[ERROR..=ERROR], &[0])?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn earlier(device: &Device) -> Outcome {
    let mut state = initial_state(1, 2, 3);
    (state[ERROR], state[ERROR_ROW]) = (ERROR_ROUTER, 9);
    let bench = Bench::new(device)?;
    let (tree, after) = bench.build(Draft { ids: &[1; 4], logp: &[-1.0; 4], levels: 2, k: 2 }, 3, &state)?;
    state[NODES] = 0;
    equal("state", &after, &state)?;
    check(tree == Tree::root(2, 3), || "an error does not stop the tree".into())
}

/// Order, numbering and visibility on large random trees.
fn properties(device: &Device) -> Outcome {
    let mut random = Random::new(67);
    let bench = Bench::new(device)?;
    for budget in [16, 48, 64] {
        let (ids, logp) = draw(&mut random, 7, 16, smooth);
        let draft = Draft { ids: &ids, logp: &logp, levels: 7, k: 16 };
        let tree = bench.same(draft, budget)?;
        let ranks = ranks_of(&tree, draft);
        let scores = scores_of(&tree, draft, &ranks);
        check(scores.windows(2).all(|w| w[0] >= w[1]), || "scores ascend".into())?;
        for row in 1..=tree.nodes {
            let parent = tree.parents[row] as usize;
            let level = tree.depths[row] as usize - 1;
            check(parent < row && tree.depths[parent] as usize == level, || format!("row {row} under {parent}"))?;
            equal("token", &[tree.tokens[row]], &[ids[level * 16 + ranks[row]]])?;
            for other in 0..=tree.nodes {
                let want = other == row || tree.sees(parent, other);
                check(tree.sees(row, other) == want, || format!("row {row}, bit {other}"))?;
            }
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let (ids, logp) = (device.zeros(8)?, device.zeros(8)?);
    bench.state.write(0, &initial_state(0, 0, 0))?;
    let p = |levels, k, budget| TreeBuild {
        ids: ids.view(),
        logp: logp.view(),
        state: bench.state.view_mut(),
        tokens: bench.tokens.view_mut(),
        parents: bench.parents.view_mut(),
        depths: bench.depths.view_mut(),
        ancestors: bench.ancestors.view_mut(),
        sequences: 1,
        levels,
        k,
        budget,
        growth: Growth::BEST_FIRST,
    };
    tree_build(device, p(2, 4, 64))?;
    equal("state", &bench.state.read()?[COMMITTED..=BONUS], &[0, 0])?;
    let two = TreeBuild { sequences: 2, ..p(2, 4, 4) };
    let nan = TreeBuild { growth: Growth { floor: f32::NAN, spine: false }, ..p(2, 4, 4) };
    let small = tree_build_by(device, p(2, 4, 65), Builder::Warp).err().map(|e| e.to_string()).unwrap_or_default();
    check(small.contains("too much for one warp"), || format!("expected a refusal, found `{small}`"))?;
    for bad in [p(3, 4, 4), p(2, 4, 1025), p(32, 1, 4), p(2, 0, 4), p(0, 1025, 4), two, nan] {
        let error = tree_build(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("tree_build: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}

/// Budgets that take many threads and ancestors of many words.
fn large(device: &Device, levels: usize, k: usize, budget: usize) -> Outcome {
    let mut random = Random::new(71);
    let bench = Bench::new(device)?;
    for _ in 0..if device.is_cuda() { 5 } else { 1 } {
        let (ids, logp) = draw(&mut random, levels, k, smooth);
        let draft = Draft { ids: &ids, logp: &logp, levels, k };
        let tree = bench.same(draft, budget)?;
        let scores = scores_of(&tree, draft, &ranks_of(&tree, draft));
        check(scores.windows(2).all(|w| w[0] >= w[1]), || "scores ascend".into())?;
    }
    Ok(())
}

fn every_budget(device: &Device) -> Outcome {
    let mut random = Random::new(73);
    let bench = Bench::new(device)?;
    for budget in 0..=1024 {
        let (levels, k) = (1 + budget % 31, 1 + random.below(100));
        let (ids, logp) = draw(&mut random, levels, k, smooth);
        bench.same(Draft { ids: &ids, logp: &logp, levels, k }, budget)?;
    }
    Ok(())
}

/// Few different scores, or one: thousands of candidates tie with the last node.
fn large_ties(device: &Device) -> Outcome {
    let mut random = Random::new(79);
    let bench = Bench::new(device)?;
    for (levels, k, budget, kinds) in [(7, 64, 1024, 1), (5, 16, 700, 2), (3, 200, 1024, 3), (31, 2, 300, 2)] {
        let (ids, logp) = draw(&mut random, levels, k, |r| -(r.below(kinds) as f32));
        bench.same(Draft { ids: &ids, logp: &logp, levels, k }, budget)?;
    }
    Ok(())
}

/// A logarithm that is rounded up to just above 0 is 0: a child's score is never above its parent's.
fn positive(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let logp = [1e-7, -1.0, 1e-7, -0.5, 0.25, -0.25];
    bench.same(Draft { ids: &[1; 6], logp: &logp, levels: 3, k: 2 }, 9)?;
    Ok(())
}

/// Drafts of several kinds for small and large budgets.
fn with_growth(device: &Device, growth: impl Fn(&mut Random) -> Growth) -> Outcome {
    let mut random = Random::new(83);
    let bench = Bench::new(device)?;
    for round in 0..60 {
        let (levels, k) = (1 + random.below(4), 1 + random.below(4));
        let (ids, logp) = match round % 3 {
            0 => draw(&mut random, levels, k, smooth),
            1 => draw(&mut random, levels, k, |r| r.below(4) as f32 * -0.5),
            _ => draw(&mut random, levels, k, |r| if r.below(4) == 0 { f32::NEG_INFINITY } else { smooth(r) }),
        };
        let (budget, growth) = (random.below(14), growth(&mut random));
        let draft = Draft { ids: &ids, logp: &logp, levels, k };
        let tree = bench.grown(draft, budget, growth)?;
        check(tree == reference::tree_build_by_definition(BONUS_ID as i32, draft, budget, growth), || {
            format!("round {round}: not the tree of the definition, {growth:?}")
        })?;
    }
    for (levels, k, budget) in [(7, 64, 300), (31, 8, 64), (31, 3, 20)] {
        let (ids, logp) = draw(&mut random, levels, k, smooth);
        let growth = growth(&mut random);
        bench.grown(Draft { ids: &ids, logp: &logp, levels, k }, budget, growth)?;
    }
    Ok(())
}

fn floor(device: &Device) -> Outcome {
    let floors = [0.5, 0.0, -0.5, -1.0, -3.0, f32::NEG_INFINITY];
    with_growth(device, |r| Growth { floor: floors[r.below(floors.len())], spine: false })
}

fn spine(device: &Device) -> Outcome {
    let floors = [-1.0, -3.0, f32::NEG_INFINITY, f32::NEG_INFINITY];
    with_growth(device, |r| Growth { floor: floors[r.below(floors.len())], spine: true })?;
    // An unlikely chain: best first alone leaves it after a step.
    let bench = Bench::new(device)?;
    let logp = [-0.7, -0.7, -9.0, -9.0, -0.1, -0.1];
    let draft = Draft { ids: &[1, 2, 3, 4, 5, 6], logp: &logp, levels: 3, k: 2 };
    let tree = bench.grown(draft, 4, Growth { spine: true, ..Growth::BEST_FIRST })?;
    equal("tokens", &tree.tokens[1..], &[1, 3, 5, 2])?;
    equal("parents", &tree.parents[1..], &[0, 1, 2, 0])
}
