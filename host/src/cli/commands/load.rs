//! Loading: whether the model fits at all, and how far it is.

use std::time::{Duration, Instant};

use crate::cli::commands::progress::watching;
use crate::cli::failure::{Failure, Result};
use crate::cli::output::{self, Bytes};
use crate::device::Device;
use crate::engine::{Draft, Engine, EngineOptions};
use crate::plan::{Plan, Request};
use crate::weights::Bundle;

/// Loads that take longer than this are worth a line.
const LONG: Duration = Duration::from_secs(2);

/// Opens the engine, with a line on the terminal that says how far it is.
pub fn open(bundle: &Bundle, device: Device, options: EngineOptions) -> Result<Engine> {
    fits(bundle, &device, &options)?;
    let total = bundle.weight_bytes(options.draft == Draft::Dflash);
    let start = Instant::now();
    let engine = watching("loading", total, || bundle.handed_bytes(), || Engine::open(bundle, device, options))?;
    let time = start.elapsed();
    if time >= LONG {
        let rate = Bytes((total as f64 / time.as_secs_f64()) as u64);
        output::note(format_args!("loaded {} in {:.1} s, {rate}/s", Bytes(total), time.as_secs_f64()));
    }
    Ok(engine)
}

/// Weights and cache must fit in what is free; found out before anything is read.
fn fits(bundle: &Bundle, device: &Device, options: &EngineOptions) -> Result<()> {
    let Some(free) = device.free_memory() else { return Ok(()) };
    let context = options.context.unwrap_or(bundle.config().max_position_embeddings);
    let budget = if options.draft == Draft::Dflash { options.budget } else { 0 };
    let plan = Plan::new(bundle, &Request { context, kv: options.kv, budget, gpus: Vec::new() });
    let cache = plan.cache_bytes + plan.drafter_cache_bytes;
    if plan.weight_bytes + cache <= free {
        return Ok(());
    }
    Err(Failure::Memory(format!(
        "{}: expected {} for weights and {} for a cache of {context} tokens to fit, found {} free on {}; \
         --plan says what takes how much",
        bundle.path().display(),
        Bytes(plan.weight_bytes),
        Bytes(cache),
        Bytes(free),
        device.info().device
    )))
}
