//! One round of the drafter, stage by stage, against the numpy drafter: `bundles/dflash-cases.safetensors`.

use kdtree::device::Device;
use kdtree::engine::draft_stages;
use kdtree::weights::Bundle;
use libtest_mimic::Failed;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use super::support::bundle::{root, shipped};
use super::support::{Outcome, Suite, check, close, equal};

const BUNDLE: &str = "k26-small-int4";
const CASES: &str = "bundles/dflash-cases.safetensors";
/// Of the L2 norm. Sums in another order move a value over the border of a bf16 rounding now and then.
const CACHED: f64 = 1e-3;
const LOGITS: f64 = 5e-3;
/// How far log-probabilities may be from each other: reversed sums of the numpy drafter move them by 0.09.
const NEAR: f32 = 0.2;

pub fn cases(suite: &mut Suite) {
    suite.model("drafter::stages", stages);
}

/// The values of tensor `dflash.NAME`, as floats.
fn values(file: &SafeTensors, name: &str) -> Result<(Vec<usize>, Vec<f64>), Failed> {
    let view = file.tensor(&format!("dflash.{name}")).map_err(|e| format!("{name}: {e}"))?;
    let words = |bytes: &[u8]| bytes.as_chunks::<4>().0.to_vec();
    let values = match view.dtype() {
        Dtype::BF16 => view.data().as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f64()).collect(),
        Dtype::F32 => words(view.data()).into_iter().map(|b| f32::from_le_bytes(b).into()).collect(),
        _ => words(view.data()).into_iter().map(|b| i32::from_le_bytes(b).into()).collect(),
    };
    Ok((view.shape().to_vec(), values))
}

fn stages(device: &Device) -> Outcome {
    let bytes = std::fs::read(root().join(CASES))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let integer = |name: &str| -> Result<i32, Failed> { Ok(values(&file, name)?.1[0] as i32) };
    let (shape, features) = values(&file, "features")?;
    let features: Vec<f32> = features.into_iter().map(|v| v as f32).collect();
    let (ids_shape, ids) = values(&file, "ids")?;
    let [depth, candidates] = [ids_shape[0], ids_shape[1]];
    let bundle = Bundle::open(&shipped(BUNDLE))?;
    equal("positions", &[integer("committed")? as usize], &shape[..1])?;
    let found = draft_stages(&bundle, device, &features, integer("bonus")?, candidates)?;
    close("context", &found.context, &values(&file, "context")?.1, CACHED)?;
    for (name, layers) in [("keys", &found.keys), ("values", &found.values)] {
        for (layer, cached) in layers.iter().enumerate() {
            // There by heads, here by positions.
            let (shape, want) = values(&file, &format!("{name}.{layer}"))?;
            let [heads, positions, size] = [shape[0], shape[1], shape[2]];
            let at = |i: usize| ((i / size % heads) * positions + i / size / heads) * size + i % size;
            let want: Vec<f64> = (0..want.len()).map(|i| want[at(i)]).collect();
            close(&format!("{name} of layer {layer}"), cached, &want, CACHED)?;
        }
    }
    close("logits", &found.logits, &values(&file, "logits")?.1, LOGITS)?;
    let logp = values(&file, "logp")?.1;
    check(found.ids.len() == depth * candidates && found.logp.len() == depth * candidates, || "candidates".into())?;
    for (i, (&id, &p)) in found.ids.iter().zip(&found.logp).enumerate() {
        let (want, expected) = (ids[i] as i32, logp[i] as f32);
        check((p - expected).abs() <= NEAR, || format!("log-probability {i} is {p}, expected {expected}"))?;
        // Another id only where the expected one is as probable.
        let row = i / candidates * candidates;
        let near = (row..row + candidates).any(|j| j != i && (logp[j] as f32 - expected).abs() <= NEAR);
        let last = i == row + candidates - 1;
        check(id == want || near || last, || format!("candidate {i} is {id}, expected {want}"))?;
    }
    let refused = draft_stages(&bundle, device, &features[1..], 0, candidates).err().map(|e| e.to_string());
    check(refused.is_some_and(|text| text.contains("a position are wanted")), || "features of no position".into())
}
