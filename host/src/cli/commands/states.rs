//! `kdtree states`: hidden states, chosen experts and logits of passes over given tokens, as a safetensors file.

use super::open;
use crate::cli::args::States;
use crate::cli::failure::{Failure, Result};
use crate::cli::output::{self, Bytes};
use crate::device::Device;
use crate::engine;
use crate::weights::Verify;

pub fn run(args: &States) -> Result<()> {
    if std::fs::symlink_metadata(&args.out).is_ok() {
        return Err(Failure::usage(format!("{}: exists; nothing is overwritten", args.out.display())));
    }
    let bundle = open(&args.bundle, Verify::WhenSmall, args.layers)?;
    let device = Device::open(args.device, args.ptx.as_deref())?;
    let info = device.info();
    output::note(format_args!("{} on {} ({})", bundle.settings().name, info.device, info.name));
    let ids = &args.prompt_ids;
    let states = engine::states(&bundle, &device, ids, args.single)?;
    let failed = |e: &dyn std::fmt::Display| Failure::Write(format!("{}: {e}", args.out.display()));
    let bytes = states.file().map_err(|e| failed(&e))?;
    std::fs::write(&args.out, &bytes).map_err(|e| failed(&e))?;
    let (tokens, layers) = (ids.len(), states.hidden.len());
    output::line(format_args!(
        "{}: {tokens} tokens, {layers} layers, {}",
        args.out.display(),
        Bytes(bytes.len() as u64)
    ))
}
