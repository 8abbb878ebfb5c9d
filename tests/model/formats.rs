//! Each linear of k26-tiny-bf16 in turn as f32 and W4A16: the logits of `bundles/format-cases.safetensors`.
//!
//! A case writes the bundle with that one weight replaced, opens it as any other, and compares all logits of a prompt's
//! last row. The file states the tolerance; it is below 1 % of the logits' size, which is what a wrong format costs.

use std::ops::ControlFlow;

use kdtree::device::Device;
use kdtree::engine::{Engine, EngineOptions, Request};
use kdtree::kernels::{self, KvFormat};
use kdtree::model::{Model, Pass, Rows};
use kdtree::weights::Bundle;
use libtest_mimic::Failed;
use safetensors::{Dtype, SafeTensors};
use serde_json::json;

use super::support::bundle::{Parts, Tensor};
use super::support::{Outcome, Suite, check, close, equal, root};

const BASE: &str = "k26-tiny-bf16";
/// Where f32 values come from.
const FLOATS: &str = "k26-tiny-f32";
const LINEARS: [&str; 16] = [
    "model.layers.1.self_attn.q_a_proj",
    "model.layers.1.self_attn.q_b_proj",
    "model.layers.1.self_attn.kv_a_proj_with_mqa",
    "model.layers.1.self_attn.kv_b_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.experts.6.gate_proj",
    "model.layers.1.mlp.experts.6.up_proj",
    "model.layers.1.mlp.experts.6.down_proj",
    "model.layers.1.mlp.shared_experts.gate_proj",
    "model.layers.1.mlp.shared_experts.up_proj",
    "model.layers.1.mlp.shared_experts.down_proj",
    "lm_head",
];
/// W4A16 by the type of its scales.
const FORMATS: [&str; 3] = ["f32", "w4a16-bf16", "w4a16-f32"];
const CONTEXT: usize = 16;
/// A tolerance from here on would let a wrong format pass.
const LARGEST_TOLERANCE: f64 = 0.01;
/// W4A16 cases whose logits are farther from the base's than the tolerance (all but the router's), and than twice that.
const SHOWN: usize = 30;
const SHOWN_TWICE: usize = 26;

pub fn cases(suite: &mut Suite) {
    suite.model("formats::bf16", |d| case(d, "logits", Parts::of(BASE)));
    for linear in LINEARS {
        for format in FORMATS {
            suite.model(format!("formats::{linear}::{format}"), move |d| {
                case(d, &format!("{linear}.{format}.logits"), with(linear, format)?)
            });
        }
    }
    suite.host("formats::all_cases_are_run", false, all_cases_are_run);
    suite.host("formats::tolerance", false, tolerance);
}

/// The recorded cases.
struct Recorded(Vec<u8>);

impl Recorded {
    fn read() -> Result<Self, Failed> {
        Ok(Self(std::fs::read(root().join("bundles/format-cases.safetensors"))?))
    }

    fn file(&self) -> Result<SafeTensors<'_>, Failed> {
        Ok(SafeTensors::deserialize(&self.0)?)
    }

    fn tensor(&self, name: &str) -> Result<Tensor, Failed> {
        let file = self.file()?;
        let view = file.tensor(name).map_err(|e| format!("{name}: {e}"))?;
        Ok(Tensor { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() })
    }

    fn words(&self, name: &str, dtype: Dtype) -> Result<Vec<[u8; 4]>, Failed> {
        let tensor = self.tensor(name)?;
        check(tensor.dtype == dtype, || format!("{name} is {:?}, expected {dtype:?}", tensor.dtype))?;
        Ok(tensor.bytes.as_chunks().0.to_vec())
    }

    fn floats(&self, name: &str) -> Result<Vec<f64>, Failed> {
        let words = self.words(name, Dtype::F32)?;
        Ok(words.into_iter().map(|word| f32::from_le_bytes(word).into()).collect())
    }

    fn prompt(&self) -> Result<Vec<i32>, Failed> {
        Ok(self.words("prompt", Dtype::I32)?.into_iter().map(i32::from_le_bytes).collect())
    }

    fn tolerance(&self) -> Result<f64, Failed> {
        Ok(self.floats("tolerance")?[0])
    }
}

/// The base with one linear in another format.
fn with(linear: &str, format: &str) -> Result<Parts, Failed> {
    let mut parts = Parts::of(BASE);
    let name = format!("{linear}.weight");
    if format == "f32" {
        let values = Parts::of(FLOATS).tensor(&name).clone();
        parts.replace(&name, json!({"format": "f32"}), [("", values)]);
    } else {
        let recorded = Recorded::read()?;
        let [codes, scales] = ["qw", "sc"].map(|part| recorded.tensor(&format!("{linear}.{format}.{part}")));
        parts.replace(&name, json!({"format": "w4a16", "group": 32}), [(".qw", codes?), (".sc", scales?)]);
    }
    parts.rehash();
    Ok(parts)
}

fn case(device: &Device, recorded_logits: &str, parts: Parts) -> Outcome {
    let folder = tempfile::tempdir()?;
    let bundle = Bundle::open(&parts.write(folder.path(), "case.kdtr"))?;
    let recorded = Recorded::read()?;
    let (prompt, expected) = (recorded.prompt()?, recorded.floats(recorded_logits)?);
    close("logits", &logits(device, &bundle, &prompt)?, &expected, recorded.tolerance()?)?;

    let options = EngineOptions { context: Some(CONTEXT), ..Default::default() };
    let mut engine = Engine::open(&bundle, device.clone(), options)?;
    let request = Request { prompt, max_new: 1, stop_ids: vec![], golden: None };
    let decoded = engine.generate(&request, &mut |_| ControlFlow::Continue(()))?;
    let best = (0..expected.len()).max_by(|&a, &b| expected[a].total_cmp(&expected[b])).map(|id| id as i32);
    equal("token", &decoded.ids, best.as_slice())
}

/// The logits of the prompt's last row.
fn logits(device: &Device, bundle: &Bundle, prompt: &[i32]) -> Result<Vec<f32>, Failed> {
    let model = Model::load(device, bundle, CONTEXT, 1, KvFormat::Bf16)?;
    let rows = prompt.len();
    let state = device.upload(&kernels::initial_state(0, 0, 0))?;
    let ids = device.upload(prompt)?;
    let depths = device.upload(&(0..rows as u32).collect::<Vec<_>>())?;
    let ancestors = device.upload(&(0..rows).map(|row| (2u32 << row) - 1).collect::<Vec<_>>())?;
    let out = device.zeros::<f32>(bundle.config().vocab_size)?;
    let chain = Rows { ids: ids.view(), depths: depths.view(), ancestors: ancestors.view(), rows, pass: Pass::Verify };
    model.forward(device, state.view_mut(), chain, None, rows - 1, out.view_mut())?;
    device.synchronize()?;
    Ok(out.read()?)
}

fn all_cases_are_run() -> Outcome {
    let recorded = Recorded::read()?;
    let file = recorded.file()?;
    let found = file.names().into_iter().filter(|name| name.ends_with(".logits")).count();
    equal("recorded cases", &[found], &[LINEARS.len() * FORMATS.len()])
}

/// The tolerance is small enough to tell formats apart.
fn tolerance() -> Outcome {
    let recorded = Recorded::read()?;
    let (limit, base) = (recorded.tolerance()?, recorded.floats("logits")?);
    check(limit < LARGEST_TOLERANCE, || format!("tolerance {limit}, expected below {LARGEST_TOLERANCE}"))?;
    let base: Vec<f32> = base.into_iter().map(|v| v as f32).collect();
    let (mut shown, mut twice) = (0, 0);
    for linear in LINEARS {
        for format in &FORMATS[1..] {
            let name = format!("{linear}.{format}.logits");
            let other = recorded.floats(&name)?;
            shown += usize::from(close(&name, &base, &other, limit).is_err());
            twice += usize::from(close(&name, &base, &other, 2.0 * limit).is_err());
        }
    }
    equal("W4A16 cases that differ from bf16", &[shown, twice], &[SHOWN, SHOWN_TWICE])
}
