//! Tokens as they come, printed.

use std::ops::ControlFlow;

use super::watch::Watch;
use crate::cli::failure::Result;
use crate::cli::interrupt::Polite;
use crate::cli::output;
use crate::engine::{Engine, Outcome, Request, Round};
use crate::text::{TextStream, Tokenizer};

/// Runs the engine with trees of `budget` nodes, printing as tokens come. Ends early at a stop string, at Ctrl-C, and
/// when nobody reads.
pub fn generate(engine: &mut Engine, request: &Request, budget: usize, printer: &mut Printer) -> Result<Outcome> {
    let polite = Polite::begin();
    let mut failed = None;
    let mut watch = Watch::new(budget);
    let outcome = engine.generate(request, &mut |step| {
        watch.see(step.ids.len()).into_iter().for_each(output::note);
        let traced = step.round.map_or(Ok(()), |round| printer.trace(round, step.ids));
        match traced.and_then(|()| printer.push(step.ids)) {
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
pub struct Printer<'a> {
    stop_ids: &'a [i32],
    quiet: bool,
    tokenizer: Option<&'a Tokenizer>,
    /// Rounds that have been said, where they are.
    traced: Option<usize>,
    text: Option<(TextStream<'a>, String)>,
    count: usize,
    /// Tokens up to and with the one that completed a stop string.
    stopped_at: Option<usize>,
}

impl<'a> Printer<'a> {
    /// `quiet` prints nothing; the text comes back from [`Self::finish`].
    pub fn new(stop_ids: &'a [i32], stop_texts: &[String], tokenizer: Option<&'a Tokenizer>, quiet: bool) -> Self {
        let text = tokenizer.map(|t| (TextStream::new(t, stop_texts), String::new()));
        Self { stop_ids, quiet, tokenizer, traced: None, text, count: 0, stopped_at: None }
    }

    /// Says what each round does, too, as it is done: one line on stderr.
    pub fn tracing(self, on: bool) -> Self {
        Self { traced: on.then_some(0), ..self }
    }

    fn trace(&mut self, round: &Round, ids: &[i32]) -> Result<()> {
        let Some(number) = &mut self.traced else { return Ok(()) };
        let shown = match self.tokenizer {
            Some(tokenizer) => format!("{:?}", tokenizer.decode(ids)?),
            None => format!("{ids:?}"),
        };
        let (nodes, accepted, ms) = (round.nodes, round.accepted, round.stages_us.total() / 1000.0);
        output::note(format_args!("round {number}: {nodes} nodes, {accepted} accepted, {ms:.1} ms: {shown}"));
        *number += 1;
        Ok(())
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
    pub fn finish(mut self) -> Result<(Option<String>, Option<usize>)> {
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
