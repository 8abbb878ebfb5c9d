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
    for (option, given, families) in [
        ("--variant", args.variant.is_some(), &["w4a16", "w4a16-f32", "bf16"][..]),
        ("--shared", args.shared.is_some(), &["experts"]),
        ("--format", args.format.is_some(), &["experts"]),
        ("--routing", args.routing.is_some(), &["experts", "sort"]),
        ("--kv", args.kv.is_some(), &["mla", "rope", "commit"]),
    ] {
        if given && !wanted.iter().all(|name| families.contains(name)) {
            return Err(Failure::usage(format!("{option} is for {} alone", families.join(", "))));
        }
    }
    let options = Options {
        shapes: args.shape.clone(),
        rows: args.m.clone(),
        kv: args.kv.unwrap_or_default(),
        routing: args.routing.unwrap_or_default(),
        numbers: args.format.unwrap_or_default(),
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
    // What cannot be is refused before anything is timed.
    let families = FAMILIES.iter().filter(|(name, _)| wanted.contains(name));
    let families: Vec<_> = families.map(|(_, cases)| cases(&device, &options).map_err(asked)).collect::<Result<_>>()?;
    let mut measured = Vec::new();
    for cases in families {
        for case in cases {
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
