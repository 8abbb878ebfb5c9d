//! The program as a user runs it: exit codes, what goes to stdout and stderr, and what every kind of damaged file says.
//!
//! The binary is found at run time, so that these tests also run from a folder made by `cargo xtask dist`.

/// Damaged bundles: each is refused quickly, and the message says where.
mod bad_bundles;
/// Damaged checkpoint folders: the same.
mod bad_checkpoints;
#[path = "../support/bundle.rs"]
mod bundle;
/// Conversations through chat templates.
mod chat;
#[path = "../support/checkpoint.rs"]
mod checkpoint;
/// Checkpoint folders: opened directly, from a cache, with a drafter, in part.
mod checkpoints;
/// Writing `.kdtr` files: verified, taken up after a kill, never over another file.
mod convert;
/// Random damage: never a crash.
mod damage;
/// Output of `decode`: streams, stops, goldens.
mod decode;
/// Help texts, word for word.
mod help;
#[path = "../support/hf.rs"]
mod hf;
#[path = "../support/kimi.rs"]
mod kimi;
/// The real vocabulary: ids, streams, conversations.
#[path = "kimi.rs"]
mod kimi_text;
/// Weights whose products overflow.
mod overflow;
/// Starting the binary.
mod program;
/// The published tensor table as sparse files: the plan's numbers.
mod published;
/// `inspect`, `verify` and `doctor`.
mod reports;
/// `chat` over stdin.
mod talk;
/// The tokenizer that ships, and text from users.
mod tokens;
/// Flags that are wrong or cannot be honoured.
mod usage;
