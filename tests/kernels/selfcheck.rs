//! `kdtree doctor`'s checks: all pass, and none of the kernels in the source is without one.

use std::collections::BTreeSet;
use std::path::PathBuf;

use kdtree::device::{Device, Mode};
use kdtree::selfcheck;

use super::support::{Outcome, Suite, check, equal, root};

pub fn cases(suite: &mut Suite) {
    suite.both("selfcheck::all_pass", all_pass);
    suite.cuda("selfcheck::repeats", repeats);
    suite.host("selfcheck::every_kernel_has_a_check", sources().is_none(), every_kernel_has_a_check);
}

fn all_pass(device: &Device) -> Outcome {
    let reports = selfcheck::run(device);
    let bad: Vec<_> = reports.iter().filter(|report| !report.ok).collect();
    check(bad.is_empty(), || format!("{bad:?}"))
}

/// A kernel's distance from its twin is one number of all its values, and the same 200 times. (Of products,
/// whose checks give the largest distance alone, bits are compared in `linear_*.rs`.)
fn repeats(device: &Device) -> Outcome {
    let bits = |reports: Vec<selfcheck::Report>| -> Vec<(&str, Option<u64>)> {
        reports.into_iter().map(|report| (report.kernel, report.error.map(f64::to_bits))).collect()
    };
    let first = bits(selfcheck::run_without_products(device));
    check(first.len() > 40 && first.iter().all(|report| report.1.is_some()), || format!("{first:?}"))?;
    for _ in 1..200 {
        equal("distances from the twins", &bits(selfcheck::run_without_products(device)), &first)?;
    }
    Ok(())
}

/// The kernels' sources, which a folder made by `cargo xtask dist` has not.
fn sources() -> Option<PathBuf> {
    let folder = root().join("gpu/src/kernels");
    folder.is_dir().then_some(folder)
}

/// Names of the functions behind `#[kernel]` or `#[kernel(..)]` in `text`.
fn kernels(text: &str) -> impl Iterator<Item = &str> {
    let marked = text.split("#[kernel").skip(1).filter_map(|item| item.split_once("]\npub fn "));
    marked.filter(|(attribute, _)| !attribute.contains('\n')).filter_map(|(_, item)| item.split('(').next())
}

fn every_kernel_has_a_check() -> Outcome {
    let mut declared = BTreeSet::new();
    for file in std::fs::read_dir(sources().ok_or("the sources are gone")?)? {
        let text = std::fs::read_to_string(file?.path())?;
        let attributes = text.lines().filter(|line| line.trim_start().starts_with("#[kernel")).count();
        check(attributes == kernels(&text).count(), || "a #[kernel] is not directly above its `pub fn`".into())?;
        declared.extend(kernels(&text).filter(|name| !name.starts_with("selftest_")).map(str::to_string));
    }
    let reports = selfcheck::run(&Device::cpu(Mode::Fast));
    let checked: BTreeSet<_> = reports.iter().map(|report| report.kernel.to_string()).collect();
    check(declared.len() > 30, || format!("found only {declared:?}"))?;
    check(declared == checked, || {
        let without: Vec<_> = declared.difference(&checked).collect();
        let gone: Vec<_> = checked.difference(&declared).collect();
        format!("kernels without a check in host/src/selfcheck: {without:?}; checks without a kernel: {gone:?}")
    })
}
