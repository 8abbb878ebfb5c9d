//! `kdtree convert`: a checkpoint folder, or a bundle, to a `.kdtr` file or a folder of shards.

use std::time::Instant;

use serde_json::json;

use super::{open, progress::Progress};
use crate::cli::args::{Convert, ScalesArg};
use crate::cli::failure::{Failure, Result};
use crate::cli::output::{self, Bytes};
use crate::text::Tokenizer;
use crate::weights::{Conversion, ConvertError, Scales, Verify};

const MEGABYTE: u64 = 1_000_000;

pub fn run(args: &Convert) -> Result<()> {
    if std::fs::symlink_metadata(&args.out).is_ok() {
        return Err(Failure::usage(format!("{}: exists; nothing is overwritten", args.out.display())));
    }
    if let Some(folder) = args.out.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        let (out, folder) = (args.out.display(), folder.display());
        return Err(Failure::usage(format!("{out}: there is no folder {folder} to write it in")));
    }
    let mut bundle = open(&args.bundle, Verify::Never, args.layers)?;
    if let Some(folder) = &args.drafter {
        bundle.attach_drafter(folder)?;
    }
    // A vocabulary that no reader would take is no reason to write for an hour first.
    Tokenizer::of(&bundle)?;
    if !bundle.goldens().is_empty() {
        output::note(format_args!("{}: goldens are not taken over", args.bundle.display()));
    }
    let scales = match args.scales {
        None | Some(ScalesArg::Extreme) => Scales::Extreme,
        Some(ScalesArg::LeastSquares) => Scales::LeastSquares,
    };
    let conversion = Conversion::new(&bundle, args.quantize.map(|_| scales)).map_err(failure)?;
    let bytes = conversion.bytes();
    if args.dry_run {
        let document =
            json!({ "file": args.out.display().to_string(), "bytes": bytes, "tensors": conversion.tensors() });
        return match args.json {
            true => output::json(&document),
            false => {
                let tensors = conversion.tensors();
                output::line(format_args!("{}: {tensors} tensors, {}", args.out.display(), Bytes(bytes)))
            }
        };
    }
    let start = Instant::now();
    let mut bar = Progress::new(bytes);
    let (shard, sync) = (args.shard_mb.map(|mb| mb * MEGABYTE), args.sync_mb * MEGABYTE);
    let written = conversion.write(&args.out, shard, sync, &mut |what, done| bar.show(what, done));
    bar.clear();
    let written = written.map_err(failure)?;
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let mut document = json!(written);
        document["file"] = json!(args.out.display().to_string());
        document["seconds"] = json!(seconds);
        return output::json(&document);
    }
    let resumed = match written.resumed_bytes {
        0 => String::new(),
        bytes => format!(", {} of it by an earlier run", Bytes(bytes)),
    };
    let (weights, tensors) = (written.weights, written.tensors);
    let shards = args.shard_mb.map_or(String::new(), |_| format!(" of {} shards", written.shards));
    output::line(format_args!(
        "{}: {weights} weights in {tensors} tensors{shards}, {}{resumed}; read back and compared, {seconds:.1} s",
        args.out.display(),
        Bytes(written.bytes)
    ))
}

fn failure(error: ConvertError) -> Failure {
    match error {
        ConvertError::Weights(error) => error.into(),
        ConvertError::Write { .. } => Failure::Write(error.to_string()),
        ConvertError::Exists(_) | ConvertError::Busy(_) | ConvertError::Nothing(_) => Failure::usage(error.to_string()),
    }
}
