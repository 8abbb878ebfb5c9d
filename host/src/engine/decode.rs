//! The loop: prefill a prompt, then rounds until the output ends.

use std::ops::ControlFlow;

use gpu::args::state::{ERROR_DRAFT, ERROR_LOGITS, ERROR_ROUTER};

use super::draft::{DFlash, Drafter, MAX_CANDIDATES, Recorded};
use super::output::Output;
use super::round::Round as DeviceRound;
use super::{Draft, EngineError, EngineOptions, Outcome, Request, Result, Round, Stages, Step, StopReason};
use crate::device::{Device, Graph};
use crate::kernels;
use crate::model::{CHUNK, MAX_ROWS, Model, Pass, Taps, chunk_rows};
use crate::weights::{Bundle, DRAFTER};

/// A loaded model with its drafter, ready to decode one sequence at a time.
pub struct Engine {
    device: Device,
    model: Model,
    drafter: Drafter,
    round: DeviceRound,
    context: usize,
    /// The five stages of a round, captured once.
    stages: [Graph; 5],
    /// See [`EngineOptions`].
    eager: bool,
    poison: bool,
}

/// A round's stages, in order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Draft,
    Tree,
    Verify,
    Accept,
    Commit,
}

const STAGES: [Stage; 5] = [Stage::Draft, Stage::Tree, Stage::Verify, Stage::Accept, Stage::Commit];

/// What the stages of a round work on.
struct Parts<'a> {
    device: &'a Device,
    model: &'a Model,
    drafter: &'a Drafter,
    round: &'a DeviceRound,
}

impl Engine {
    /// Loads `bundle` on `device`.
    pub fn open(bundle: &Bundle, device: Device, options: EngineOptions) -> Result<Self> {
        let config = bundle.config();
        let context = options.context.unwrap_or(config.max_position_embeddings);
        if context == 0 || context > config.max_position_embeddings {
            let most = config.max_position_embeddings;
            return Err(EngineError::Request(format!("a context of {context} tokens; the model has 1 to {most}")));
        }
        let budget = if options.draft == Draft::None { 0 } else { options.budget };
        if budget + 1 > MAX_ROWS {
            return Err(EngineError::Request(format!(
                "a budget of {budget} nodes; at most {} are possible",
                MAX_ROWS - 1
            )));
        }
        let model = Model::load(&device, bundle, context, budget + 1, options.kv)?;
        let (drafter, depth, candidates) = open_drafter(&device, bundle, &model, options)?;
        device.loaded();
        let round = DeviceRound::new(&device, config.vocab_size, budget, depth, candidates, options)?;
        let parts = Parts { device: &device, model: &model, drafter: &drafter, round: &round };
        if device.is_cuda() {
            // The first pass outside a graph loads what the driver loads lazily.
            STAGES.iter().try_for_each(|&stage| parts.queue(stage))?;
            device.synchronize()?;
        }
        let mut graphs = Vec::with_capacity(STAGES.len());
        for stage in STAGES {
            graphs.push(device.capture(|| parts.queue(stage))?);
        }
        let stages = graphs.try_into().unwrap_or_else(|_| unreachable!("one graph a stage"));
        let EngineOptions { eager, poison, .. } = options;
        Ok(Self { device, model, drafter, round, context, stages, eager, poison })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Tokens that prompt and output may have together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Which kernel, tile and split every product takes, one line each: of a round, then of a full chunk of a prompt.
    pub fn explain(&self) -> Vec<String> {
        let mut lines = self.model.explain(&self.device, Pass::Verify, self.round.budget + 1);
        let prefill = self.model.explain(&self.device, Pass::Prefill, CHUNK.min(self.context));
        lines.extend(prefill.into_iter().map(|line| format!("prefill: {line}")));
        lines
    }

    /// Decodes. `emit` gets each run of new tokens, and ends the output with `Break`; before each chunk of the prompt
    /// and behind each layer of it, it gets an empty run. The engine holds the state of one sequence, so it is taken
    /// whole.
    pub fn generate(&mut self, request: &Request, emit: &mut dyn FnMut(Step) -> ControlFlow<()>) -> Result<Outcome> {
        self.check(request)?;
        let mut out = Output::new(request, emit);
        if request.max_new == 0 {
            return Ok(out.outcome);
        }
        let recorded = match (&self.drafter, request.golden.and_then(|g| g.draft.as_ref())) {
            (Drafter::Recorded(shape), Some(marginals)) => Some(shape.of(marginals)?),
            (Drafter::Recorded(_), None) => {
                return Err(EngineError::Request("recorded drafts need a golden that holds some".into()));
            }
            _ => None,
        };
        let started = std::time::Instant::now();
        let Some((bonus, gap)) = self.prefill(&request.prompt, &mut out)? else {
            out.outcome.stop = StopReason::Stopped;
            return Ok(out.outcome);
        };
        let mut committed = request.prompt.len();
        out.outcome.prefill_us = started.elapsed().as_secs_f64() * 1e6;
        let mut ended = out.push(&[bonus], &[gap]);
        while ended.is_none() {
            if let Some(marginals) = &recorded {
                marginals.propose(&self.round, out.outcome.ids.len() - 1)?;
            }
            let stages_us = self.run_round()?;
            let record = self.round.read_record()?;
            check_finite(record.error(), committed, "round", 0)?;
            let (tokens, gaps) = record.picks();
            let accepted = tokens.len() - 1;
            out.outcome.rounds.push(Round { nodes: record.nodes(), accepted, stages_us });
            committed += tokens.len();
            if self.poison {
                self.poison(committed)?;
            }
            ended = out.push(&tokens, &gaps);
        }
        if let Some(reason) = ended {
            out.outcome.stop = reason;
        }
        Ok(out.outcome)
    }

    fn check(&self, request: &Request) -> Result<()> {
        let (prompt, vocab) = (&request.prompt, self.model.config.vocab_size);
        if prompt.is_empty() {
            return Err(EngineError::Request("the prompt holds no token".into()));
        }
        if let Some(at) = prompt.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= vocab)) {
            let found = prompt[at];
            return Err(EngineError::Request(format!("prompt token {at} is {found}; ids are 0 to {}", vocab - 1)));
        }
        let wanted = prompt.len() + request.max_new;
        if wanted > self.context {
            return Err(EngineError::Request(format!(
                "{} prompt tokens and {} new ones need a context of {wanted}; it holds {}",
                prompt.len(),
                request.max_new,
                self.context
            )));
        }
        Ok(())
    }

    /// Fills the caches with the prompt and returns the first token with its gap; none if the caller ends it, who is
    /// asked before each chunk and behind each of its layers: on a CPU one takes seconds.
    fn prefill(&self, prompt: &[i32], out: &mut Output) -> Result<Option<(i32, f32)>> {
        let (device, round) = (&self.device, &self.round);
        let taps = self.drafter.taps();
        let mut committed = 0;
        for chunk in prompt.chunks(chunk_rows(prompt.len())) {
            if out.asked_to_stop() {
                return Ok(None);
            }
            round.set_state(committed, 0)?;
            let rows = round.chunk(chunk)?;
            let last = committed + chunk.len() == prompt.len();
            let first_logit = if last { chunk.len() - 1 } else { chunk.len() };
            let (state, logits) = (round.state.view_mut(), round.logits.view_mut());
            let mut after =
                |_| Ok(if out.asked_to_stop() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
            let pass = self.model.forward_watched(device, state, rows, taps, first_logit, logits, &mut after)?;
            if pass.is_break() {
                return Ok(None);
            }
            if let Drafter::DFlash(drafter) = &self.drafter {
                drafter.ingest(device, state.as_ref(), chunk.len(), false)?;
            }
            if last {
                // The one row with logits is a tree that is its root.
                let depth = rows.depths.part(first_logit, 1);
                round.pick(device, self.model.config.vocab_size, depth, 1)?;
                round.accept(device, 1)?;
            }
            check_finite(round.error()?, committed, "prefill", first_logit)?;
            committed += chunk.len();
        }
        let (picks, gaps) = round.read_record()?.picks();
        round.set_state(committed, picks[0])?;
        Ok(Some((picks[0], gaps[0])))
    }

    /// NaN in all cache rows from slot `committed` on.
    fn poison(&self, committed: usize) -> Result<()> {
        self.model.poison(committed)?;
        if let Drafter::DFlash(drafter) = &self.drafter {
            drafter.poison(committed)?;
        }
        Ok(())
    }

    /// Queues the five stages and returns their times.
    fn run_round(&self) -> Result<Stages> {
        let mut marks = vec![self.device.record()?];
        let parts = Parts { device: &self.device, model: &self.model, drafter: &self.drafter, round: &self.round };
        for (stage, graph) in STAGES.into_iter().zip(&self.stages) {
            match self.eager {
                true => parts.queue(stage)?,
                false => self.device.replay(graph)?,
            }
            marks.push(self.device.record()?);
        }
        let us = |i: usize| self.device.elapsed_us(&marks[i], &marks[i + 1]);
        Ok(Stages { draft: us(0)?, tree: us(1)?, verify: us(2)?, accept: us(3)?, commit: us(4)? })
    }
}

/// Fails on `error`, a code and a row; `first_logit` is the row of the step that the first row of logits belongs to.
fn check_finite(error: Option<(u32, usize)>, position: usize, step: &str, first_logit: usize) -> Result<()> {
    let Some((code, row)) = error else { return Ok(()) };
    let row = if code == ERROR_LOGITS { first_logit + row } else { row };
    let what = match code {
        ERROR_LOGITS => "a logit is NaN or infinite",
        ERROR_DRAFT => "a drafter's log-probability is NaN or infinite",
        ERROR_ROUTER => "a router logit is NaN",
        _ => "a kernel reported an error",
    };
    Err(EngineError::NonFinite(format!("{what}, in the {step} at position {position}, row {row}")))
}

/// Opens the drafter of the options; returns it with the depth and width of its marginals.
fn open_drafter(
    device: &Device,
    bundle: &Bundle,
    model: &Model,
    options: EngineOptions,
) -> Result<(Drafter, usize, usize)> {
    match options.draft {
        Draft::None => Ok((Drafter::None, 1, 1)),
        Draft::Recorded => {
            let Some(first) = bundle.goldens().iter().find_map(|g| g.draft.as_ref()) else {
                return Err(EngineError::Request("the bundle holds no recorded drafts".into()));
            };
            let recorded = Recorded { depth: first.depth, width: first.width };
            Ok((Drafter::Recorded(recorded), first.depth, first.width))
        }
        Draft::Dflash => {
            let Some(config) = bundle.drafter() else {
                return Err(EngineError::Request("the bundle holds no drafter".into()));
            };
            let width = options.budget.clamp(1, MAX_CANDIDATES.min(config.vocab_size));
            let load = || DFlash::load(device, bundle, config.clone(), model, width);
            let drafter = bundle.reading_ahead(&[DRAFTER.into()], load)?;
            let depth = drafter.depth();
            Ok((Drafter::DFlash(Box::new(drafter)), depth, width))
        }
    }
}

impl Parts<'_> {
    fn queue(&self, stage: Stage) -> crate::device::Result<()> {
        let (device, round, vocab) = (self.device, self.round, self.model.config.vocab_size);
        let (state, rows) = (round.state.view_mut(), round.budget + 1);
        match (stage, self.drafter) {
            (Stage::Draft, Drafter::DFlash(drafter)) => drafter.propose(device, self.model, round),
            (Stage::Draft, Drafter::None | Drafter::Recorded(_)) => Ok(()),
            (Stage::Tree, _) => kernels::tree_build(
                device,
                kernels::TreeBuild {
                    ids: round.draft_ids.view(),
                    logp: round.draft_logp.view(),
                    state,
                    tokens: round.tokens.view_mut(),
                    parents: round.parents.view_mut(),
                    depths: round.depths.view_mut(),
                    ancestors: round.ancestors.view_mut(),
                    sequences: 1,
                    levels: round.depth,
                    k: round.candidates,
                    budget: round.budget,
                    growth: round.growth,
                },
            ),
            (Stage::Verify, drafter) => {
                let taps: Option<&Taps> = drafter.taps();
                self.model.forward(device, state, round.tree(), taps, 0, round.logits.view_mut())?;
                round.pick(device, vocab, round.depths.view(), rows)
            }
            (Stage::Accept, _) => round.accept(device, rows),
            (Stage::Commit, drafter) => {
                self.model.commit(device, state.as_ref())?;
                if let Drafter::DFlash(drafter) = drafter {
                    drafter.ingest(device, state.as_ref(), drafter.depth() + 1, true)?;
                }
                kernels::advance(device, state)
            }
        }
    }
}
