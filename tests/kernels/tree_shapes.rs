//! Trees from drafts of all kinds of shapes, and several in one launch.

use gpu::args::state::{NODES, STATE_WORDS};
use kdtree::device::Device;
use kdtree::kernels::{Builder, Growth, TreeBuild, initial_state, tree_build_by};
use kdtree::reference::{self, Draft, Tree};

use super::support::{Outcome, Random, Suite, check};
use super::tree_build::{Bench, draw, smooth};

pub fn cases(suite: &mut Suite) {
    suite.both("tree_shapes::mixed", mixed);
    suite.both("tree_shapes::odd_scales", odd_scales);
    for (n, budget, builder) in
        [(3, 40, Builder::Warp), (3, 40, Builder::Block), (2, 300, Builder::Block), (5, 64, Builder::Warp)]
    {
        let name = format!("tree_shapes::{n} sequences of {budget}, {builder:?}");
        suite.both(name, move |d| sequences(d, n, budget, builder));
    }
    suite.cuda("tree_shapes::132 sequences of 1024", |d| sequences(d, 132, 1024, Builder::Block));
}

/// One level: its kind of values, and how they are spread.
fn level(random: &mut Random, k: usize) -> Vec<f32> {
    let scale = [1e-4, 0.01, 0.3, 1.0, 5.0, 40.0][random.below(6)];
    let kind = random.below(6);
    let mut row: Vec<f32> = (0..k)
        .map(|i| match kind {
            0 => smooth(random) * scale,
            1 => -scale,
            2 => -(random.below(4) as f32) * scale,
            3 => -scale * (1.0 + i as f32).ln(),
            4 if random.below(3) == 0 => f32::NEG_INFINITY,
            4 => smooth(random) * scale,
            // One that is certain, and others far below.
            _ => -(i.min(1) as f32) * (8.0 + smooth(random).abs()),
        })
        .collect();
    row.sort_by(|a, b| b.total_cmp(a));
    row
}

/// Levels of different kinds in one draft, and every way to grow.
fn mixed(device: &Device) -> Outcome {
    let mut random = Random::new(97);
    let bench = Bench::new(device)?;
    let (rounds, most) = if device.is_cuda() { (600, 1025) } else { (60, 200) };
    for _ in 0..rounds {
        let (levels, k, budget) = (1 + random.below(12), 1 + random.below(70), random.below(most));
        let logp: Vec<f32> = (0..levels).flat_map(|_| level(&mut random, k)).collect();
        let ids: Vec<i32> = (0..levels * k).map(|_| random.below(1000) as i32).collect();
        let floor = if random.below(3) == 0 { -(random.below(30) as f32) } else { f32::NEG_INFINITY };
        let growth = Growth { floor, spine: random.below(3) == 0 };
        bench.grown(Draft { ids: &ids, logp: &logp, levels, k }, budget, growth)?;
    }
    Ok(())
}

/// Costs near nothing and near the end of f32; sums that do not change by what is added.
fn odd_scales(device: &Device) -> Outcome {
    let mut random = Random::new(101);
    let bench = Bench::new(device)?;
    for scale in [1e-38, 1e-20, 1e-7, 1e7, 1e20, 1e37] {
        for (levels, k, budget) in [(5, 9, 150), (9, 3, 100), (2, 40, 120), (31, 2, 90)] {
            let (ids, mut logp) = draw(&mut random, levels, k, |r| smooth(r) * scale);
            bench.same(Draft { ids: &ids, logp: &logp, levels, k }, budget)?;
            // The first level alone is large, and what lies below it is lost in rounding: all its children tie.
            logp[k..].iter_mut().for_each(|v| *v *= 1e-9);
            bench.same(Draft { ids: &ids, logp: &logp, levels, k }, budget)?;
        }
    }
    Ok(())
}

/// Several sequences in one launch are those of one launch each.
fn sequences(device: &Device, n: usize, budget: usize, builder: Builder) -> Outcome {
    let (levels, k) = (5, 12);
    let (rows, words) = (budget + 1, (budget + 1).div_ceil(32));
    let mut random = Random::new(89);
    let (mut ids, mut logp, mut states) = (Vec::new(), Vec::new(), Vec::new());
    for sequence in 0..n {
        let (some_ids, some_logp) = draw(&mut random, levels, k, smooth);
        ids.extend(some_ids);
        logp.extend(some_logp);
        states.extend(initial_state(7, 100 + sequence as u32, 0));
    }
    let (d_ids, d_logp, state) = (device.upload(&ids)?, device.upload(&logp)?, device.upload(&states)?);
    let (tokens, parents) = (device.alloc(n * rows)?, device.alloc(n * rows)?);
    let (depths, ancestors) = (device.alloc(n * rows)?, device.alloc(n * rows * words)?);
    let p = TreeBuild {
        ids: d_ids.view(),
        logp: d_logp.view(),
        state: state.view_mut(),
        tokens: tokens.view_mut(),
        parents: parents.view_mut(),
        depths: depths.view_mut(),
        ancestors: ancestors.view_mut(),
        sequences: n,
        levels,
        k,
        budget,
        growth: Growth::BEST_FIRST,
    };
    tree_build_by(device, p, builder)?;
    let (tokens, parents, depths, ancestors) = (tokens.read()?, parents.read()?, depths.read()?, ancestors.read()?);
    let state = state.read()?;
    for i in 0..n {
        let part = i * levels * k..(i + 1) * levels * k;
        let draft = Draft { ids: &ids[part.clone()], logp: &logp[part], levels, k };
        let got = Tree {
            nodes: state[i * STATE_WORDS + NODES] as usize,
            tokens: tokens[i * rows..][..rows].to_vec(),
            parents: parents[i * rows..][..rows].to_vec(),
            depths: depths[i * rows..][..rows].to_vec(),
            ancestors: ancestors[i * rows * words..][..rows * words].to_vec(),
        };
        let want = reference::tree_build(100 + i as i32, draft, budget, Growth::BEST_FIRST);
        check(got == want, || format!("sequence {i}: {got:?}, expected {want:?}"))?;
    }
    Ok(())
}
