//! `kdtree decode`: continue a prompt. `plan.rs` makes the arguments definite, `report.rs` says what came out.

mod memory;
mod plan;
mod report;

use super::answer::{Printer, generate};
use super::{load, open};
use crate::cli::args::Decode;
use crate::cli::failure::{Failure, Result};
use crate::cli::output;
use crate::device::{Device, Mode};
use crate::engine::{EngineOptions, Request};
use crate::text::Tokenizer;
use crate::weights::Verify;
pub(super) use plan::DEFAULT_BUDGET;
use plan::Plan;
use report::Report;

/// Order of threads in checked mode; a run can be repeated.
const CHECKED_SEED: u64 = 1;

pub fn run(args: &Decode) -> Result<()> {
    plan::check_flags(args)?;
    let mut bundle = open(&args.bundle, Verify::WhenSmall, args.layers)?;
    if let Some(folder) = &args.drafter {
        bundle.attach_drafter(folder)?;
    }
    if args.plan {
        return memory::run(args, &bundle, plan::DEFAULT_BUDGET as usize);
    }
    let tokenizer = Tokenizer::of(&bundle)?;
    let plan = Plan::new(args, &bundle, tokenizer.as_ref())?;
    let device = if args.checked {
        Device::cpu(Mode::Checked { seed: CHECKED_SEED })
    } else {
        Device::open(args.device, args.ptx.as_deref())?
    };
    let info = device.info();
    output::note(format_args!("{} on {} ({})", bundle.settings().name, info.device, info.name));
    let options = EngineOptions {
        kv: args.kv,
        context: Some(plan.context),
        draft: plan.draft,
        budget: plan.budget,
        growth: plan.growth,
        sampling: plan.sampling,
        ..EngineOptions::default()
    };
    let started = std::time::Instant::now();
    let mut engine = load::open(&bundle, device, options)?;
    let load = started.elapsed();
    if args.explain {
        engine.explain().iter().for_each(output::note);
    }
    let mut printer =
        Printer::new(&plan.stop_ids, &plan.stop_texts, tokenizer.as_ref(), args.json).tracing(args.trace_tree);
    let request = Request {
        prompt: plan.prompt.clone(),
        max_new: plan.max_new,
        stop_ids: plan.stop_ids.clone(),
        golden: plan.golden,
    };
    let outcome = generate(&mut engine, &request, plan.budget, &mut printer)?;
    let (text, stopped_at) = printer.finish()?;
    let report = Report { load, args, bundle: &bundle, plan: &plan, info, outcome, text, stopped_at };
    report.summary();
    if args.json {
        output::json(&report.document(if args.explain { Some(engine.explain()) } else { None })?)?;
    }
    if report.interrupted() {
        return Err(Failure::Interrupted);
    }
    report.verdict()
}
