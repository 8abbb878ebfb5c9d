//! Attention of large random trees, up to all that a budget gives, and the bounds of the parts of the longest contexts.

use cuda_std::bf16;
use gpu::args::attention::{KEY, LATENT};
use gpu::kernels::mla_attention::{part_start, parts_used};
use kdtree::device::Device;
use kdtree::kernels::{KvFormat, MlaBlock, MlaPlan};
use kdtree::reference::bounds;

use super::mla_attention::{Case, mixed};
use super::support::{Outcome, Random, Suite, check, close, equal};
use super::tree::Tree;

/// Rows of the largest tree, and tokens of the longest context.
const MOST_ROWS: usize = 1025;
const LONGEST: u32 = 262_144;

pub fn cases(suite: &mut Suite) {
    for rows in [32, 33, 64, 65, 129] {
        suite.both(format!("mla_trees::{rows}_rows"), move |d| shapes(d, rows, 11));
    }
    for rows in [256, 257, 513, 1000, MOST_ROWS - 1, MOST_ROWS] {
        suite.cuda(format!("mla_trees::{rows}_rows"), move |d| shapes(d, rows, 70));
    }
    suite.both("mla_trees::poisoned_rows", |d| poisoned(d, 40));
    suite.cuda("mla_trees::poisoned_rows_1025", |d| poisoned(d, MOST_ROWS));
    suite.host("mla_trees::parts_of_long_contexts", false, parts_of_long_contexts);
}

/// A tree that is nearly a chain, one that is nearly a star, and one of each depth between, against the twin.
fn shapes(device: &Device, rows: usize, committed: usize) -> Outcome {
    let mut random = Random::new(rows as u64);
    let far = |random: &mut Random, reach: usize| Tree {
        parents: (0..rows).map(|i| i.saturating_sub(1 + random.below(reach))).collect(),
    };
    let any = |random: &mut Random| Tree { parents: (0..rows).map(|i| random.below(i.max(1))).collect() };
    for tree in [mixed(&mut random, rows), far(&mut random, rows), any(&mut random)] {
        let case = Case::random(&mut random, committed, &tree, 1, committed + rows);
        close("rows", &case.run(device)?, &case.expected(), bounds::ATTENTION)?;
    }
    Ok(())
}

/// Rows that a path does not see hold NaN in their keys: its bits are those of a chain with no other rows. (In a latent
/// NaN passes through a weight of 0: a round turns whole rejected rows into NaN, and they are overwritten before they
/// are read.)
fn poisoned(device: &Device, rows: usize) -> Outcome {
    let mut random = Random::new(3);
    let tree = mixed(&mut random, rows);
    let path = tree.path(rows - 1);
    for kv in KvFormat::ALL {
        for block in MlaBlock::ALL.into_iter().filter(|block| block.runs_on(device)) {
            let plan = Some(MlaPlan { block, parts: 1 });
            let case = Case { kv, plan, ..Case::random(&mut random, 0, &tree, 1, rows) };
            let clean = case.run(device)?;
            let mut cache = case.cache.clone();
            for (row, key) in cache.chunks_mut(KEY).enumerate().filter(|(row, _)| !path.contains(row)) {
                key[LATENT + row % (KEY - LATENT)] = bf16::NAN;
            }
            let found = Case { cache, ..case }.run(device)?;
            for &row in &path {
                let at = row * LATENT..(row + 1) * LATENT;
                equal(&format!("{kv}, {block:?}, row {row}"), &found[at.clone()], &clean[at])?;
            }
        }
    }
    Ok(())
}

/// Parts follow each other without a gap, none is empty, and nothing overflows 32 bits on the way.
fn parts_of_long_contexts() -> Outcome {
    for rows in [1, 8, 64, MOST_ROWS as u32] {
        for context in [0, 1, 15, 16, 17, 63, 64, 65, 4095, 4096, 32_767, 32_769, LONGEST - 1, LONGEST] {
            let end = context + rows;
            for most in [1, 2, 7, 16, 65, 132, 264, 1024, 4096] {
                let parts = parts_used(end, most);
                check((1..=most).contains(&parts), || format!("{parts} of {most} parts for {end} keys"))?;
                let bounds: Vec<_> = (0..=parts).map(|part| part_start(end, part, parts)).collect();
                let whole = bounds[0] == 0 && bounds[parts as usize] == end;
                check(whole && bounds.windows(2).all(|b| b[0] < b[1]), || {
                    format!("{end} keys in {parts}: {bounds:?}")
                })?;
            }
        }
    }
    Ok(())
}
