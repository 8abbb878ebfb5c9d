//! How a case is timed.

use super::{Case, Memory, Run};
use crate::device::{Device, DeviceError, Result};

/// Replays of the graph; the median and the 95th percentile of their times are given.
pub const REPLAYS: usize = 15;
/// Runs of a graph at least: hides what starting a graph costs.
const RUNS: usize = 32;
/// Sets of memory at most: an operator that moves a few kilobytes cannot fill the cache.
const MAX_SETS: usize = 64;
/// The L2s that all sets together exceed.
const CACHES: u64 = 4;
/// How far above the read rate a rate may be measured: the two are timed apart.
const MARGIN: f64 = 1.02;

/// Sets of memory for a case that reads `bytes` in one run.
pub fn sets(device: &Device, bytes: usize) -> usize {
    let beyond = device.info().l2.map_or(0, |l2| CACHES * l2);
    (beyond / bytes.max(1) as u64 + 1).min(MAX_SETS as u64) as usize
}

/// Microseconds of one run.
pub struct Time {
    pub us: f64,
    pub p95: f64,
}

/// Times `runs` in turn.
pub fn time(device: &Device, runs: &[Run]) -> Result<Time> {
    let passes = RUNS.div_ceil(runs.len().max(1));
    runs.iter().try_for_each(|run| run(device))?;
    device.synchronize()?;
    if !device.is_cuda() {
        let start = device.record()?;
        runs.iter().try_for_each(|run| run(device))?;
        let us = device.elapsed_us(&start, &device.record()?)? / runs.len() as f64;
        return Ok(Time { us, p95: us });
    }
    let graph = device.capture(|| (0..passes).try_for_each(|_| runs.iter().try_for_each(|run| run(device))))?;
    device.replay(&graph)?;
    let mut times = Vec::with_capacity(REPLAYS);
    for _ in 0..REPLAYS {
        let start = device.record()?;
        device.replay(&graph)?;
        times.push(device.elapsed_us(&start, &device.record()?)? / (passes * runs.len()) as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(Time { us: times[REPLAYS / 2], p95: times[(REPLAYS * 95).div_ceil(100) - 1] })
}

/// What was measured of a case.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Measured {
    pub operator: &'static str,
    pub shape: String,
    pub rows: usize,
    /// Median and 95th percentile of one run, microseconds.
    pub us: f64,
    pub p95_us: f64,
    pub bytes: usize,
    pub gb_s: f64,
    /// Of the copy rate.
    pub share: f64,
    pub tflop_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
}

/// Whether this memory reads so fast.
fn possible(memory: &Memory, case: &Case, gb_s: f64) -> Result<()> {
    if gb_s <= memory.read * MARGIN {
        return Ok(());
    }
    Err(DeviceError::Unsupported(format!(
        "{} {} x {}: {gb_s:.0} GB/s, but this memory reads {:.0}: the sets of memory fit into a cache",
        case.operator, case.shape, case.rows, memory.read
    )))
}

/// Times a case; a rate that the memory does not have is an error.
pub fn measure(device: &Device, memory: &Memory, case: &Case) -> Result<Measured> {
    let Time { us, p95 } = time(device, &case.runs)?;
    let gb_s = case.bytes as f64 / us / 1e3;
    if device.is_cuda() {
        possible(memory, case, gb_s)?;
    }
    Ok(Measured {
        operator: case.operator,
        shape: case.shape.clone(),
        rows: case.rows,
        us,
        p95_us: p95,
        bytes: case.bytes,
        gb_s,
        share: gb_s / memory.copy,
        tflop_s: case.flops as f64 / us / 1e6,
        error: case.error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case() -> Case {
        Case { operator: "mla", shape: "8x64".into(), rows: 3, bytes: 1, flops: 0, runs: Vec::new(), error: None }
    }

    #[test]
    fn rates_above_the_read_rate_are_refused() {
        let memory = Memory { copy: 3900.0, read: 4500.0 };
        for gb_s in [10.0, 3950.0, 4500.0, 4580.0] {
            assert!(possible(&memory, &case(), gb_s).is_ok(), "{gb_s}");
        }
        for gb_s in [4600.0, 9000.0, f64::INFINITY, f64::NAN] {
            let error = possible(&memory, &case(), gb_s).unwrap_err().to_string();
            assert!(error.contains("mla 8x64 x 3") && error.contains("this memory reads 4500"), "{error}");
        }
    }
}
