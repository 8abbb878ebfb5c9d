//! Trees, walks and attention computed in another language: the cases of `bundles/kernel-cases.safetensors`.

use cuda_std::bf16;
use gpu::args::attention::KEY;
use kdtree::device::Device;
use kdtree::reference::{Draft, Tree, bounds};
use safetensors::{Dtype, SafeTensors};

use super::support::{Outcome, Suite, check, close, equal, root};
use super::{accept, mla_attention, tree_build};

const TREES: usize = 15;
const WALKS: usize = 10;
const ATTENTIONS: usize = 8;
/// A pick that is in no tree, for the recorded -1, which the engine takes as an error.
const NO_CHILD: i32 = i32::MAX;

pub fn cases(suite: &mut Suite) {
    for case in 0..TREES {
        suite.both(format!("recorded::tree.{case}"), move |d| tree(d, case));
    }
    for case in 0..WALKS {
        suite.both(format!("recorded::accept.{case}"), move |d| walk(d, case));
    }
    for case in 0..ATTENTIONS {
        suite.both(format!("recorded::mla.{case}"), move |d| mla(d, case));
    }
    suite.host("recorded::all_cases_are_run", false, all_cases_are_run);
}

fn file() -> Result<Vec<u8>, libtest_mimic::Failed> {
    Ok(std::fs::read(root().join("bundles/kernel-cases.safetensors"))?)
}

/// Words and shape of tensor `name`.
fn words(file: &SafeTensors, name: &str, kind: Dtype) -> Result<(Vec<[u8; 4]>, Vec<usize>), libtest_mimic::Failed> {
    let tensor = file.tensor(name)?;
    check(tensor.dtype() == kind, || format!("{name} is {:?}, expected {kind:?}", tensor.dtype()))?;
    let words = tensor.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]).collect();
    Ok((words, tensor.shape().to_vec()))
}

fn ints(file: &SafeTensors, name: &str) -> Result<Vec<i32>, libtest_mimic::Failed> {
    Ok(words(file, name, Dtype::I32)?.0.into_iter().map(i32::from_le_bytes).collect())
}

fn tree(device: &Device, case: usize) -> Outcome {
    let bytes = file()?;
    let file = SafeTensors::deserialize(&bytes)?;
    let get = |part: &str| ints(&file, &format!("tree.{case}.{part}"));
    let (logp, shape) = words(&file, &format!("tree.{case}.logp"), Dtype::F32)?;
    let logp: Vec<f32> = logp.into_iter().map(f32::from_le_bytes).collect();
    let (ids, budget) = (get("ids")?, get("budget")?[0] as usize);
    let draft = Draft { ids: &ids, logp: &logp, levels: shape[0], k: shape[1] };
    let tree = tree_build::Bench::new(device)?.same(draft, budget)?;
    let nodes = 1..=tree.nodes;
    equal("tokens", &tree.tokens[nodes.clone()], &get("tokens")?)?;
    equal("parents", &tree.parents[nodes.clone()], &get("parents")?)?;
    let depths: Vec<i32> = tree.depths[nodes].iter().map(|&d| d as i32).collect();
    equal("depths", &depths, &get("depths")?)
}

fn walk(device: &Device, case: usize) -> Outcome {
    let bytes = file()?;
    let file = SafeTensors::deserialize(&bytes)?;
    let get = |part: &str| ints(&file, &format!("accept.{case}.{part}"));
    let nodes: Vec<(i32, usize)> =
        get("tokens")?.into_iter().zip(get("parents")?.into_iter().map(|p| p as usize)).collect();
    let pick: Vec<i32> = get("picks")?.into_iter().map(|p| if p < 0 { NO_CHILD } else { p }).collect();
    let bench = accept::Bench::new(device)?;
    let len = bench.same(&Tree::of(0, &nodes, nodes.len()), &pick)?;
    equal("path", &bench.path(len)?, &get("path")?)
}

fn mla(device: &Device, case: usize) -> Outcome {
    let bytes = file()?;
    let file = SafeTensors::deserialize(&bytes)?;
    let floats = |part: &str| -> Result<Vec<f32>, libtest_mimic::Failed> {
        let words = words(&file, &format!("mla.{case}.{part}"), Dtype::F32)?.0;
        Ok(words.into_iter().map(f32::from_le_bytes).collect())
    };
    let (ancestors, shape) = words(&file, &format!("mla.{case}.ancestors"), Dtype::U32)?;
    let cache = file.tensor(&format!("mla.{case}.cache"))?;
    let cache: Vec<_> = cache.data().chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect();
    let q = floats("q")?;
    let (rows, slots) = (shape[0], cache.len() / KEY);
    let case = mla_attention::Case {
        heads: q.len() / KEY / rows,
        q: q.into_iter().map(bf16::from_f32).collect(),
        cache,
        kv: Default::default(),
        ancestors: ancestors.into_iter().map(u32::from_le_bytes).collect(),
        committed: slots - rows,
        rows,
        slots: slots + 300,
        scale: floats("scale")?[0],
        plan: None,
    };
    let want: Vec<f64> = floats("z")?.into_iter().map(f64::from).collect();
    close("z", &case.run(device)?, &want, bounds::ATTENTION_ROUNDED)
}

fn all_cases_are_run() -> Outcome {
    let bytes = file()?;
    let file = SafeTensors::deserialize(&bytes)?;
    let count =
        |family: &str, part: &str| file.names().iter().filter(|n| n.starts_with(family) && n.ends_with(part)).count();
    equal(
        "cases",
        &[count("tree.", ".ids"), count("accept.", ".picks"), count("mla.", ".z")],
        &[TREES, WALKS, ATTENTIONS],
    )
}
