//! Dense products of 0 to 128 rows, one by one, of matrices of few tiles, with a k for clusters and without, of many
//! tiles, and so tall that blocks share rows of x: the kernels that `linear` chooses among (of very tall matrices
//! `variants_agree` has the one that is theirs alone). And weights in groups of 64.

use kdtree::device::Device;
use kdtree::kernels::Acts;
use kdtree::linear::{Product, Weight, linear};
use libtest_mimic::Failed;

use super::linear::{Kind, Stored, Want, X, near, part};
use super::support::{Outcome, Random, Suite, check, equal};

/// Rows of the largest product.
const MOST: usize = 128;
/// Rows behind the last are filled with it, and keep it.
const UNTOUCHED: u32 = u32::MAX;

pub fn cases(suite: &mut Suite) {
    for kind in Kind::ALL {
        for (n, k) in [(40, 256), (40, 1152), (1500, 4224), (2880, 384), (4240, 256), (12_300, 384)] {
            let every: Vec<_> = (0..=MOST).collect();
            suite.cuda(format!("linear::{}::every_count::{n}x{k}", kind.name()), move |d| {
                counts(d, kind, [n, k], &every)
            });
        }
    }
    let kind = Kind::W4Middle;
    for (n, k) in [(65, 192), (17, 64), (12_300, 192)] {
        suite.both(format!("linear::{}::{n}x{k}", kind.name()), move |d| counts(d, kind, [n, k], &[1, 9]));
    }
    suite.cuda("linear::w4a16_g64::every_count::40x1152", move |d| {
        counts(d, kind, [40, 1152], &(0..=MOST).collect::<Vec<_>>())
    });
}

/// Each row is near the twin's, and has the same bits alone and among so many rows.
fn counts(device: &Device, kind: Kind, [n, k]: [usize; 2], counts: &[usize]) -> Outcome {
    let most = counts.iter().copied().max().unwrap_or(0);
    let mut random = Random::new((n + k) as u64);
    let stored = Stored::random(kind, [1, n, k], &mut random);
    let weight = Weight::new(device, &stored.host("w"))?;
    let x = X::random(device, most * k, &mut random)?;
    let y = device.alloc::<f32>(most * n)?;
    let product = |first: usize, rows: usize| -> Result<Vec<f32>, Failed> {
        y.fill(0xFF)?;
        let acts =
            Acts { f32: part(x.acts().f32, first * k, rows * k), bf16: part(x.acts().bf16, first * k, rows * k) };
        linear(device, &Product::plain(&weight, acts, rows, y.view_mut()))?;
        Ok(y.read()?)
    };
    let mut alone = Vec::new();
    for row in 0..most {
        alone.extend_from_slice(&product(row, 1)?[..n]);
    }
    near("rows alone", &alone, &Want::dense(&x.seen_by(kind), [k, 0], &stored, most))?;
    let alone: Vec<_> = alone.into_iter().map(f32::to_bits).collect();
    for &rows in counts {
        let bits: Vec<_> = product(0, rows)?.into_iter().map(f32::to_bits).collect();
        let (found, behind) = bits.split_at(rows * n);
        equal(&format!("{rows} rows"), found, &alone[..rows * n])?;
        check(behind.iter().all(|&word| word == UNTOUCHED), || format!("{rows} rows: more was written"))?;
    }
    Ok(())
}
