//! Attention over the latent cache: contexts around tile borders, tree shapes, masks to the bit, NaN and padding.

use cuda_std::bf16;
use gpu::args::attention::{KEY, LATENT};
use gpu::kernels::mla_attention::PART_KEYS;
use kdtree::device::Device;
use kdtree::kernels::{Cache, KvFormat, MlaAttention, MlaBlock, MlaPlan, mla_attention, mla_attention_as, mla_plan};
use kdtree::reference::{self, bounds};

use super::support::{Outcome, Random, Suite, check, close, equal};
use super::tree::{Tree, state_words};

/// A scale for random values in -1..1: scores of a few units.
const SCALE: f32 = 0.15;

pub fn cases(suite: &mut Suite) {
    for committed in [0, 1, 63, 64, 65, 127, 128, 129, 300] {
        for (rows, heads) in [(1, 1), (2, 4), (3, 2), (17, 1)] {
            let name = format!("mla_attention::context_{committed}_rows_{rows}_heads_{heads}");
            suite.both(name, move |d| random(d, committed, rows, heads, committed + rows));
        }
    }
    for (committed, rows, heads) in
        [(5, 16, 1), (40, 65, 1), (40, 65, 2), (33, 1, 8), (70, 1, 64), (20, 3, 64), (0, 96, 1), (300, 65, 4)]
    {
        let name = format!("mla_attention::context_{committed}_rows_{rows}_heads_{heads}");
        suite.both(name, move |d| random(d, committed, rows, heads, committed + rows));
    }
    for committed in [4095, 4096, 4097] {
        suite.both(format!("mla_attention::context_{committed}"), move |d| random(d, committed, 2, 4, 8192));
    }
    for (committed, rows, heads) in [(4097, 17, 64), (32767, 1, 64), (32768, 3, 8), (32769, 16, 8), (1000, 65, 64)] {
        let name = format!("mla_attention::context_{committed}_rows_{rows}_heads_{heads}");
        suite.cuda(name, move |d| random(d, committed, rows, heads, 40960));
    }
    // As long as Kimi K2.6 goes.
    suite.cuda("mla_attention::context_262141", |d| random(d, 262_141, 3, 8, 262_144));
    // Many splits for a short context: most have no key.
    suite.both("mla_attention::empty_splits", |d| random(d, 130, 3, 2, 4096));
    suite.both("mla_attention::empty_splits_no_context", |d| random(d, 0, 1, 1, 4096));
    // Each kind of block: full and partial rounds, one part and several, rounds that start in the tree.
    for block in MlaBlock::ALL {
        for (committed, rows, heads, parts) in
            [(0, 1, 1, 1), (1, 5, 3, 1), (63, 17, 1, 1), (70, 9, 8, 1), (130, 3, 5, 2), (190, 40, 1, 3), (33, 2, 9, 7)]
        {
            let name = format!("mla_attention::{block:?}_context_{committed}_rows_{rows}_heads_{heads}_parts_{parts}");
            suite.both(name, move |d| planned(d, committed, rows, heads, MlaPlan { block, parts }));
        }
        for (committed, rows, heads, parts) in
            [(1023, 65, 64, 2), (8192, 8, 8, 128), (500, 1025, 2, 4), (3000, 33, 64, 1)]
        {
            let name = format!("mla_attention::{block:?}_context_{committed}_rows_{rows}_heads_{heads}_parts_{parts}");
            suite.cuda(name, move |d| planned(d, committed, rows, heads, MlaPlan { block, parts }));
        }
    }
    // Each form of the second kernel, at its bounds: parts with all their keys, and more parts than hold any.
    for parts in [4, 5, 17, 18, 34, 35, 64, 136, 137, 192] {
        suite.both(format!("mla_attention::{parts}_parts"), move |d| many_parts(d, parts));
    }
    for block in MlaBlock::ALL {
        suite.both(format!("mla_attention::{block:?}_parts_share_weights"), move |d| parts_share_weights(d, block));
    }
    suite.both("mla_attention::star", star);
    suite.both("mla_attention::every_tree", every_tree);
    suite.both("mla_attention::picks_one_key", |d| picks(d, 140, 3, 1024));
    suite.both("mla_attention::picks_one_key_in_words", |d| picks(d, 50, 1, 256));
    suite.both("mla_attention::chain_is_plain_decoding", chain_is_plain);
    suite.both("mla_attention::long_chain_is_plain_decoding", long_chain_is_plain);
    suite.both("mla_attention::block_size_changes_no_bit", block_size);
    for block in MlaBlock::ALL {
        suite.both(format!("mla_attention::{block:?}_moving_scores"), move |d| moving_scores(d, block));
    }
    for block in MlaBlock::ALL {
        suite.both(format!("mla_attention::{block:?}_adversarial"), move |d| adversarial(d, block));
    }
    // The least that is asked of: one row of 8 heads, one launch.
    for committed in [0, 1, 16, 63, 200, 1000] {
        suite.both(format!("mla_attention::one_row_context_{committed}"), move |d| one_row(d, committed));
    }
    for committed in [8191, 32_768] {
        suite.cuda(format!("mla_attention::one_row_context_{committed}"), move |d| one_row(d, committed));
    }
    suite.both("mla_attention::many_words", |d| random(d, 5, 400, 1, 405));
    suite.both("mla_attention::padding_changes_no_bit", padding);
    suite.both("mla_attention::equal_scores", equal_scores);
    suite.both("mla_attention::huge_scores", huge_scores);
    suite.both("mla_attention::nan_stays_in_its_row", nan_in_a_query);
    suite.both("mla_attention::nan_in_a_key_is_seen", nan_in_a_key);
    suite.both("mla_attention::repeats", |d| repeats(d, 3));
    suite.cuda("mla_attention::repeats_200", |d| repeats(d, 200));
    suite.both("mla_attention::refuses", refuses);
}

/// One launch.
#[derive(Clone)]
pub struct Case {
    pub q: Vec<bf16>,
    /// `[committed + rows, KEY]`, before an f8 cache rounds it; slots behind hold NaN.
    pub cache: Vec<bf16>,
    pub kv: KvFormat,
    pub ancestors: Vec<u32>,
    pub committed: usize,
    pub rows: usize,
    pub heads: usize,
    pub slots: usize,
    pub scale: f32,
    /// The launcher's own where there is none.
    pub plan: Option<MlaPlan>,
}

impl Case {
    pub fn random(random: &mut Random, committed: usize, tree: &Tree, heads: usize, slots: usize) -> Self {
        let rows = tree.rows();
        Self {
            q: random.bf16s(rows * heads * KEY),
            cache: random.bf16s((committed + rows) * KEY),
            kv: KvFormat::Bf16,
            ancestors: tree.ancestors(),
            committed,
            rows,
            heads,
            slots,
            scale: SCALE,
            plan: None,
        }
    }

    /// Row `row` of a chain as a step of plain decoding.
    pub fn plain(&self, row: usize) -> Self {
        let (committed, query) = (self.committed + row, self.heads * KEY);
        let (q, cache) = (self.q[row * query..][..query].to_vec(), self.cache[..(committed + 1) * KEY].to_vec());
        Self { q, cache, ancestors: vec![1], committed, rows: 1, ..self.clone() }
    }

    /// Of the output of all rows that of one.
    pub fn of_row<'a>(&self, out: &'a [f32], row: usize) -> &'a [f32] {
        &out[row * self.heads * LATENT..][..self.heads * LATENT]
    }

    fn bytes(&self) -> Vec<u8> {
        match self.kv {
            KvFormat::Bf16 => self.cache.iter().flat_map(|v| v.to_le_bytes()).collect(),
            KvFormat::F8 => reference::f8_rows(&self.cache.iter().map(|v| v.to_f64()).collect::<Vec<_>>()),
        }
    }

    /// What the cache stands for.
    pub fn values(&self) -> Vec<bf16> {
        match self.kv {
            KvFormat::Bf16 => self.cache.clone(),
            KvFormat::F8 => reference::f8_values(&self.bytes()),
        }
    }

    pub fn expected(&self) -> Vec<f64> {
        let (q, cache, bits) = (&self.q, &self.values(), &self.ancestors);
        reference::mla_attention(q, cache, bits, self.committed, self.rows, self.heads, self.scale)
    }

    /// With the weights that the kernels have, whatever their blocks and parts take for a base.
    fn expected_rounded(&self) -> Vec<f64> {
        let (q, cache, bits) = (&self.q, &self.values(), &self.ancestors);
        let weights = reference::Weights::Rounded;
        reference::mla_attention_with(weights, q, cache, bits, self.committed, self.rows, self.heads, self.scale)
    }

    /// The f32 output, after the bf16 one is found to be its rounding.
    pub fn run(&self, device: &Device) -> Result<Vec<f32>, libtest_mimic::Failed> {
        let mut cache = self.bytes();
        cache.resize(self.slots * self.kv.row_bytes(), 0xFF);
        let (q, cache) = (device.upload(&self.q)?, device.upload(&cache)?);
        let (bits, state) = (device.upload(&self.ancestors)?, device.upload(&state_words(self.committed, &[]))?);
        let plan = self.plan.unwrap_or_else(|| mla_plan(device, self.slots, self.rows, self.heads));
        let workspace = device.alloc(plan.workspace(self.rows, self.heads))?;
        let values = self.rows * self.heads * LATENT;
        let (out, rounded) = (device.alloc(values)?, device.alloc(values)?);
        workspace.fill(0xFF)?;
        out.fill(0xFF)?;
        let p = MlaAttention {
            q: q.view(),
            cache: Cache { format: self.kv, bytes: cache.view_mut() },
            ancestors: bits.view(),
            state: state.view(),
            scale: self.scale,
            rows: self.rows,
            heads: self.heads,
            workspace: workspace.view_mut(),
            out_f32: out.view_mut(),
            out_bf16: rounded.view_mut(),
        };
        mla_attention_as(device, p, plan)?;
        let (out, rounded) = (out.read()?, rounded.read()?);
        for (i, (&value, &rounded)) in out.iter().zip(&rounded).enumerate() {
            let same = bf16::from_f32(value) == rounded || (value.is_nan() && rounded.is_nan());
            check(same, || format!("bf16: value {i} is {rounded}, expected {value} rounded"))?;
        }
        Ok(out)
    }
}

/// A tree of mixed shape: parents drawn among the last few rows.
pub fn mixed(random: &mut Random, rows: usize) -> Tree {
    Tree { parents: (0..rows).map(|i| i.saturating_sub(1 + random.below(3))).collect() }
}

/// So often that the error is that of enough queries.
fn random(device: &Device, committed: usize, rows: usize, heads: usize, slots: usize) -> Outcome {
    let mut random = Random::new(committed as u64 * 1000 + rows as u64);
    let (mut found, mut want) = (vec![], vec![]);
    for _ in 0..bounds::ATTENTION_QUERIES.div_ceil(rows * heads) {
        let tree = mixed(&mut random, rows);
        let case = Case::random(&mut random, committed, &tree, heads, slots);
        found.extend(case.run(device)?);
        want.extend(case.expected());
    }
    for (i, (found, want)) in found.chunks(LATENT).zip(want.chunks(LATENT)).enumerate() {
        close(&format!("query {i}"), found, want, bounds::ATTENTION_QUERY)?;
    }
    close("f32", &found, &want, bounds::ATTENTION)
}

fn planned(device: &Device, committed: usize, rows: usize, heads: usize, plan: MlaPlan) -> Outcome {
    let mut random = Random::new(committed as u64 * 1000 + rows as u64);
    let tree = mixed(&mut random, rows);
    let case = Case::random(&mut random, committed, &tree, heads, committed + rows + 40);
    let case = Case { plan: Some(plan), ..case };
    if !plan.block.runs_on(device) {
        let error = case.run(device).err().map(|e| format!("{e:?}")).unwrap_or_default();
        return check(error.contains("needs"), || format!("expected a refusal, found `{error}`"));
    }
    let found = case.run(device)?;
    close("f32", &found, &case.expected(), bounds::ATTENTION)?;
    close("rounded weights", &found, &case.expected_rounded(), bounds::ATTENTION_ROUNDED)
}

/// Parts of 64 keys each, an odd number of queries; then a context that fills only some of the parts.
fn many_parts(device: &Device, parts: usize) -> Outcome {
    let mut random = Random::new(parts as u64);
    let plan = MlaPlan { block: MlaBlock::Compact16, parts };
    for used in [parts, parts / 2 + 1, 1] {
        let (rows, heads) = (3, 1);
        let tree = mixed(&mut random, rows);
        let total = used * PART_KEYS as usize;
        let case = Case::random(&mut random, total - rows, &tree, heads, total + 40);
        let case = Case { plan: Some(plan), ..case };
        let found = case.run(device)?;
        close("f32", &found, &case.expected(), bounds::ATTENTION_QUERY)?;
        close("rounded weights", &found, &case.expected_rounded(), bounds::ATTENTION_ROUNDED)?;
    }
    Ok(())
}

/// Parts whose bounds lie around those of rounds and of the tree, each with a base of its own, differ from one part by
/// the order of their sums alone.
fn parts_share_weights(device: &Device, block: MlaBlock) -> Outcome {
    if !block.runs_on(device) {
        return Ok(());
    }
    let mut random = Random::new(17);
    for committed in [63, 64, 127, 191] {
        let tree = mixed(&mut random, 3);
        let case = Case::random(&mut random, committed, &tree, 2, 320);
        let mut case = Case { scale: 0.6, plan: Some(MlaPlan { block, parts: 1 }), ..case };
        let whole: Vec<f64> = case.run(device)?.into_iter().map(f64::from).collect();
        for parts in [2, 3] {
            case.plan = Some(MlaPlan { block, parts });
            close(&format!("{committed} keys in {parts} parts"), &case.run(device)?, &whole, 2e-6)?;
        }
    }
    Ok(())
}

/// Rows that see the root and themselves: most rounds of the tree have no key for a block.
fn star(device: &Device) -> Outcome {
    let (committed, rows, heads) = (37, 200, 2);
    let tree = Tree { parents: vec![0; rows] };
    let case = Case::random(&mut Random::new(18), committed, &tree, heads, committed + rows);
    for parts in [1, 3] {
        let case = Case { plan: Some(MlaPlan { block: MlaBlock::Compact16, parts }), ..case.clone() };
        close(&format!("{parts} parts"), &case.run(device)?, &case.expected(), bounds::ATTENTION)?;
    }
    Ok(())
}

/// Every tree of up to 7 rows, each row against attention over its own path alone.
fn every_tree(device: &Device) -> Outcome {
    let mut random = Random::new(3);
    for rows in 1..=7 {
        for tree in Tree::all(rows) {
            let case = Case::random(&mut random, 3, &tree, 1, 3 + rows);
            let got = case.run(device)?;
            for row in 0..rows {
                let slots = (0..3).chain(tree.path(row).into_iter().map(|i| 3 + i));
                let keys: Vec<bf16> = slots.flat_map(|j| case.cache[j * KEY..(j + 1) * KEY].to_vec()).collect();
                let (q, count) = (&case.q[row * KEY..(row + 1) * KEY], keys.len() / KEY);
                let want = reference::mla_attention(q, &keys, &[1], count - 1, 1, 1, SCALE);
                let what = format!("row {row} of {:?}", tree.parents);
                close(&what, &got[row * LATENT..(row + 1) * LATENT], &want, bounds::ATTENTION_QUERY)?;
            }
        }
    }
    Ok(())
}

/// Each row's query is one key's direction, so large that only this key counts: the output is its latent to the bit, if
/// the row sees it, and of none of the other keys that it does not see.
fn picks(device: &Device, committed: usize, heads: usize, slots: usize) -> Outcome {
    let mut random = Random::new(5);
    let rows = 40;
    let tree = mixed(&mut random, rows);
    let mut case = Case::random(&mut random, committed, &tree, heads, slots);
    case.scale = 1.0;
    // Signs only: a key's score with itself is KEY, with another about sqrt(KEY).
    let sign = |v: &bf16| if v.to_f32() < 0.0 { bf16::NEG_ONE } else { bf16::ONE };
    case.cache = case.cache.iter().map(sign).collect();
    let total = committed + rows;
    for shift in 0..total.div_ceil(heads) {
        let target = |row: usize, head: usize| (row * 7 + head * 3 + shift * heads + head) % total;
        for (i, q) in case.q.chunks_mut(KEY).enumerate() {
            let j = target(i / heads, i % heads);
            q.copy_from_slice(&case.cache[j * KEY..(j + 1) * KEY]);
        }
        let got = case.run(device)?;
        for (i, out) in got.chunks(LATENT).enumerate() {
            let j = target(i / heads, i % heads);
            let visible = reference::visible_slots(&case.ancestors, rows, i / heads, committed);
            let latent: Vec<f32> = case.cache[j * KEY..j * KEY + LATENT].iter().map(|v| v.to_f32()).collect();
            if visible.contains(&j) {
                equal(&format!("query {i} of key {j}"), out, &latent)?;
            } else {
                let hit = out.iter().zip(&latent).filter(|(a, b)| a == b).count();
                check(hit < LATENT * 3 / 4, || format!("query {i} sees key {j}, which is no ancestor"))?;
            }
        }
        if shift >= 12 {
            break;
        }
    }
    Ok(())
}

/// Row i of a chain has the same bits as plain decoding at position S + i.
fn chain_is_plain(device: &Device) -> Outcome {
    let (committed, rows, heads, slots) = (250, 6, 2, 1024);
    let case = Case::random(&mut Random::new(6), committed, &Tree::chain(rows), heads, slots);
    check(mla_plan(device, slots, rows, heads).parts > 1, || "one part".into())?;
    let got = case.run(device)?;
    (0..rows).try_for_each(|row| equal(&format!("row {row}"), case.of_row(&got, row), &case.plain(row).run(device)?))
}

/// As [`chain_is_plain`] with ancestors of several words, and blocks of another size for the plain steps.
fn long_chain_is_plain(device: &Device) -> Outcome {
    let case = Case::random(&mut Random::new(14), 21, &Tree::chain(70), 1, 128);
    let kinds = [[MlaBlock::Rows32, MlaBlock::Rows16], [MlaBlock::Compact32, MlaBlock::Compact16]];
    let mut run = kinds.into_iter().filter(|kind| kind.iter().all(|block| block.runs_on(device))).peekable();
    check(run.peek().is_some(), || "no kind of block runs".into())?;
    run.try_for_each(|[of_chain, of_row]| {
        let by = |case: Case, block| Case { plan: Some(MlaPlan { block, parts: 1 }), ..case }.run(device);
        let got = by(case.clone(), of_chain)?;
        [0, 1, 31, 32, 33, 42, 43, 63, 64, 69].into_iter().try_for_each(|row| {
            let name = format!("{of_chain:?}, row {row}");
            equal(&name, case.of_row(&got, row), &by(case.plain(row), of_row)?)
        })
    })
}

/// Scores that rise from key to key, fall, or leap once: the base follows late, early and in the last round.
fn moving_scores(device: &Device, block: MlaBlock) -> Outcome {
    let mut case = Case::random(&mut Random::new(15), 300, &Tree::chain(4), 2, 320);
    case.plan = Some(MlaPlan { block, parts: 1 });
    case.scale = 1.0;
    let total = case.cache.len() / KEY;
    let shapes: [fn(usize, usize) -> f32; 5] = [
        |j, _| j as f32 * 0.25,
        |j, _| j as f32 * 2.0,
        |j, total| (total - j) as f32 * 2.0,
        |j, _| if j == 299 { 500.0 } else { 0.0 },
        |j, _| if j % 64 == 63 { j as f32 } else { -300.0 },
    ];
    if !block.runs_on(device) {
        return Ok(());
    }
    for (i, shape) in shapes.iter().enumerate() {
        case.q = vec![bf16::ZERO; 8 * KEY];
        case.q.chunks_mut(KEY).for_each(|q| q[KEY - 1] = bf16::ONE);
        for (j, key) in case.cache.chunks_mut(KEY).enumerate() {
            key[KEY - 1] = bf16::from_f32(shape(j, total));
        }
        close(&format!("shape {i}"), &case.run(device)?, &case.expected(), bounds::ATTENTION)?;
    }
    Ok(())
}

/// What rounding of weights must not touch: the value of one key that counts alone although the base lags behind it,
/// the mean of equal keys, values of 1 whatever the weights. And two keys that share the weight.
fn adversarial(device: &Device, block: MlaBlock) -> Outcome {
    if !block.runs_on(device) {
        return Ok(());
    }
    for (kv, parts) in [(KvFormat::Bf16, 1), (KvFormat::F8, 3)] {
        let mut random = Random::new(16);
        let case = Case::random(&mut random, 270, &Tree::chain(2), 2, 320);
        let mut case = Case { kv, plan: Some(MlaPlan { block, parts }), scale: 1.0, ..case };
        let run = |case: &Case, what: &str, limit: f64| {
            let (found, want) = (case.run(device)?, case.expected());
            for (found, want) in found.chunks(LATENT).zip(want.chunks(LATENT)) {
                let largest = want.iter().fold(0f64, |a, b| a.max(b.abs()));
                let off = found.iter().zip(want).fold(0f64, |a, (f, w)| a.max((f64::from(*f) - w).abs()));
                check(off <= limit * largest, || format!("{kv}, {what}: {:.1e} off", off / largest))?;
            }
            Outcome::Ok(())
        };
        case.q.chunks_mut(KEY).for_each(|q| q[LATENT..].fill(bf16::ZERO));
        let clean = case.q.clone();
        let latents = case.cache.clone();
        case.q.chunks_mut(KEY).for_each(|q| q[..LATENT].fill(bf16::ZERO));
        case.q.chunks_mut(KEY).for_each(|q| q[KEY - 1] = bf16::ONE);
        for logit in [3.3, 16.4, 3000.0] {
            for (j, key) in case.cache.chunks_mut(KEY).enumerate() {
                key[KEY - 1] = bf16::from_f32(if j == 222 { logit } else { 0.0 });
            }
            run(&case, &format!("a logit of {logit}"), bounds::ATTENTION)?;
        }
        case.cache.chunks_mut(KEY).enumerate().for_each(|(j, key)| {
            key[KEY - 1] = bf16::from_f32(if j % 150 == 9 { 30.0 + j as f32 / 1000.0 } else { 0.0 });
        });
        run(&case, "two keys", bounds::ATTENTION_QUERY)?;
        case.q.fill(bf16::ZERO);
        run(&case, "equal keys", 1e-5)?;
        (case.q, case.scale) = (clean, SCALE);
        close("random", &case.run(device)?, &case.expected(), bounds::ATTENTION)?;
        case.cache = latents;
        case.cache.chunks_mut(KEY).for_each(|key| key[..LATENT].fill(bf16::ONE));
        case.q.chunks_mut(KEY).for_each(|q| q[LATENT..].copy_from_slice(&random.bf16s(KEY - LATENT)));
        run(&case, "values of 1", 1e-5)?;
    }
    Ok(())
}

/// One row of 8 heads, several draws, each by itself within the bound of many queries.
fn one_row(device: &Device, committed: usize) -> Outcome {
    let heads = bounds::ATTENTION_QUERIES;
    for seed in 0..if device.is_cuda() { 20 } else { 3 } {
        let mut random = Random::new(1000 * seed + committed as u64);
        let mut case = Case::random(&mut random, committed, &Tree::chain(1), heads, committed + 1);
        let run = |case: &Case, what: &str| close(what, &case.run(device)?, &case.expected(), bounds::ATTENTION);
        run(&case, "random")?;
        let plain = case.clone();
        case.scale = 1.0;
        case.cache.chunks_mut(KEY).for_each(|key| key[KEY - 1] = bf16::ZERO);
        case.q.chunks_mut(KEY).for_each(|q| q.fill(bf16::ZERO));
        run(&case, "all equal")?;
        case.q.chunks_mut(KEY).for_each(|q| q[KEY - 1] = bf16::ONE);
        case.cache[random.below(committed + 1) * KEY + KEY - 1] = bf16::from_f32(1000.0);
        run(&case, "one huge logit")?;
        case = plain;
        case.cache.chunks_mut(KEY).for_each(|key| key[..LATENT].fill(bf16::ONE));
        run(&case, "values of 1")?;
    }
    Ok(())
}

/// The first rows of a large launch have the bits of a small launch, halves of the columns those of whole ones.
fn block_size(device: &Device) -> Outcome {
    let (committed, heads) = (100, 4);
    let plan = |block| Some(MlaPlan { block, parts: 2 });
    for (one, other) in [(MlaBlock::Rows32, MlaBlock::Rows16), (MlaBlock::Wide64, MlaBlock::WideHalves)] {
        if !one.runs_on(device) {
            continue;
        }
        let large = Case::random(&mut Random::new(7), committed, &Tree::chain(17), heads, 160);
        let large = Case { plan: plan(one), ..large };
        let small = Case {
            q: large.q[..3 * heads * KEY].to_vec(),
            cache: large.cache[..(committed + 3) * KEY].to_vec(),
            ancestors: Tree::chain(3).ancestors(),
            rows: 3,
            plan: plan(other),
            ..large
        };
        let want = &large.run(device)?[..3 * heads * LATENT];
        equal(&format!("rows 0..3 by {other:?}"), &small.run(device)?, want)?;
    }
    Ok(())
}

/// A tree of 4 rows padded to 8: rows behind see themselves only, and change nothing.
fn padding(device: &Device) -> Outcome {
    let mut padded = Case::random(&mut Random::new(8), 20, &Tree::chain(8), 2, 40);
    for row in 4..8 {
        padded.ancestors[row] = 1 << row;
    }
    let plain = Case {
        q: padded.q[..4 * 2 * KEY].to_vec(),
        cache: padded.cache[..24 * KEY].to_vec(),
        ancestors: padded.ancestors[..4].to_vec(),
        rows: 4,
        ..padded
    };
    let got = padded.run(device)?;
    close("padded", &got, &padded.expected(), bounds::ATTENTION)?;
    equal("rows 0..4", &got[..4 * 2 * LATENT], &plain.run(device)?)
}

/// Equal keys have weights of exactly 1: the mean of values, and of 1 exactly 1.
fn equal_scores(device: &Device) -> Outcome {
    let mut case = Case::random(&mut Random::new(9), 200, &Tree::chain(3), 2, 300);
    case.q.fill(bf16::ZERO);
    close("mean", &case.run(device)?, &case.expected(), 1e-5)?;
    case.cache.fill(bf16::ONE);
    equal("ones", &case.run(device)?, &vec![1.0; 3 * 2 * LATENT])
}

/// Scores of 1e30 and of -1e30 neither overflow nor lose the row.
fn huge_scores(device: &Device) -> Outcome {
    let mut case = Case::random(&mut Random::new(10), 150, &Tree::chain(2), 1, 200);
    for sign in [1.0, -1.0] {
        let mut q = vec![bf16::ZERO; 2 * KEY];
        (q[0], q[KEY]) = (bf16::from_f32(sign * 1e15), bf16::from_f32(sign));
        case.q = q;
        case.cache.chunks_mut(KEY).enumerate().for_each(|(j, key)| key[0] = bf16::from_f32(1e15 * (j + 1) as f32));
        close("huge", &case.run(device)?, &case.expected(), bounds::ATTENTION)?;
    }
    Ok(())
}

fn nan_in_a_query(device: &Device) -> Outcome {
    let case = Case::random(&mut Random::new(11), 140, &Tree::chain(3), 2, 400);
    let clean = case.run(device)?;
    let at = 3 * KEY + 100;
    let mut q = case.q.clone();
    q[at] = bf16::NAN;
    let got = Case { q, ..case }.run(device)?;
    check(got[3 * LATENT..4 * LATENT].iter().all(|v| v.is_nan()), || "a NaN query gave numbers".into())?;
    equal("before", &got[..3 * LATENT], &clean[..3 * LATENT])?;
    equal("behind", &got[4 * LATENT..], &clean[4 * LATENT..])
}

/// A NaN in a visible key must not be dropped as if it were a small score.
fn nan_in_a_key(device: &Device) -> Outcome {
    for j in [0, 17, 129, 141] {
        let mut case = Case::random(&mut Random::new(12), 140, &Tree::chain(2), 1, 400);
        case.cache[j * KEY + KEY - 1] = bf16::NAN;
        let got = case.run(device)?;
        check(got[LATENT..].iter().all(|v| v.is_nan()), || format!("a NaN in key {j} gave numbers"))?;
    }
    Ok(())
}

fn repeats(device: &Device, times: usize) -> Outcome {
    let case = Case::random(&mut Random::new(13), 300, &Tree::chain(5), 2, 1024);
    let first = case.run(device)?;
    for _ in 1..times {
        equal("repeat", &case.run(device)?, &first)?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (q, cache, bits) = (device.zeros(2 * KEY)?, device.zeros(1024 * KEY)?, device.zeros(2)?);
    let (state, out, workspace) =
        (device.upload(&state_words(0, &[]))?, device.zeros(2 * LATENT)?, device.zeros(1 << 16)?);
    let p = || MlaAttention {
        q: q.view(),
        cache: Cache::bf16(cache.view_mut()),
        ancestors: bits.view(),
        state: state.view(),
        scale: SCALE,
        rows: 2,
        heads: 1,
        workspace: workspace.view_mut(),
        out_f32: out.view_mut(),
        out_bf16: cuda_std::GlobalMut::EMPTY,
    };
    let odd = cuda_std::Global::from_raw(q.view().addr() + 2, 2 * KEY);
    let short = Cache::bf16(cuda_std::GlobalMut::from_raw(cache.view().addr(), 100));
    let broken = Cache::f8(cuda_std::GlobalMut::from_raw(cache.view().addr(), 1000));
    mla_attention(device, p())?;
    let bad = [
        (MlaAttention { workspace: cuda_std::GlobalMut::EMPTY, ..p() }, "the workspace holds 0"),
        (MlaAttention { rows: 3, ..p() }, "q holds"),
        (MlaAttention { rows: 1026, ..p() }, "at most 1025"),
        (MlaAttention { q: odd, ..p() }, "multiple of 16"),
        (MlaAttention { cache: short, ..p() }, "the cache holds 200 bytes, expected bf16 rows of 1152"),
        (MlaAttention { cache: broken, ..p() }, "the cache holds 1000 bytes, expected f8 rows of 656"),
        (MlaAttention { state: cuda_std::Global::EMPTY, ..p() }, "the state holds"),
    ];
    for (p, why) in bad {
        let error = mla_attention(device, p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("mla_attention_") && error.contains(why), || {
            format!("expected a refusal of `{why}`, found `{error}`")
        })?;
    }
    Ok(())
}
