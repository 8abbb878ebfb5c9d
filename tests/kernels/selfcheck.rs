//! `kdtree doctor`'s checks: all pass, and none of the kernels in the source is without one.

use std::collections::BTreeSet;
use std::path::PathBuf;

use kdtree::device::{Device, Mode};
use kdtree::selfcheck;

use super::support::{Outcome, Suite, check, root};

pub fn cases(suite: &mut Suite) {
    suite.both("selfcheck::all_pass", all_pass);
    suite.host("selfcheck::every_kernel_has_a_check", sources().is_none(), every_kernel_has_a_check);
}

fn all_pass(device: &Device) -> Outcome {
    let reports = selfcheck::run(device);
    let bad: Vec<_> = reports.iter().filter(|report| !report.ok).collect();
    check(bad.is_empty(), || format!("{bad:?}"))
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
