//! The walk: every small tree with every pick, chains, id 0, equal siblings, one sibling more, errors.

use gpu::args::state::{
    BONUS, ERROR, ERROR_LOGITS, ERROR_ROUTER, ERROR_ROW, MAX_PATH, NEXT_BONUS, NO_ROW, NODES, PATH, PATH_LEN,
    STATE_WORDS,
};
use gpu::args::tokens::record::{self, RECORD_WORDS};
use kdtree::device::{Buffer, Device};
use kdtree::kernels::{Accept, Argmax, ArgmaxWorkspace, accept, argmax, argmax_workspace, initial_state};
use kdtree::reference::{self, Tree};

use super::support::{Outcome, Random, Suite, check, equal};

pub fn cases(suite: &mut Suite) {
    suite.both("accept::every_small_tree", every_small_tree);
    suite.both("accept::random_trees", random_trees);
    suite.both("accept::chain", chain);
    suite.both("accept::id_0", id_0);
    suite.both("accept::equal_siblings", equal_siblings);
    suite.both("accept::one_sibling_more", one_sibling_more);
    suite.both("accept::full_path", full_path);
    suite.both("accept::root_alone", root_alone);
    suite.both("accept::errors", errors);
    suite.both("accept::nan_logits_to_record", nan_logits);
    suite.both("accept::largest_tree", largest);
    suite.both("accept::sequences", sequences);
    suite.both("accept::refuses", refuses);
}

/// Buffers of one walk, used for many.
pub struct Bench<'a> {
    device: &'a Device,
    tokens: Buffer<i32>,
    parents: Buffer<i32>,
    pick: Buffer<i32>,
    best: Buffer<f32>,
    second: Buffer<f32>,
    state: Buffer<u32>,
    record: Buffer<u32>,
}

const MOST_ROWS: usize = 1025;
const BONUS_ID: u32 = 5;

impl<'a> Bench<'a> {
    pub fn new(device: &'a Device) -> Result<Self, libtest_mimic::Failed> {
        Ok(Self {
            device,
            tokens: device.zeros(MOST_ROWS)?,
            parents: device.zeros(MOST_ROWS)?,
            pick: device.zeros(MOST_ROWS)?,
            best: device.upload(&(0..MOST_ROWS).map(|row| 2.0 * row as f32).collect::<Vec<_>>())?,
            second: device.upload(&vec![-0.5; MOST_ROWS])?,
            state: device.upload(&initial_state(0, 0, 0))?,
            record: device.zeros(RECORD_WORDS)?,
        })
    }

    /// State and record after the walk.
    fn run(&self, tree: &Tree, pick: &[i32], state: &[u32]) -> Result<(Vec<u32>, Vec<u32>), libtest_mimic::Failed> {
        self.tokens.write(0, &tree.tokens)?;
        self.parents.write(0, &tree.parents)?;
        self.pick.write(0, pick)?;
        self.state.write(0, state)?;
        self.record.fill(0xFF)?;
        let p = Accept {
            tokens: self.tokens.view(),
            parents: self.parents.view(),
            pick: self.pick.view(),
            best: self.best.view(),
            second: self.second.view(),
            state: self.state.view_mut(),
            record: self.record.view_mut(),
            sequences: 1,
            rows: tree.tokens.len(),
        };
        accept(self.device, p)?;
        Ok((self.state.read()?, self.record.read()?))
    }

    /// The path of the last walk, `len` rows.
    pub fn path(&self, len: usize) -> Result<Vec<i32>, libtest_mimic::Failed> {
        Ok(self.state.read()?[PATH..PATH + len].iter().map(|&row| row as i32).collect())
    }

    /// The walk equals the twin's, in the state and in the record; returns the path's length.
    pub fn same(&self, tree: &Tree, pick: &[i32]) -> Result<usize, libtest_mimic::Failed> {
        let mut want = initial_state(100, BONUS_ID, tree.nodes as u32);
        (want[PATH_LEN], want[NEXT_BONUS]) = (77, 78);
        want[PATH..PATH + MAX_PATH].fill(79);
        let (state, record) = self.run(tree, pick, &want)?;
        let (path, next) = reference::accept(&tree.tokens, &tree.parents, pick, tree.nodes, MAX_PATH);
        (want[PATH_LEN], want[NEXT_BONUS]) = (path.len() as u32, next as u32);
        want[PATH..PATH + MAX_PATH].fill(0);
        path.iter().enumerate().for_each(|(i, &row)| want[PATH + i] = row as u32);
        let text = || format!("{:?} {:?} with {pick:?}", tree.tokens, tree.parents);
        equal(&format!("state of {}", text()), &state, &want)?;
        equal(&format!("record of {}", text()), &record, &record_of(&path, pick, tree.nodes))?;
        Ok(path.len())
    }
}

/// The record of a walk along `path`; the gap of row r is that of the bench, 2 r + 0.5.
fn record_of(path: &[usize], pick: &[i32], nodes: usize) -> Vec<u32> {
    let mut words = vec![0; RECORD_WORDS];
    (words[record::PATH_LEN], words[record::NODES], words[record::ERROR_ROW]) =
        (path.len() as u32, nodes as u32, NO_ROW);
    for (i, &row) in path.iter().enumerate() {
        words[record::PICKS + i] = pick[row] as u32;
        words[record::GAPS + i] = (2.0 * row as f32 + 0.5).to_bits();
    }
    words
}

/// Digits of `n` in base `base`, `count` of them.
fn digits(n: usize, base: usize, count: usize) -> Vec<i32> {
    (0..count).map(|i| (n / base.pow(i as u32) % base) as i32).collect()
}

/// All trees of up to 3 nodes, all tokens of 0 and 1, all picks of 0, 1 and 2; one row of padding.
fn every_small_tree(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    for nodes in 0..=3usize {
        for shape in 0..(1..=nodes).product::<usize>() {
            let parents: Vec<usize> = (0..nodes)
                .scan(shape, |s, i| {
                    let parent = *s % (i + 1);
                    *s /= i + 1;
                    Some(parent)
                })
                .collect();
            for tokens in 0..2usize.pow(nodes as u32) {
                let list: Vec<_> = digits(tokens, 2, nodes).into_iter().zip(parents.iter().copied()).collect();
                let tree = Tree::of(BONUS_ID as i32, &list, nodes + 1);
                for picks in 0..3usize.pow(nodes as u32 + 1) {
                    let mut pick = digits(picks, 3, nodes + 1);
                    pick.push(-1);
                    bench.same(&tree, &pick)?;
                }
            }
        }
    }
    Ok(())
}

fn random_tree(random: &mut Random, nodes: usize, padding: usize, vocab: usize) -> Tree {
    let list: Vec<_> = (0..nodes)
        .map(|i| (random.below(vocab) as i32, if random.below(3) == 0 { random.below(i + 1) } else { i / 2 }))
        .collect();
    Tree::of(BONUS_ID as i32, &list, nodes + padding)
}

fn random_trees(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let mut random = Random::new(71);
    for round in 0..210 {
        let nodes = [3, 7, 31, 32, 33, 60, 500][round % 7];
        let tree = random_tree(&mut random, nodes, round % 5, 2);
        let pick: Vec<i32> = (0..tree.tokens.len()).map(|_| random.below(2) as i32).collect();
        bench.same(&tree, &pick)?;
    }
    Ok(())
}

/// A chain of 31 is a tree with one child a node: it is followed up to the first difference.
fn chain(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let list: Vec<(i32, usize)> = (0..31).map(|i| (163_839 - i as i32, i)).collect();
    let tree = Tree::of(BONUS_ID as i32, &list, 31);
    for right in 0..=31 {
        let mut pick: Vec<i32> = list.iter().map(|n| n.0).chain([9]).collect();
        pick[right] = 1;
        equal("length", &[bench.same(&tree, &pick)?], &[right + 1])?;
    }
    Ok(())
}

/// Id 0 is a token like any other, and padding, whose token is 0, is none.
fn id_0(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let tree = Tree::of(0, &[(0, 0), (0, 1), (7, 1)], 6);
    equal("all zeros", &[bench.same(&tree, &[0; 7])?], &[3])?;
    let tree = Tree::of(0, &[(7, 0)], 6);
    equal("padding", &[bench.same(&tree, &[0; 7])?], &[1])
}

fn equal_siblings(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let tree = Tree::of(1, &[(4, 0), (4, 0), (9, 2), (9, 1)], 4);
    equal("length", &[bench.same(&tree, &[4, 9, 9, 0, 0])?], &[3])?;
    equal("path", &bench.state.read()?[PATH..PATH + 3], &[0, 1, 4])
}

fn one_sibling_more(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let mut random = Random::new(73);
    for round in 0..100 {
        let nodes = 1 + round % 20;
        let list: Vec<_> = (0..nodes).map(|i| (random.below(3) as i32, random.below(i + 1))).collect();
        let pick: Vec<i32> = (0..nodes + 2).map(|_| random.below(3) as i32).collect();
        let before = bench.same(&Tree::of(BONUS_ID as i32, &list, nodes), &pick)?;
        let more = [list, vec![(random.below(3) as i32, random.below(nodes + 1))]].concat();
        let after = bench.same(&Tree::of(BONUS_ID as i32, &more, nodes + 1), &pick)?;
        check(after >= before, || format!("round {round}: {after} after {before}"))?;
    }
    Ok(())
}

/// A chain longer than the path: it ends when the path is full, with the pick there as the next bonus.
fn full_path(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let list: Vec<(i32, usize)> = (0..64).map(|i| (i as i32 + 10, i)).collect();
    let pick: Vec<i32> = (0..65).map(|i| i + 10).collect();
    equal("length", &[bench.same(&Tree::of(1, &list, 64), &pick)?], &[MAX_PATH])
}

fn root_alone(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    equal("no padding", &[bench.same(&Tree::root(3, 0), &[0])?], &[1])?;
    equal("padding", &[bench.same(&Tree::root(3, 64), &[3; 65])?], &[1])?;
    equal("much padding", &[bench.same(&Tree::root(3, 1024), &[3; 1025])?], &[1])?;
    // A count above the rows is cut to them.
    let mut state = initial_state(0, 3, 40);
    let (after, record) = bench.run(&Tree::of(3, &[(8, 0)], 1), &[8, 2], &state)?;
    (state[PATH_LEN], state[PATH + 1], state[NEXT_BONUS]) = (2, 1, 2);
    equal("state", &after, &state)?;
    equal("record", &record, &record_of(&[0, 1], &[8, 2], 1))
}

fn errors(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let tree = Tree::of(BONUS_ID as i32, &[(4, 0), (6, 1)], 2);
    let empty = |error, row| {
        let mut record = vec![0; RECORD_WORDS];
        record[record::NODES] = 2;
        (record[record::ERROR], record[record::ERROR_ROW]) = (error, row);
        record
    };
    let mut state = initial_state(3, BONUS_ID, 2);
    (state[ERROR], state[ERROR_ROW], state[PATH_LEN], state[PATH]) = (ERROR_ROUTER, 1, 9, 9);
    let (after, record) = bench.run(&tree, &[4, 6, 7], &state)?;
    (state[PATH_LEN], state[PATH], state[NEXT_BONUS]) = (0, 0, BONUS_ID);
    equal("state", &after, &state)?;
    equal("record", &record, &empty(ERROR_ROUTER, 1))?;
    // No pick at the end of the path: an error even if nobody has reported one. Off the path it does not matter.
    let (after, record) = bench.run(&tree, &[4, -1, 7], &initial_state(3, BONUS_ID, 2))?;
    (state[ERROR], state[ERROR_ROW]) = (ERROR_LOGITS, 1);
    equal("state", &after, &state)?;
    equal("record", &record, &empty(ERROR_LOGITS, 1))?;
    equal("off the path", &[bench.same(&tree, &[3, -1, -1])?], &[1])
}

/// From logits with NaN in rows 2 and 1 to the record: row 1, no path, the bonus kept.
fn nan_logits(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let tree = Tree::of(BONUS_ID as i32, &[(0, 0), (1, 0)], 3);
    let mut logits = vec![0.0f32; 4 * 8];
    (logits[8 + 3], logits[16], logits[24]) = (f32::NAN, f32::NAN, f32::NAN);
    let (logits, x) = (device.upload(&logits)?, device.zeros(4)?);
    bench.state.write(0, &initial_state(0, BONUS_ID, 2))?;
    let (parts, tickets) = (device.alloc(argmax_workspace(4, 8).0)?, device.zeros(4)?);
    let p = Argmax {
        logits: logits.view(),
        pick: bench.pick.view_mut(),
        best: x.view_mut(),
        second: x.view_mut(),
        state: bench.state.view_mut(),
        workspace: ArgmaxWorkspace { parts: parts.view_mut(), tickets: tickets.view_mut() },
        rows: 4,
        vocab: 8,
    };
    argmax(device, p)?;
    let (state, pick) = (bench.state.read()?, bench.pick.read()?);
    equal("picks", &pick[..4], &[0, -1, -1, -1])?;
    let (state, record) = bench.run(&tree, &pick[..4], &state)?;
    equal("record", &record[..5], &[0, 2, ERROR_LOGITS, 1, 0])?;
    equal("bonus", &[state[BONUS], state[NODES]], &[BONUS_ID, 2])
}

fn refuses(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let short = device.zeros(RECORD_WORDS - 1)?;
    let p = |rows, record| Accept {
        tokens: bench.tokens.view(),
        parents: bench.parents.view(),
        pick: bench.pick.view(),
        best: bench.best.view(),
        second: bench.second.view(),
        state: bench.state.view_mut(),
        record,
        sequences: 1,
        rows,
    };
    accept(device, p(1025, bench.record.view_mut()))?;
    let two = Accept { sequences: 2, ..p(65, bench.record.view_mut()) };
    let empty = Accept { best: cuda_std::Global::EMPTY, ..p(65, bench.record.view_mut()) };
    for bad in [p(0, bench.record.view_mut()), p(1026, bench.record.view_mut()), p(1, short.view_mut()), two, empty] {
        let error = accept(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("accept: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}

/// 1,024 nodes, all children of the root but a chain of the last rows; and the row that is followed is the last.
fn largest(device: &Device) -> Outcome {
    let bench = Bench::new(device)?;
    let list: Vec<(i32, usize)> = (0..1024).map(|i| (i as i32, if i < 1000 { 0 } else { i })).collect();
    let tree = Tree::of(BONUS_ID as i32, &list, 1024);
    // Row r holds token r - 1: in the chain each row picks the token of the next.
    let mut pick: Vec<i32> = (0..1025).collect();
    for (first, length) in [(999, 26), (5, 2), (1024, 1), (1023, 1)] {
        pick[0] = first;
        equal("length", &[bench.same(&tree, &pick)?], &[length])?;
    }
    Ok(())
}

fn sequences(device: &Device) -> Outcome {
    let mut random = Random::new(79);
    let (n, rows) = (3, 30);
    let trees: Vec<Tree> = (0..n).map(|i| random_tree(&mut random, rows - 1 - i, i, 2)).collect();
    let all = |of: &dyn Fn(&Tree) -> Vec<i32>| trees.iter().flat_map(of).collect::<Vec<_>>();
    let pick: Vec<i32> = (0..n * rows).map(|_| random.below(2) as i32).collect();
    let (tokens, parents) = (device.upload(&all(&|t| t.tokens.clone()))?, device.upload(&all(&|t| t.parents.clone()))?);
    let states: Vec<u32> = trees.iter().flat_map(|t| initial_state(9, BONUS_ID, t.nodes as u32)).collect();
    let (d_pick, state, record) = (device.upload(&pick)?, device.upload(&states)?, device.alloc(n * RECORD_WORDS)?);
    let zeros = device.zeros(n * rows)?;
    let p = Accept {
        tokens: tokens.view(),
        parents: parents.view(),
        pick: d_pick.view(),
        best: zeros.view(),
        second: zeros.view(),
        state: state.view_mut(),
        record: record.view_mut(),
        sequences: n,
        rows,
    };
    accept(device, p)?;
    let (state, record) = (state.read()?, record.read()?);
    for (i, tree) in trees.iter().enumerate() {
        let pick = &pick[i * rows..(i + 1) * rows];
        let (path, next) = reference::accept(&tree.tokens, &tree.parents, pick, tree.nodes, MAX_PATH);
        let rows: Vec<u32> = path.iter().map(|&row| row as u32).collect();
        let state = &state[i * STATE_WORDS..][..STATE_WORDS];
        equal("path", &state[PATH..PATH + path.len()], &rows)?;
        equal("next", &[state[PATH_LEN], state[NEXT_BONUS]], &[path.len() as u32, next as u32])?;
        let picks: Vec<u32> = path.iter().map(|&row| pick[row] as u32).collect();
        equal("picks", &record[i * RECORD_WORDS + record::PICKS..][..path.len()], &picks)?;
    }
    Ok(())
}
