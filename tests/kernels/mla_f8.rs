//! Attention over an f8 cache: the bits of a bf16 cache of the same values, and what the rounding of the cache costs.

use cuda_std::bf16;
use gpu::args::attention::{F8_ROTARY, F8_SCALES, KEY, LATENT};
use kdtree::device::Device;
use kdtree::kernels::{KvFormat, MlaBlock, MlaPlan, mla_plan};
use kdtree::reference::{self, bounds};

use super::mla_attention::{Case, mixed};
use super::support::{Outcome, Random, Suite, check, close, equal};
use super::tree::Tree;

/// Relative error of an output for a cache of random values, against the cache before it was rounded. Each value is off
/// by 0.027 of its size and what is left of it in a mean of random values by as much; the scores are off, too.
const ROUNDED_CACHE: [f64; 2] = [0.05, 0.2];

pub fn cases(suite: &mut Suite) {
    for block in MlaBlock::ALL {
        for (committed, rows, heads, parts) in
            [(0, 1, 1, 1), (63, 17, 1, 1), (70, 9, 8, 1), (130, 3, 5, 2), (190, 40, 1, 3)]
        {
            let name = format!("mla_f8::{block:?}_context_{committed}_rows_{rows}_heads_{heads}_parts_{parts}");
            suite.both(name, move |d| has_the_bits_of_its_values(d, committed, rows, heads, MlaPlan { block, parts }));
        }
        for (committed, rows, heads, parts) in [(1023, 65, 64, 2), (500, 1025, 2, 4), (3000, 33, 64, 1)] {
            let name = format!("mla_f8::{block:?}_context_{committed}_rows_{rows}_heads_{heads}_parts_{parts}");
            suite.cuda(name, move |d| has_the_bits_of_its_values(d, committed, rows, heads, MlaPlan { block, parts }));
        }
        suite.both(format!("mla_f8::{block:?}_every_code"), move |d| every_code(d, block));
    }
    for (committed, rows, heads) in [(0, 1, 1), (64, 2, 4), (129, 17, 1), (300, 5, 8)] {
        let name = format!("mla_f8::context_{committed}_rows_{rows}_heads_{heads}");
        suite.both(name, move |d| random(d, committed, rows, heads));
    }
    suite.both("mla_f8::chain_is_plain_decoding", chain_is_plain);
    suite.both("mla_f8::nan_stays_where_it_is_seen", nan);
    suite.both("mla_f8::error_of_the_rounded_cache", error_of_the_rounded_cache);
}

fn case(committed: usize, rows: usize, heads: usize) -> Case {
    let mut random = Random::new(committed as u64 * 1000 + rows as u64 + 1);
    let tree = mixed(&mut random, rows);
    let case = Case::random(&mut random, committed, &tree, heads, committed + rows + 40);
    Case { kv: KvFormat::F8, ..case }
}

fn random(device: &Device, committed: usize, rows: usize, heads: usize) -> Outcome {
    let case = case(committed, rows, heads);
    close("f32", &case.run(device)?, &case.expected(), bounds::ATTENTION)
}

/// Codes times a power of two are bf16 values: nothing is rounded on the way, whatever the block.
fn has_the_bits_of_its_values(device: &Device, committed: usize, rows: usize, heads: usize, plan: MlaPlan) -> Outcome {
    if !plan.block.runs_on(device) {
        return Ok(());
    }
    let case = Case { plan: Some(plan), ..case(committed, rows, heads) };
    let found = case.run(device)?;
    let wide = Case { kv: KvFormat::Bf16, cache: case.values(), ..case };
    equal("bits", &found, &wide.run(device)?)
}

/// One key alone is its latent, to the bit: all codes in all columns of a panel, scales from the least to the largest.
fn every_code(device: &Device, block: MlaBlock) -> Outcome {
    if !block.runs_on(device) {
        return Ok(());
    }
    let mut case = case(0, 1, 1);
    case.plan = Some(MlaPlan { block, parts: 1 });
    for (i, exponent) in [-100, -64, -9, 0, 7].into_iter().enumerate() {
        let value = |column: usize| {
            // 447 keeps the group's scale.
            let code = ((column * 37 + i * 11) % 256) as u8;
            let code = if code & 0x7F == 0x7F || column % 128 == 5 { 0x7E } else { code };
            bf16::from_f64(reference::e4m3(code) * 2f64.powi(exponent))
        };
        case.cache = (0..KEY).map(|column| if column < LATENT { value(column) } else { bf16::ZERO }).collect();
        equal("values", &case.values(), &case.cache)?;
        case.q.fill(bf16::ZERO);
        let want: Vec<f32> = case.cache[..LATENT].iter().map(|v| v.to_f32()).collect();
        equal(&format!("scale 2^{exponent}"), &case.run(device)?, &want)?;
    }
    Ok(())
}

/// Row i of a chain has the same bits as plain decoding at position S + i; a tree's path those of a chain.
fn chain_is_plain(device: &Device) -> Outcome {
    let (committed, rows, heads, slots) = (250, 6, 2, 1024);
    let case = Case::random(&mut Random::new(6), committed, &Tree::chain(rows), heads, slots);
    let case = Case { kv: KvFormat::F8, ..case };
    check(mla_plan(device, slots, rows, heads).parts > 1, || "one part".into())?;
    let got = case.run(device)?;
    (0..rows)
        .try_for_each(|row| equal(&format!("row {row}"), case.of_row(&got, row), &case.plain(row).run(device)?))?;
    // Rows behind that nobody of the chain sees, with NaN for their keys.
    let bits: Vec<u32> = case.ancestors.iter().copied().chain((0..3).map(|i| 1 << (rows + i))).collect();
    let mut tree = Case { rows: rows + 3, ancestors: bits, ..case };
    tree.q.extend(vec![bf16::ONE; 3 * heads * KEY]);
    let keys = (0..3 * KEY).map(|i| if i % KEY < LATENT { bf16::ONE } else { bf16::NAN });
    tree.cache.extend(keys);
    let found = tree.run(device)?;
    equal("siblings that are NaN", &found[..rows * heads * LATENT], &got)?;
    check(found[rows * heads * LATENT..].iter().all(|v| v.is_nan()), || "NaN rows gave numbers".into())
}

/// A NaN in a latent or in a rotary key. One that lies in the tree has a finite latent: all rows of a tile multiply it.
fn nan(device: &Device) -> Outcome {
    check(F8_SCALES == LATENT && F8_ROTARY == LATENT + 16, || "the layout has changed".into())?;
    for (j, column) in [(0, 3), (17, KEY - 1), (129, 511), (141, KEY - 20)] {
        let case = Case::random(&mut Random::new(12), 140, &Tree::chain(2), 1, 400);
        let mut case = Case { kv: KvFormat::F8, ..case };
        case.cache[j * KEY + column] = bf16::NAN;
        let got = case.run(device)?;
        let seen = if j <= 140 { 0 } else { LATENT };
        check(got[seen..].iter().all(|v| v.is_nan()), || format!("a NaN in key {j} gave numbers"))?;
        check(got[..seen].iter().all(|v| v.is_finite()), || format!("a NaN in key {j} is seen by all"))?;
    }
    Ok(())
}

/// Against the values before they were rounded to e4m3: scores of a few units, and of tens.
fn error_of_the_rounded_cache(device: &Device) -> Outcome {
    for (scale, limit) in [0.15, 1.0].into_iter().zip(ROUNDED_CACHE) {
        let case = Case { scale, ..case(300, 5, 8) };
        let exact = Case { kv: KvFormat::Bf16, ..case };
        let want = exact.expected();
        let rounded = Case { kv: KvFormat::F8, q: exact.q, cache: exact.cache, ancestors: exact.ancestors, ..exact };
        let found = rounded.run(device)?;
        let distance = |a: &[f32]| a.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>();
        let error = (distance(&found) / want.iter().map(|b| b * b).sum::<f64>()).sqrt();
        println!("scale {scale}: an f8 cache is {error:.1e} from a bf16 one");
        close("against the cache before rounding", &found, &want, limit)?;
        check(error > limit / 20.0, || format!("{error:.1e} is too small for a cache of e4m3"))?;
    }
    Ok(())
}
