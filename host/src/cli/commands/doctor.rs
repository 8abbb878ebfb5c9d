//! `kdtree doctor`: what this machine has, on what `--device` would decode, and whether each kernel there computes what
//! its reference does.

use serde_json::{Value, json};

use crate::cli::args::Doctor;
use crate::cli::failure::{Failure, Result};
use crate::cli::output::{self, Bytes};
use crate::device::{CudaReport, Device, DeviceError, available_memory, cuda_report};
use crate::selfcheck::{self, Report};

/// One thing looked at.
struct Check {
    what: &'static str,
    ok: bool,
    found: String,
}

pub fn run(args: &Doctor) -> Result<()> {
    let report = cuda_report();
    let opened = Device::open(args.device, None);
    let checks = [cpu(), memory(), decodes_on(&opened)];
    let kernels = opened.as_ref().map(selfcheck::run).unwrap_or_default();
    if args.json {
        let checks = checks.iter().map(|c| json!({ "check": c.what, "ok": c.ok, "found": c.found }));
        let checks: Vec<Value> = checks.collect();
        let version = env!("CARGO_PKG_VERSION");
        output::json(&json!({ "version": version, "cuda": report, "checks": checks, "kernels": kernels }))?;
    } else {
        output::line(format_args!("kdtree {}", env!("CARGO_PKG_VERSION")))?;
        cuda(&report)?;
        for Check { what, ok, found } in checks {
            output::line(format_args!("{:<9} {what}: {found}", mark(ok)))?;
        }
        lines(&kernels).iter().try_for_each(output::line)?;
    }
    opened?;
    verdict(&kernels)
}

fn mark(ok: bool) -> &'static str {
    if ok { "ok" } else { "BAD" }
}

/// One line a kernel, in columns.
fn lines(kernels: &[Report]) -> Vec<String> {
    let width = kernels.iter().map(|report| report.kernel.len()).max().unwrap_or(0);
    let line = |report: &Report| {
        let found = match (&report.why, report.error) {
            (Some(why), _) => why.clone(),
            (None, Some(error)) if error > 0.0 => format!("error {error:.1e}"),
            (None, _) => "error 0".to_string(),
        };
        let us = report.us.map_or(String::new(), |us| format!("  {us:.0} us"));
        format!("{:<9} {:width$}  {found:<13}{us}", mark(report.ok), report.kernel)
    };
    kernels.iter().map(line).collect()
}

/// Kernels that differ from their references are a failed verification.
fn verdict(kernels: &[Report]) -> Result<()> {
    let bad: Vec<_> = kernels.iter().filter(|report| !report.ok).map(|report| report.kernel).collect();
    if bad.is_empty() {
        return Ok(());
    }
    Err(Failure::Verification(format!("{} of {} kernels fail: {}", bad.len(), kernels.len(), bad.join(", "))))
}

/// The driver and its GPUs in a few lines.
fn cuda(report: &CudaReport) -> Result<()> {
    let driver = match (&report.driver, &report.library) {
        (Some(version), Some(library)) => format!("CUDA {version}, {library}"),
        (Some(version), None) => format!("CUDA {version}"),
        (None, _) => "none".into(),
    };
    output::line(format_args!("driver    {driver}"))?;
    if let Some(problem) = &report.problem {
        output::line(format_args!("          {problem}"))?;
    }
    output::line(format_args!("kernels   {}", report.kernels.join(", ")))?;
    for card in &report.cards {
        output::line(format_args!(
            "{:<9} {}, capability {}, {}, {} multiprocessors, {} shared memory a block",
            card.device,
            card.name,
            card.capability,
            Bytes(card.memory),
            card.multiprocessors,
            Bytes(card.max_shared.into())
        ))?;
        match (card.ptx, &card.problem) {
            (Some(ptx), _) => output::line(format_args!("          runs the kernels for {ptx}"))?,
            (None, problem) => output::line(format_args!("          {}", problem.as_deref().unwrap_or("no kernels")))?,
        }
    }
    Ok(())
}

fn cpu() -> Check {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Check { what: "processor", ok: true, found: format!("{threads} threads, {}", std::env::consts::ARCH) }
}

/// Memory that is free for weights on the CPU device.
fn memory() -> Check {
    let found = available_memory().map_or("unknown".into(), |bytes| format!("{} available", Bytes(bytes)));
    Check { what: "memory", ok: true, found }
}

/// The device that was chosen. A driver that is there but broken is an error.
fn decodes_on(opened: &std::result::Result<Device, DeviceError>) -> Check {
    let what = "decode runs on";
    match opened {
        Ok(device) => {
            let info = device.info();
            let kernels = info.ptx.map_or(String::new(), |ptx| format!(", kernels for {ptx}"));
            Check { what, ok: true, found: format!("{} ({}){kernels}", info.device, info.name) }
        }
        Err(error) => Check { what, ok: false, found: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(kernel: &'static str, error: f64, why: Option<&str>) -> Report {
        Report { kernel, ok: why.is_none(), error: Some(error), us: Some(12.3), why: why.map(str::to_string) }
    }

    #[test]
    fn kernels_in_columns() {
        let reports = [report("rms_norm", 1.2e-7, None), report("tap", 0.0, None), report("route", 0.5, Some("off"))];
        assert_eq!(
            lines(&reports),
            [
                "ok        rms_norm  error 1.2e-7   12 us",
                "ok        tap       error 0        12 us",
                "BAD       route     off            12 us"
            ]
        );
    }

    #[test]
    fn one_bad_kernel_is_exit_code_7() {
        let failure = verdict(&[report("tap", 0.0, None), report("route", 0.5, Some("off"))]);
        let failure = failure.expect_err("a kernel fails");
        assert_eq!((failure.exit_code(), failure.to_string().as_str()), (7, "1 of 2 kernels fail: route"));
        assert!(verdict(&[report("tap", 0.0, None)]).is_ok());
    }
}
