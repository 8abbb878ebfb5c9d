//! One small launch of every kernel against its reference twin, for `kdtree doctor`: whether this card, driver and
//! binary compute what they should. The tests do the same with many shapes; here each kernel has one that is typical.
//!
//! `products.rs` has the matrix products, `attention.rs` what reads and writes caches, `rows.rs` what works row by row,
//! `tokens.rs` what chooses tokens. The bounds are those of the tests (`reference::bounds`).

mod attention;
mod compare;
mod products;
mod random;
mod rows;
mod tokens;

use crate::device::Device;
use crate::kernels::KvFormat;
use compare::{Found, Probe};
pub use random::Random;

/// What came out for one kernel.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Report {
    pub kernel: &'static str,
    pub ok: bool,
    /// Distance from the twin, in the measure of the kernel's bound; 0 where values must be equal. None when there was
    /// nothing to compare.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
    /// Microseconds of the launch; of all of them where the launcher makes several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us: Option<f64>,
    /// What is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A check launches at least the kernels that it stands for.
type Check = (&'static [&'static str], fn(&Probe) -> Found);

/// All checks but the products, whose kernels `linear` names.
const CHECKS: &[Check] = &[
    (&["query"], attention::query),
    (&["kv_append"], attention::kv_append),
    (&["kv_append_f8"], attention::kv_append_f8),
    (&["mla_attention_16"], |p| attention::mla_16(p, KvFormat::Bf16)),
    (&["mla_attention_32"], |p| attention::mla_32(p, KvFormat::Bf16)),
    (&["mla_attention_compact_16"], |p| attention::mla_compact_16(p, KvFormat::Bf16)),
    (&["mla_attention_compact_32"], |p| attention::mla_compact_32(p, KvFormat::Bf16)),
    (&["mla_attention_wide_64"], |p| attention::mla_wide_64(p, KvFormat::Bf16)),
    (&["mla_attention_wide_halves"], |p| attention::mla_wide_halves(p, KvFormat::Bf16)),
    (&["mla_attention_f8_16"], |p| attention::mla_16(p, KvFormat::F8)),
    (&["mla_attention_f8_32"], |p| attention::mla_32(p, KvFormat::F8)),
    (&["mla_attention_f8_compact_16"], |p| attention::mla_compact_16(p, KvFormat::F8)),
    (&["mla_attention_f8_compact_32"], |p| attention::mla_compact_32(p, KvFormat::F8)),
    (&["mla_attention_f8_wide_64"], |p| attention::mla_wide_64(p, KvFormat::F8)),
    (&["mla_attention_f8_wide_halves"], |p| attention::mla_wide_halves(p, KvFormat::F8)),
    (&["mla_merge_4"], |p| attention::mla_parts(p, 3)),
    (&["mla_merge_17"], |p| attention::mla_parts(p, 9)),
    (&["mla_merge_34"], |p| attention::mla_parts(p, 18)),
    (&["mla_merge_136"], |p| attention::mla_parts(p, 36)),
    (&["block_attention_64"], attention::block_64),
    (&["block_attention_128"], attention::block_128),
    (&["head_norm_rope"], attention::head_norm_rope),
    (&["commit"], attention::commit),
    (&["gather_rows"], attention::gather_rows),
    (&["embed"], rows::embed),
    (&["rms_norm"], rows::rms_norm),
    (&["swiglu"], rows::swiglu),
    (&["tap"], rows::tap),
    (&["round_bf16"], rows::round_bf16),
    (&["widen_bf16"], rows::widen_bf16),
    (&["copy_words"], rows::copy_words),
    (&["read_words"], rows::read_words),
    (&["route"], rows::route),
    (&["expert_sort"], rows::expert_sort),
    (&["combine"], rows::combine),
    (&["argmax"], tokens::argmax),
    (&["draw"], tokens::draw),
    (&["sample_limits_max", "sample_limits_bins", "sample_limits"], tokens::sample_limits),
    (&["top_k_chunks", "top_k_select"], tokens::top_k),
    (&["tree_build_small"], tokens::tree_build_small),
    (&["tree_build"], tokens::tree_build),
    (&["tree_build_wide"], tokens::tree_build_wide),
    (&["accept"], tokens::accept),
    (&["advance"], tokens::advance),
    (&["repack_bf16"], products::repack_bf16),
    (&["repack_w4a16"], products::repack_bf16_scales),
    (&["repack_w4a16_s32"], products::repack_f32_scales),
];

/// Runs every check. A kernel that differs, or that ends with an error, does not keep the others from being tried.
pub fn run(device: &Device) -> Vec<Report> {
    let mut reports = run_without_products(device);
    for case in products::Case::all().into_iter().filter(|case| case.fits(device)) {
        reports.extend(reports_of(device, &[case.kernel], |probe| case.run(probe)));
    }
    reports
}

/// As [`run`], but for the products, whose twins take most of the time.
pub fn run_without_products(device: &Device) -> Vec<Report> {
    let mut reports = Vec::new();
    for &(kernels, check) in CHECKS.iter().filter(|(kernels, _)| kernels.iter().all(|k| attention::fits(device, k))) {
        reports.extend(reports_of(device, kernels, check));
    }
    reports
}

/// Runs one check, on a GPU twice: the first launch of a kernel loads it, the second is the one that is reported.
fn reports_of(device: &Device, kernels: &[&'static str], check: impl Fn(&Probe) -> Found) -> Vec<Report> {
    let probe = Probe::new(device);
    let mut found = check(&probe);
    if device.is_cuda() && found.is_ok() {
        found = check(&probe);
    }
    let (us, (ok, error, why)) = match found {
        Ok(error) => (probe.us(), (true, Some(error), None)),
        Err(failed) => (probe.us(), (false, failed.error, Some(failed.why))),
    };
    kernels.iter().map(|kernel| Report { kernel, ok, error, us, why: why.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::device::{LAUNCHED, Mode};

    /// A name in the list is no proof: what was launched is compared.
    #[test]
    fn every_report_is_of_a_kernel_that_was_launched() {
        let device = Device::cpu(Mode::Fast);
        LAUNCHED.take();
        let reports = run(&device);
        let named: BTreeSet<_> = reports.iter().map(|r| r.kernel).collect();
        assert_eq!(named, LAUNCHED.take());
        assert_eq!(named.len(), reports.len(), "a kernel is reported twice");
        for report in reports {
            assert!(report.ok && report.us.is_some() && report.error.is_some(), "{report:?}");
        }
    }

    #[test]
    fn what_differs_is_reported() {
        let device = Device::cpu(Mode::Fast);
        let of = |check: fn(&Probe) -> Found| reports_of(&device, &["x", "y"], check);
        let off = of(|_| compare::close("x", &[1.0, 2.0], &[1.0, 2.1], 1e-3));
        assert_eq!(off.len(), 2);
        assert!(!off[0].ok && off[0].error.is_some_and(|e| e > 0.04), "{off:?}");
        assert!(off[1].why.as_ref().is_some_and(|why| why.contains("at most 1e-3")), "{off:?}");
        let wrong: [fn(&Probe) -> Found; 5] = [
            |_| compare::close("x", &[f32::NAN], &[0.0], 1.0),
            |_| compare::close("x", &[], &[0.0], 1.0),
            |_| compare::near(&[1.1], &[1.0], &[1.0], 1e-2),
            |_| compare::near(&[f32::NAN], &[1.0], &[1.0], 1e-2),
            |_| compare::equal("x", &[1], &[2]),
        ];
        for check in wrong {
            assert!(of(check).iter().all(|report| !report.ok && report.why.is_some()));
        }
        let lost = of(|p| Ok(p.launch(|| Err(crate::device::DeviceError::NoDevice("gone".into()))).map(|()| 0.0)?));
        assert!(lost[0].why.as_ref().is_some_and(|why| why.contains("gone")) && lost[0].us.is_none(), "{lost:?}");
    }
}
