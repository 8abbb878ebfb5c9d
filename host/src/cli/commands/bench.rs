//! `kdtree bench kernel`: times operators at real sizes.

use serde_json::json;

use crate::bench::{self, FAMILIES, Measured, Memory, Options};
use crate::cli::args::BenchKernel;
use crate::cli::failure::{Failure, Result};
use crate::cli::output;
use crate::device::{Device, DeviceError};

pub fn run(args: &BenchKernel) -> Result<()> {
    let names: Vec<_> = FAMILIES.iter().map(|(name, _)| *name).collect();
    let wanted: Vec<&str> = match args.kernel.is_empty() {
        true => names.clone(),
        false => args.kernel.iter().map(String::as_str).collect(),
    };
    if let Some(unknown) = wanted.iter().find(|name| !names.contains(name)) {
        return Err(Failure::usage(format!("no bench `{unknown}`; there are {}", names.join(", "))));
    }
    let (shapes, rows) = (args.shape.clone(), args.m.clone());
    const DENSE: [&str; 3] = ["w4a16", "w4a16-f32", "bf16"];
    if args.variant.is_some() && !wanted.iter().all(|name| DENSE.contains(name)) {
        return Err(Failure::usage(format!("--variant is for {} alone", DENSE.join(", "))));
    }
    if args.shared.is_some() && wanted != ["experts"] {
        return Err(Failure::usage("--shared is for experts alone".to_owned()));
    }
    let options = Options {
        shapes,
        rows,
        kv: args.kv,
        routing: args.routing,
        numbers: args.format,
        shared: args.shared,
        variant: args.variant,
    };
    let device = Device::open(args.device, args.ptx.as_deref())?;
    options.check(&device)?;
    let info = device.info();
    let memory = Memory::measure(&device)?;
    let kernels = info.ptx.as_ref().map_or(String::new(), |ptx| format!(", kernels for {ptx}"));
    output::note(format_args!(
        "{} ({}){kernels}: copies {:.0} GB/s, reads {:.0} GB/s",
        info.device, info.name, memory.copy, memory.read
    ));
    let mut measured = Vec::new();
    for (_, cases) in FAMILIES.iter().filter(|(name, _)| wanted.contains(name)) {
        for case in cases(&device, &options).map_err(asked)? {
            let found = bench::measure(&device, &memory, &case.map_err(asked)?)?;
            if !args.json {
                if measured.is_empty() {
                    output::line(HEADING)?;
                }
                output::line(row(&found))?;
            }
            measured.push(found);
        }
    }
    if args.json {
        output::json(&json!({ "device": info, "memory_gb_s": memory, "replays": bench::REPLAYS, "cases": measured }))?;
    }
    Ok(())
}

/// A launcher that refuses a case refuses what was asked for.
fn asked(error: DeviceError) -> Failure {
    match error {
        DeviceError::Contract { .. } => Failure::usage(error.to_string()),
        error => error.into(),
    }
}

const HEADING: &str =
    "operator  shape                               rows         us        p95    GB/s  of copy  TFLOP/s    error";

fn row(m: &Measured) -> String {
    let error = m.error.map_or("-".into(), |error| format!("{error:.1e}"));
    format!(
        "{:<9} {:<34} {:>5} {:>10.2} {:>10.2} {:>7.0} {:>7.1}% {:>8.1} {error:>8}",
        m.operator,
        m.shape,
        m.rows,
        m.us,
        m.p95_us,
        m.gb_s,
        m.share * 100.0,
        m.tflop_s
    )
}
