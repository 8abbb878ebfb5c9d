//! The output as it grows: where it ends inside an accepted run.

use std::ops::ControlFlow;

use super::{Outcome, Request, Step, StopReason};

impl Outcome {
    fn empty() -> Self {
        Self { ids: Vec::new(), rounds: Vec::new(), stop: StopReason::MaxNew, gaps: Vec::new(), prefill_us: 0.0 }
    }
}

/// The output as it grows.
pub(super) struct Output<'a, 'b> {
    pub outcome: Outcome,
    request: &'a Request<'a>,
    emit: &'b mut dyn FnMut(Step) -> ControlFlow<()>,
}

impl<'a, 'b> Output<'a, 'b> {
    pub fn new(request: &'a Request<'a>, emit: &'b mut dyn FnMut(Step) -> ControlFlow<()>) -> Self {
        Self { outcome: Outcome::empty(), request, emit }
    }

    /// Whether the caller ends the output here, with nothing new.
    pub fn asked_to_stop(&mut self) -> bool {
        (self.emit)(Step { ids: &[], round: None }).is_break()
    }

    /// Takes the tokens of the prefill or of the last round up to the limit or the first stop token, which is the last
    /// to be taken. Says why the output ends, if it does.
    pub fn push(&mut self, tokens: &[i32], gaps: &[f32]) -> Option<StopReason> {
        let room = self.request.max_new - self.outcome.ids.len();
        let stop = tokens.iter().take(room).position(|id| self.request.stop_ids.contains(id));
        let take = stop.map_or(tokens.len().min(room), |at| at + 1);
        self.outcome.ids.extend_from_slice(&tokens[..take]);
        self.outcome.gaps.extend_from_slice(&gaps[..take]);
        let asked = (self.emit)(Step { ids: &tokens[..take], round: self.outcome.rounds.last() }).is_break();
        match stop {
            Some(at) => Some(StopReason::Token(tokens[at])),
            None if asked => Some(StopReason::Stopped),
            None => (self.outcome.ids.len() == self.request.max_new).then_some(StopReason::MaxNew),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOP: i32 = 7;

    /// Feeds `runs` until the output ends; returns ids, the runs as emitted, and why it ended.
    fn feed(max_new: usize, runs: &[&[i32]]) -> (Vec<i32>, Vec<Vec<i32>>, Option<StopReason>) {
        let request = Request { prompt: vec![1], max_new, stop_ids: vec![STOP], golden: None };
        let mut emitted = Vec::new();
        let mut emit = |step: Step| {
            emitted.push(step.ids.to_vec());
            ControlFlow::Continue(())
        };
        let mut output = Output::new(&request, &mut emit);
        let ended = runs.iter().find_map(|run| output.push(run, &vec![0.0; run.len()]));
        let outcome = output.outcome;
        assert_eq!(outcome.ids.len(), outcome.gaps.len());
        (outcome.ids, emitted, ended)
    }

    #[test]
    fn a_stop_inside_an_accepted_run_is_the_last_token() {
        let (ids, emitted, ended) = feed(5, &[&[10, 11, STOP, 20, 21, 22]]);
        assert_eq!((ids, ended), (vec![10, 11, STOP], Some(StopReason::Token(STOP))));
        assert_eq!(emitted, [vec![10, 11, STOP]]);
    }

    #[test]
    fn a_stop_at_each_place() {
        for at in 0..6 {
            let mut run = [10, 11, 12, 20, 21, 22];
            run[at] = STOP;
            let (ids, _, ended) = feed(5, &[&run]);
            assert_eq!(ids.len(), (at + 1).min(5), "stop at {at}");
            assert_eq!(ended, Some(if at < 5 { StopReason::Token(STOP) } else { StopReason::MaxNew }), "stop at {at}");
        }
    }

    #[test]
    fn the_limit_cuts_a_run_and_counters_agree() {
        let (ids, emitted, ended) = feed(5, &[&[10, 11], &[12, 13, 14, 15], &[16]]);
        assert_eq!((ids.len(), ended), (5, Some(StopReason::MaxNew)));
        assert_eq!(emitted.concat(), ids);
        // A token that ends the output both ways: the stop token is the reason.
        assert_eq!(feed(2, &[&[10, STOP, 11]]).2, Some(StopReason::Token(STOP)));
    }

    #[test]
    fn token_0_is_a_token() {
        assert_eq!(feed(3, &[&[0, 0], &[0, 0]]).0, [0, 0, 0]);
    }
}
