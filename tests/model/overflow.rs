//! Weights that are finite and overflow in a product: decoding ends with an error that names step, position and row.
//!
//! Never with a token: NaN compares as smaller than all, and a row of NaN would pick token 0.

use std::ops::ControlFlow;

use kdtree::device::Device;
use kdtree::engine::{Draft, Engine, EngineError, EngineOptions, Request};
use kdtree::weights::Bundle;
use libtest_mimic::Failed;

use super::support::bundle::Parts;
use super::support::{Outcome, Suite, check, equal};

const BASE: &str = "k26-tiny-bf16";
const HEAD: &str = "lm_head.weight";
const ROUTER: &str = "model.layers.1.mlp.gate.weight";
const ROUTER_NORM: &str = "model.layers.1.post_attention_layernorm.weight";
/// Close to the largest bf16, 3.39e38.
const HUGE: f32 = 3.0e38;
const CONTEXT: usize = 96;
/// This entry of the last hidden state is -0.2 after the prompt of golden 0, and -2.7 after token 8 behind it.
const LATE_COLUMN: usize = 46;

pub fn cases(suite: &mut Suite) {
    suite.model("overflow::head_in_prefill", head_in_prefill);
    for (draft, budget) in [(Draft::None, 0), (Draft::Recorded, 16)] {
        suite.model(format!("overflow::head_in_round::{budget}"), move |d| head_in_round(d, draft, budget));
    }
    suite.model("overflow::router_input", router_input);
    suite.model("overflow::router_weight", router_weight);
}

/// Decodes golden 0 of the base after `damage`: the tokens that came out, and the error's text.
fn decode(
    device: &Device,
    (draft, budget): (Draft, usize),
    damage: impl FnOnce(&mut Parts),
) -> Result<(Vec<i32>, String), Failed> {
    let mut parts = Parts::of(BASE);
    damage(&mut parts);
    parts.rehash();
    let folder = tempfile::tempdir()?;
    let bundle = Bundle::open(&parts.write(folder.path(), "huge.kdtr"))?;
    let golden = &bundle.goldens()[0];
    let mut engine = Engine::open(
        &bundle,
        device.clone(),
        EngineOptions { context: Some(CONTEXT), draft, budget, ..Default::default() },
    )?;
    let request = Request { prompt: golden.prompt.clone(), max_new: 64, stop_ids: vec![], golden: Some(golden) };
    let mut emitted = Vec::new();
    let decoded = engine.generate(&request, &mut |step| {
        emitted.extend_from_slice(step.ids);
        ControlFlow::Continue(())
    });
    match decoded {
        Err(EngineError::NonFinite(text)) => Ok((emitted, text)),
        Err(other) => Err(format!("expected a value that is not finite, found: {other}").into()),
        Ok(decoded) => Err(format!("expected a value that is not finite, found tokens {:?}", decoded.ids).into()),
    }
}

/// Rows 7 and 8 of the head are huge and opposite: one of the two logits is NaN or plus infinity.
fn head_in_prefill(device: &Device) -> Outcome {
    let (emitted, text) = decode(device, (Draft::None, 0), |parts| {
        parts.change_rows(HEAD, |row, values| match row {
            7 => values.fill(HUGE),
            8 => values.fill(-HUGE),
            _ => {}
        });
    })?;
    // The prompt has 16 tokens, and the last one's logits are the first that are looked at.
    check(text == "a logit is NaN or infinite, in the prefill at position 0, row 15", || text.clone())?;
    check(emitted.is_empty(), || format!("tokens {emitted:?} before an error of the prefill"))
}

/// One entry of the hidden state decides: after the prompt rows 7 and 8 have huge finite logits, of which 8 is picked;
/// after that they overflow.
fn head_in_round(device: &Device, draft: Draft, budget: usize) -> Outcome {
    let (emitted, text) = decode(device, (draft, budget), |parts| {
        parts.change_rows(HEAD, |row, values| {
            if row == 7 || row == 8 {
                values.fill(0.0);
                values[LATE_COLUMN] = if row == 7 { HUGE } else { -HUGE };
            }
        });
    })?;
    check(text == "a logit is NaN or infinite, in the round at position 16, row 0", || text.clone())?;
    equal("tokens before the error", &emitted, &[8])
}

/// The router's input overflows to infinity, and one expert's weights are zero: infinity times zero.
fn router_input(device: &Device) -> Outcome {
    router(device, |parts| {
        parts.change_rows(ROUTER_NORM, |_, values| values.fill(HUGE));
        parts.change_rows(ROUTER, |row, values| {
            if row == 3 {
                values.fill(0.0)
            }
        });
    })
}

/// Products of both signs overflow: infinity minus infinity.
fn router_weight(device: &Device) -> Outcome {
    router(device, |parts| parts.change_rows(ROUTER, |_, values| values.fill(HUGE)))
}

fn router(device: &Device, damage: impl FnOnce(&mut Parts)) -> Outcome {
    let (emitted, text) = decode(device, (Draft::None, 0), damage)?;
    let place = "a router logit is NaN, in the prefill at position 0, row ";
    let row = text.strip_prefix(place).and_then(|row| row.parse::<usize>().ok());
    check(row.is_some_and(|row| row < 16), || text.clone())?;
    check(emitted.is_empty(), || format!("tokens {emitted:?} before an error of the prefill"))
}
