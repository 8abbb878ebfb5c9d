//! `kdtree decode`: continue a prompt. `plan.rs` makes the arguments definite, `report.rs` says what came out.

mod load;
mod memory;
mod plan;
mod report;
mod watch;

use std::ops::ControlFlow;

use super::open;
use crate::cli::args::Decode;
use crate::cli::failure::{Failure, Result};
use crate::cli::interrupt::Polite;
use crate::cli::output;
use crate::device::{Device, Mode};
use crate::engine::{Engine, EngineOptions, Outcome, Request};
use crate::text::{TextStream, Tokenizer};
use crate::weights::Verify;
use plan::Plan;
use report::Report;
use watch::Watch;

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
        context: Some(plan.context),
        draft: plan.draft,
        budget: plan.budget,
        growth: plan.growth,
        sampling: plan.sampling,
    };
    let started = std::time::Instant::now();
    let mut engine = load::open(&bundle, device, options)?;
    let load = started.elapsed();
    if args.explain {
        engine.explain().iter().for_each(output::note);
    }
    let mut printer = Printer::new(&plan, tokenizer.as_ref(), args.json);
    let outcome = generate(&mut engine, &plan, &mut printer)?;
    let (text, stopped_at) = printer.finish()?;
    let tokenizer = tokenizer.as_ref();
    let report = Report { load, args, bundle: &bundle, plan: &plan, tokenizer, info, outcome, text, stopped_at };
    if args.trace_tree {
        report.trace()?;
    }
    report.summary();
    if args.json {
        output::json(&report.document(if args.explain { Some(engine.explain()) } else { None })?)?;
    }
    if report.interrupted() {
        return Err(Failure::Interrupted);
    }
    report.verdict()
}

/// Runs the engine, printing as tokens come. Ends early at a stop string, at Ctrl-C, and when nobody reads.
fn generate(engine: &mut Engine, plan: &Plan, printer: &mut Printer) -> Result<Outcome> {
    let request = Request {
        prompt: plan.prompt.clone(),
        max_new: plan.max_new,
        stop_ids: plan.stop_ids.clone(),
        golden: plan.golden,
    };
    let polite = Polite::begin();
    let mut failed = None;
    let mut watch = Watch::new(plan.budget);
    let outcome = engine.generate(&request, &mut |ids| {
        watch.see(ids.len()).into_iter().for_each(output::note);
        match printer.push(ids) {
            Ok(ControlFlow::Continue(())) if !polite.requested() => ControlFlow::Continue(()),
            Ok(_) => ControlFlow::Break(()),
            Err(failure) => {
                failed = Some(failure);
                ControlFlow::Break(())
            }
        }
    })?;
    failed.map_or(Ok(outcome), Err)
}

/// Prints tokens as they come, as text where there is a tokenizer.
struct Printer<'a> {
    stop_ids: &'a [i32],
    quiet: bool,
    text: Option<(TextStream<'a>, String)>,
    count: usize,
    /// Tokens up to and with the one that completed a stop string.
    stopped_at: Option<usize>,
}

impl<'a> Printer<'a> {
    fn new(plan: &'a Plan, tokenizer: Option<&'a Tokenizer>, quiet: bool) -> Self {
        let text = tokenizer.map(|t| (TextStream::new(t, &plan.stop_texts), String::new()));
        Self { stop_ids: &plan.stop_ids, quiet, text, count: 0, stopped_at: None }
    }

    fn push(&mut self, ids: &[i32]) -> Result<ControlFlow<()>> {
        let mut fresh = String::new();
        for &id in ids {
            let gap = if self.count == 0 { "" } else { " " };
            self.count += 1;
            match &mut self.text {
                None => fresh.push_str(&format!("{gap}{id}")),
                // A stop token ends the text and is none of it.
                Some(_) if self.stop_ids.contains(&id) => break,
                Some((stream, _)) => {
                    fresh.push_str(&stream.push(id)?);
                    if stream.stopped() {
                        self.stopped_at = Some(self.count);
                        break;
                    }
                }
            }
        }
        self.put(&fresh)?;
        Ok(if self.stopped_at.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn put(&mut self, fresh: &str) -> Result<()> {
        if let Some((_, text)) = &mut self.text {
            text.push_str(fresh);
        }
        if self.quiet || fresh.is_empty() { Ok(()) } else { output::put(fresh) }
    }

    /// Prints what was held back and ends the line. Returns the text, and where a stop string cut the tokens.
    fn finish(mut self) -> Result<(Option<String>, Option<usize>)> {
        let rest = self.text.as_mut().map_or(String::new(), |(stream, _)| stream.finish());
        self.put(&rest)?;
        let ended = match &self.text {
            Some((_, text)) => text.is_empty() || text.ends_with('\n'),
            None => self.count == 0,
        };
        if !self.quiet && !ended {
            output::put('\n')?;
        }
        Ok((self.text.map(|(_, text)| text), self.stopped_at))
    }
}
