//! What came out of a run: the summary, the document, and the comparison with a golden.

use serde_json::{Value, json};

use super::plan::Plan;
use crate::cli::args::Decode;
use crate::cli::commands::{formats, some};
use crate::cli::failure::{Failure, Result};
use crate::cli::output::{self, Bytes};
use crate::device::Info;
use crate::engine::{Draft, Outcome, Round, Sampling, Stages, StopReason};
use crate::weights::{Bundle, shortest};

pub struct Report<'a> {
    /// Time that loading took.
    pub load: std::time::Duration,
    pub args: &'a Decode,
    pub bundle: &'a Bundle,
    pub plan: &'a Plan<'a>,
    pub info: Info,
    pub outcome: Outcome,
    /// The text without stop token and stop string.
    pub text: Option<String>,
    /// Tokens up to and with the one that completed a stop string.
    pub stopped_at: Option<usize>,
}

/// Where the output leaves the golden.
struct Difference {
    at: usize,
    expected: i32,
    found: i32,
    /// The golden's gap there.
    gap: f32,
    /// This run's gap there: its token leads by as much.
    gap_found: f32,
    /// Another order of sums may decide this step either way: between the two programs, the distance of the two tokens'
    /// logits has moved by the sum of both gaps at least, and that is within the bundle's tolerance.
    near_tie: bool,
}

impl Difference {
    fn document(self) -> Value {
        let Self { at, expected, found, gap, gap_found, near_tie } = self;
        let (gap, gap_found) = (shortest(gap), shortest(gap_found));
        json!({
            "at": at, "expected": expected, "found": found, "gap": gap, "gap_found": gap_found, "near_tie": near_tie
        })
    }
}

fn sampling(s: Sampling) -> Value {
    json!({
        "temp": shortest(s.temperature),
        "top_k": s.top_k,
        "top_p": shortest(s.top_p),
        "min_p": shortest(s.min_p),
        "seed": s.seed,
    })
}

impl Report<'_> {
    /// The tokens that count.
    fn ids(&self) -> &[i32] {
        &self.outcome.ids[..self.stopped_at.unwrap_or(self.outcome.ids.len()).min(self.outcome.ids.len())]
    }

    fn stop(&self) -> Value {
        match (self.outcome.stop, self.stopped_at) {
            (_, Some(_)) => json!("text"),
            (StopReason::Token(id), None) => json!({ "token": id }),
            (StopReason::MaxNew, None) => json!("max_new"),
            (StopReason::Stopped, None) => json!("interrupted"),
        }
    }

    pub fn interrupted(&self) -> bool {
        self.outcome.stop == StopReason::Stopped && self.stopped_at.is_none()
    }

    /// Drafted tokens accepted at each depth, counted in rounds.
    fn accepted_by_depth(&self) -> Vec<usize> {
        let deepest = self.outcome.rounds.iter().map(|r| r.accepted).max().unwrap_or(0);
        (1..=deepest).map(|depth| self.outcome.rounds.iter().filter(|r| r.accepted >= depth).count()).collect()
    }

    /// Tokens that the rounds committed, over their number.
    fn tokens_per_round(&self) -> Option<f64> {
        let rounds = self.outcome.rounds.len();
        let tokens: usize = self.outcome.rounds.iter().map(|r| r.accepted + 1).sum();
        (rounds > 0).then(|| tokens as f64 / rounds as f64)
    }

    /// Time of the rounds by stage.
    fn stages(&self) -> Stages {
        self.outcome.rounds.iter().fold(Stages::default(), |sum, Round { stages_us: s, .. }| Stages {
            draft: sum.draft + s.draft,
            tree: sum.tree + s.tree,
            verify: sum.verify + s.verify,
            accept: sum.accept + s.accept,
            commit: sum.commit + s.commit,
        })
    }

    fn difference(&self) -> Option<Difference> {
        let golden = self.plan.golden?;
        let pairs = golden.tokens.iter().zip(self.ids());
        let at = pairs.enumerate().find_map(|(at, (expected, found))| (expected != found).then_some(at))?;
        let (gap, gap_found) = (golden.gap[at], self.outcome.gaps[at]);
        let near_tie = gap + gap_found <= self.bundle.settings().tolerance(self.plan.golden_index);
        Some(Difference { at, expected: golden.tokens[at], found: self.ids()[at], gap, gap_found, near_tie })
    }

    /// Largest difference of a gap from the golden's, up to where the tokens part.
    fn gap_error(&self) -> Option<f32> {
        let golden = self.plan.golden?;
        let equal = self.difference().map_or(self.ids().len(), |d| d.at);
        let pairs = golden.gap.iter().zip(&self.outcome.gaps).take(equal);
        Some(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max))
    }

    /// An output that leaves its golden is a failure, unless it leaves it at a near-tie: what follows there is another
    /// text, and says nothing.
    pub fn verdict(&self) -> Result<()> {
        match self.difference() {
            Some(d) if !d.near_tie => Err(Failure::Verification(format!(
                "golden {}: token {}: expected {}, found {} (gap {:.4}, here {:.4})",
                self.plan.golden_index, d.at, d.expected, d.found, d.gap, d.gap_found
            ))),
            _ => Ok(()),
        }
    }

    /// How the output stands to its golden, unless it fails.
    fn golden_line(&self) -> Option<String> {
        self.plan.golden?;
        let (golden, ids) = (self.plan.golden_index, self.ids().len());
        match self.difference() {
            None => Some(format!("golden {golden}: all {ids} tokens match")),
            Some(d) if d.near_tie => Some(format!(
                "golden {golden}: equal up to a near-tie at token {} (gap {:.4}, here {:.4}): expected {}, found {}",
                d.at, d.gap, d.gap_found, d.expected, d.found
            )),
            Some(_) => None,
        }
    }

    /// The run in a few lines on stderr.
    pub fn summary(&self) {
        let (ids, rounds) = (self.ids().len(), self.outcome.rounds.len());
        let (prefill, decode) = (self.outcome.prefill_us / 1e6, self.stages().total() / 1e6);
        let rate = if decode > 0.0 {
            format!(" ({:.1} tokens/s)", ids.saturating_sub(1) as f64 / decode)
        } else {
            String::new()
        };
        let prompt = self.plan.prompt.len();
        output::note(format_args!(
            "prefill: {prompt} tokens in {prefill:.3} s; decode: {ids} tokens in {decode:.3} s{rate}"
        ));
        if let Some(each) = self.tokens_per_round() {
            let draft = match self.plan.draft {
                Draft::None => "no drafts".into(),
                Draft::Recorded => format!("recorded drafts, budget {}", self.plan.budget),
                Draft::Dflash => format!("dflash, budget {}", self.plan.budget),
            };
            output::note(format_args!(
                "{draft}: {rounds} rounds, {each:.2} tokens a round, accepted by depth {:?}",
                self.accepted_by_depth()
            ));
            let s = self.stages();
            let ms = |us: f64| us / 1000.0 / rounds as f64;
            output::note(format_args!(
                "ms a round: draft {:.2}, tree {:.2}, verify {:.2}, accept {:.2}, commit {:.2}",
                ms(s.draft),
                ms(s.tree),
                ms(s.verify),
                ms(s.accept),
                ms(s.commit)
            ));
        }
        let shares = formats(self.bundle, false);
        let shares: Vec<String> =
            shares.iter().map(|(name, s)| format!("{name} {} weights, {}", s.weights, Bytes(s.bytes as u64))).collect();
        output::note(format_args!("formats: {}", shares.join("; ")));
        if let Some(Sampling { temperature, top_k, top_p, min_p, seed }) = self.plan.sampling {
            output::note(format_args!(
                "drawn: temperature {temperature}, top-k {top_k}, top-p {top_p}, min-p {min_p}, seed {seed}"
            ));
        }
        if let Some(line) = self.golden_line() {
            output::note(line);
        }
    }

    /// The run as one document.
    pub fn document(&self, explain: Option<Vec<String>>) -> Result<Value> {
        let used = matches!(self.plan.draft, Draft::Dflash);
        let mut document = json!({
            "bundle": self.bundle.path().display().to_string(),
            "name": self.bundle.settings().name,
            "device": self.info.device,
            "device_name": self.info.name,
            "ptx": self.info.ptx,
            "draft": self.plan.draft,
            "budget": self.plan.budget,
            "prompt_tokens": self.plan.prompt.len(),
            "ids": self.ids(),
            "tokens": self.ids().len(),
            "stop": self.stop(),
            "rounds": self.outcome.rounds.len(),
            "tokens_per_round": self.tokens_per_round(),
            "accepted_by_depth": self.accepted_by_depth(),
            "load_us": self.load.as_secs_f64() * 1e6,
            "prefill_us": self.outcome.prefill_us,
            "decode_us": self.stages().total(),
            "stages_us": self.stages(),
            "formats": formats(self.bundle, false),
            "kv": self.args.kv,
        });
        let mut add = |key: &str, value: Value| {
            if let (Some(fields), false) = (document.as_object_mut(), value.is_null()) {
                fields.insert(key.into(), value);
            }
        };
        add("prompt", some(self.plan.rendered.as_ref()));
        add("text", some(self.text.as_ref()));
        add("sampling", some(self.plan.sampling.map(sampling)));
        add("min_prob", some(self.args.min_prob.map(shortest)));
        add("spine", some(self.args.spine.then_some(true)));
        add("drafter_formats", some(used.then(|| formats(self.bundle, true))));
        add("explain", some(explain));
        if self.args.trace_tree {
            let rounds = self.outcome.rounds.iter();
            let rounds = rounds.map(|r| json!({ "nodes": r.nodes, "accepted": r.accepted, "stages_us": r.stages_us }));
            add("trace", rounds.collect());
        }
        if self.plan.golden.is_some() {
            let difference = self.difference();
            add("golden", json!(self.plan.golden_index));
            add("match", json!(difference.as_ref().is_none_or(|d| d.near_tie)));
            add("equal_tokens", json!(difference.as_ref().map_or(self.ids().len(), |d| d.at)));
            add("gap_error", some(self.gap_error().map(shortest)));
            add("difference", some(difference.map(Difference::document)));
        }
        Ok(document)
    }
}
