//! Accepted length on the 30 held-out prompts of the trained model, with the DFlash drafter at every budget.
//!
//! `acceptance-cases.safetensors` holds what the numpy twin counts for each prompt with float64 sums; its totals are
//! the published ones, to the last round. The engine sums in float32: an output may leave the plain one at a near-tie,
//! and then counts all the same.

use std::collections::HashSet;
use std::ops::ControlFlow;

use kdtree::device::Device;
use kdtree::engine::{Draft, Engine, EngineOptions, Request};
use kdtree::weights::Bundle;
use libtest_mimic::Failed;
use safetensors::SafeTensors;

use super::support::{Outcome, Suite, check, root};

const CASES: &str = "bundles/acceptance-cases.safetensors";
const BUNDLE: &str = "bundles/k26-small-int4.kdtr";
const BUDGETS: [usize; 5] = [4, 8, 16, 32, 64];
const PROMPTS: usize = 30;
/// Tokens committed a round, against the reference over the same prompts.
const WITHIN: f64 = 0.05;
/// Prompts on the CPU device: of the texts with this many different tokens (a loop is too easily drafted) those whose
/// smallest gap is largest, so that no near-tie leads to another text.
const CPU_PROMPTS: usize = 2;
const CPU_DIFFERENT: usize = 48;
const CPU_BUDGET: usize = 16;

pub fn cases(suite: &mut Suite) {
    for budget in BUDGETS {
        suite.cuda(format!("acceptance::{budget}"), move |d| run(d, budget, PROMPTS));
    }
    suite.model(format!("acceptance::two_prompts::{CPU_BUDGET}"), |d| run(d, CPU_BUDGET, CPU_PROMPTS));
}

/// One prompt with what the reference says of it.
struct Case {
    index: usize,
    prompt: Vec<i32>,
    tokens: Vec<i32>,
    gaps: Vec<f32>,
    rounds: usize,
    committed: usize,
}

/// The prompts with the reference's counts for `budget`, the varied and sure ones first.
fn read(budget: usize) -> Result<Vec<Case>, Failed> {
    let bytes = std::fs::read(root().join(CASES)).map_err(|e| format!("{CASES}: {e}"))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let words = |name: &str| -> Result<Vec<i32>, Failed> {
        let word = |b: &[u8]| i32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        Ok(file.tensor(name)?.data().chunks_exact(4).map(word).collect())
    };
    let (prompts, tokens, gap) = (words("prompts")?, words("tokens")?, words("gap")?);
    let at = words("budgets")?.iter().position(|&b| b == budget as i32).ok_or("the cases lack this budget")?;
    let counts = |name: &str| -> Result<Vec<i32>, Failed> { Ok(words(name)?[at * PROMPTS..][..PROMPTS].to_vec()) };
    let (rounds, committed) = (counts("rounds")?, counts("committed")?);
    let part = |all: &[i32], i: usize| all.chunks_exact(all.len() / PROMPTS).nth(i).unwrap_or_default().to_vec();
    let case = |index| Case {
        index,
        prompt: part(&prompts, index),
        tokens: part(&tokens, index),
        gaps: part(&gap, index).into_iter().map(|bits| f32::from_bits(bits as u32)).collect(),
        rounds: rounds[index] as usize,
        committed: committed[index] as usize,
    };
    let mut cases: Vec<Case> = (0..PROMPTS).map(case).collect();
    let smallest = |case: &Case| case.gaps.iter().copied().fold(f32::INFINITY, f32::min);
    let varied = |case: &Case| case.tokens.iter().collect::<HashSet<_>>().len() >= CPU_DIFFERENT;
    cases.sort_by(|a, b| varied(b).cmp(&varied(a)).then(smallest(b).total_cmp(&smallest(a))));
    Ok(cases)
}

/// Decodes the first `count` prompts and compares tokens a round with the reference's.
fn run(device: &Device, budget: usize, count: usize) -> Outcome {
    let cases = read(budget)?;
    let bundle = Bundle::open(&root().join(BUNDLE))?;
    let context = cases.iter().map(|c| c.prompt.len() + c.tokens.len()).max();
    let options = EngineOptions { context, draft: Draft::Dflash, budget, ..EngineOptions::default() };
    let mut engine = Engine::open(&bundle, device.clone(), options)?;
    let (mut found, mut expected, mut parted) = ([0, 0], [0, 0], 0);
    for case in &cases[..count] {
        let (prompt, max_new) = (case.prompt.clone(), case.tokens.len());
        let request = Request { prompt, max_new, stop_ids: vec![], golden: None };
        let decoded = engine.generate(&request, &mut |_| ControlFlow::Continue(()))?;
        if let Some(at) = decoded.ids.iter().zip(&case.tokens).position(|(a, b)| a != b) {
            // The two logits have changed places: they moved by both gaps together.
            let (here, there, tolerance) = (decoded.gaps[at], case.gaps[at], bundle.settings().gap_tolerance);
            check(here + there <= tolerance, || {
                format!("prompt {}: token {at} differs, and gaps {here} and {there} are no near-tie", case.index)
            })?;
            parted += 1;
        }
        let committed = decoded.rounds.iter().map(|r| r.accepted + 1).sum::<usize>();
        found = [found[0] + decoded.rounds.len(), found[1] + committed];
        expected = [expected[0] + case.rounds, expected[1] + case.committed];
    }
    let each = |[rounds, tokens]: [usize; 2]| tokens as f64 / rounds as f64;
    let (found, expected) = (each(found), each(expected));
    println!(
        "budget {budget}: {found:.3} tokens a round, reference {expected:.3}; {parted} of {count} part at a near-tie"
    );
    check((found / expected - 1.0).abs() <= WITHIN, || {
        format!("{found:.3} tokens a round, expected {expected:.3} within {WITHIN}; {parted} texts part at a near-tie")
    })
}
