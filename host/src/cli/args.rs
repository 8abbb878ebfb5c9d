//! What may be said on the command line. What it means is decided in `commands/`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};

use crate::bench::{Numbers, Routing, Shared};
use crate::device::Choice;
use crate::kernels::{KvFormat, Sampling};
use crate::linear::Variant;
use crate::plan::GpuList;

/// Trees have at most this many nodes.
pub const MAX_BUDGET: i64 = gpu::kernels::tree_build::MAX_BUDGET as i64;
const PTX: [&str; 3] = ["sm_80", "sm_90", "sm_120"];

/// One of these, and no more, is given to `decode`.
const INPUTS: [&str; 6] = ["golden", "prompt", "prompt_file", "prompt_ids", "messages", "plan"];

/// A temperature: 0, or what the kernels can divide by.
fn temperature(text: &str) -> Result<f32, String> {
    let least = Sampling::LEAST_TEMPERATURE;
    match text.parse::<f32>() {
        Ok(t) if t == 0.0 || (t >= least && t.is_finite()) => Ok(t),
        _ => Err(format!("expected 0, or a number from {least} on")),
    }
}

/// A share: a number above 0 and up to 1.
fn share(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("expected a number above 0 and up to 1".into()),
    }
}

/// A probability: a number from 0 to 1, with neither of them.
fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if p > 0.0 && p < 1.0 => Ok(p),
        _ => Err("expected a number between 0 and 1".into()),
    }
}

fn budget() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=MAX_BUDGET)
}

/// The number of first layers in `0..K` or `K`.
fn layers(text: &str) -> Result<usize, String> {
    let count = text.strip_prefix("0..").unwrap_or(text);
    count.parse().ok().filter(|&k| k > 0).ok_or_else(|| "expected `0..K` or `K`, with K from 1 on".to_string())
}

/// A number of things, or the start of random numbers.
fn whole<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", most::<T>()))
}

/// The largest number of a type without sign.
fn most<T>() -> u64 {
    u64::MAX >> (u64::BITS as usize - 8 * size_of::<T>())
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least 1 is wanted".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}

/// Kimi K2.6 decoding with DDTree speculation.
#[derive(Parser)]
#[command(name = "kdtree", version, max_term_width = 100)]
#[command(after_help = "Results go to stdout, progress and log to stderr.\n\
    Exit codes: 0 fine, 1 output failed, 2 usage, 3 bad file, 4 device or driver, 5 out of memory,\n\
    6 non-finite values, 7 verification failed, 130 interrupted.")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Continue a prompt
    Decode(Box<Decode>),
    /// Talk to a model: lines in, answers out
    Chat(Box<Chat>),
    /// Show what a bundle or a checkpoint folder holds
    Inspect(Inspect),
    /// Read all of a bundle or a checkpoint folder: hashes where there are any, and values
    Verify(Verify),
    /// Write a .kdtr file from a checkpoint folder
    Convert(Convert),
    /// Turn text into token ids, or ids into text
    Tokenize(Tokenize),
    /// Write what passes compute on the way, layer by layer, for comparison with other programs
    States(States),
    /// Say what this machine can run, what is missing, and whether every kernel works
    Doctor(Doctor),
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
    /// Print a completion script
    Completions(Completions),
}

#[derive(Args)]
#[command(group = ArgGroup::new("input").required(true).args(INPUTS))]
#[command(after_help = "Examples:\n  \
    kdtree decode bundles/k26-small-int4.kdtr --prompt 'fn main() {' --max-new 64\n  \
    kdtree decode bundles/k26-tiny-int4.kdtr --golden 0 --draft recorded --budget 16 --json\n  \
    kdtree decode bundles/k26-small-int4.kdtr --prompt-file - --draft none < src/lib.rs\n  \
    kdtree decode Kimi-K2.6 --prompt 'What is a B-tree?' --chat --thinking off\n  \
    kdtree decode Kimi-K2.6 --drafter Kimi-K2.6-DFlash --plan --plan-gpus 8xrtx-pro-6000")]
pub struct Decode {
    /// A .kdtr file or a checkpoint folder
    pub bundle: PathBuf,

    /// Prompt of golden N of the bundle; its tokens must come out
    #[arg(long, value_name = "N", value_parser = whole::<usize>, help_heading = "Input (one of)")]
    #[arg(allow_negative_numbers = true)]
    pub golden: Option<usize>,
    /// Prompt text; names of special tokens in it are ordinary text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Input (one of)")]
    pub prompt: Option<String>,
    /// Prompt text from a file; `-` is stdin
    #[arg(long, value_name = "FILE", help_heading = "Input (one of)")]
    pub prompt_file: Option<PathBuf>,
    /// Prompt as token ids: `1,2,3`
    #[arg(long, value_name = "IDS", value_delimiter = ',', num_args = 1, help_heading = "Input (one of)")]
    pub prompt_ids: Option<Vec<i32>>,
    /// Take special tokens of the prompt text as such
    #[arg(long, conflicts_with_all = ["golden", "prompt_ids"], help_heading = "Input (one of)")]
    pub special: bool,

    #[command(flatten)]
    pub conversation: Conversation,

    /// Drafts: the golden's recorded ones, the bundle's drafter, or none [default: dflash where there is a drafter]
    #[arg(long, value_enum, help_heading = "Speculation")]
    pub draft: Option<DraftArg>,
    /// Take the drafter of this folder, in its published form
    #[arg(long, value_name = "FOLDER", help_heading = "Speculation")]
    pub drafter: Option<PathBuf>,
    /// Nodes of a tree [default: 16]
    #[arg(long, value_name = "N", value_parser = budget(), help_heading = "Speculation")]
    #[arg(allow_negative_numbers = true)]
    pub budget: Option<u32>,
    /// Leave out nodes whose path is less probable than this
    #[arg(long, value_name = "P", value_parser = probability, help_heading = "Speculation")]
    #[arg(allow_negative_numbers = true)]
    pub min_prob: Option<f32>,
    /// Put the chain of best drafts into each tree before all else
    #[arg(long, help_heading = "Speculation")]
    pub spine: bool,

    /// Most tokens to produce [default: all of a golden's, else 256 or what the context has room for]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, help_heading = "Generation")]
    #[arg(allow_negative_numbers = true)]
    pub max_new: Option<usize>,
    /// Draw tokens at this temperature; 0 takes the likeliest [default: 0]
    #[arg(long, value_name = "T", value_parser = temperature, help_heading = "Generation")]
    #[arg(allow_negative_numbers = true)]
    pub temp: Option<f32>,
    /// Draw from the K likeliest tokens
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Generation")]
    #[arg(allow_negative_numbers = true)]
    pub top_k: Option<u32>,
    /// Draw from the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", value_parser = share, help_heading = "Generation")]
    #[arg(allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Draw from tokens with at least this share of the likeliest one's probability
    #[arg(long, value_name = "P", value_parser = share, help_heading = "Generation")]
    #[arg(allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Start of the random numbers: a seed draws the same tokens with any drafts [default: 0]
    #[arg(long, value_name = "N", value_parser = whole::<u64>, help_heading = "Generation")]
    #[arg(allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// End at this text; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Generation")]
    pub stop: Vec<String>,
    /// End at this token id, too; may be repeated
    #[arg(long, value_name = "ID", help_heading = "Generation")]
    #[arg(allow_negative_numbers = true)]
    pub stop_id: Vec<i32>,
    /// Go on after the bundle's stop tokens
    #[arg(long, help_heading = "Generation")]
    pub ignore_stop: bool,

    /// auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Device")]
    pub device: Choice,
    /// Force the kernels of one target
    #[arg(long, value_name = "TARGET", value_parser = PTX, help_heading = "Device")]
    pub ptx: Option<String>,
    /// What the cache keeps a token as: f8 takes 656 bytes a layer in place of 1,152, and rounds
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "bf16", help_heading = "Device")]
    pub kv: KvFormat,
    /// Tokens that prompt and output may have together [default: what this run needs]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, help_heading = "Device")]
    #[arg(allow_negative_numbers = true)]
    pub context: Option<usize>,
    /// Load the first K layers only, for bring-up: `0..K` or `K`
    #[arg(long, value_name = "0..K", value_parser = layers, help_heading = "Device")]
    pub layers: Option<usize>,
    /// Check every access of the kernels (slow; with --device cpu)
    #[arg(long, help_heading = "Device")]
    pub checked: bool,

    /// Print what the model takes in memory and must read, from metadata alone, and stop
    #[arg(long, help_heading = "Output")]
    pub plan: bool,
    /// Plan for these GPUs, like 8xrtx-pro-6000 [a100-80gb, h100, h200, b200, rtx-4090, rtx-5090]
    #[arg(long, value_name = "LIST", help_heading = "Output")]
    pub plan_gpus: Option<GpuList>,
    /// Print one JSON document instead of the text
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Print which kernel, tile and split every product takes
    #[arg(long, help_heading = "Output")]
    pub explain: bool,
    /// Show every round: nodes, accepted tokens, time
    #[arg(long, help_heading = "Output")]
    pub trace_tree: bool,
}

/// Text that goes through the model's chat template.
#[derive(Args)]
#[command(group = ArgGroup::new("templated").args(["messages", "chat"]))]
pub struct Conversation {
    /// A conversation as JSON, `-` is stdin: `[{"role": "user", "content": "Hi"}]`
    #[arg(long, value_name = "FILE", help_heading = "Chat")]
    pub messages: Option<PathBuf>,
    /// Take the text as a user's message, through the model's chat template
    #[arg(long, help_heading = "Chat")]
    pub chat: bool,
    /// System prompt before that message
    #[arg(long, value_name = "TEXT", requires = "chat", conflicts_with = "messages", allow_hyphen_values = true)]
    #[arg(help_heading = "Chat")]
    pub system: Option<String>,
    /// Let the model think before it answers, or not [default: as the template has it]
    #[arg(long, value_enum, value_name = "SWITCH", requires = "templated", help_heading = "Chat")]
    pub thinking: Option<Switch>,
    /// A Jinja file in place of the model's chat template
    #[arg(long, value_name = "FILE", requires = "templated", help_heading = "Chat")]
    pub template: Option<PathBuf>,
}

impl Conversation {
    /// Whether the chat template has a say.
    pub fn is_templated(&self) -> bool {
        self.chat || self.messages.is_some()
    }
}

#[derive(Args)]
#[command(
    after_help = "A line is a message; a \\ at its end goes on in the next line. /new forgets what was said, /quit or \
    the end of the input ends.\nCtrl-C ends an answer, and between answers the program.\n\nExamples:\n  \
    kdtree chat Kimi-K2.6 --drafter Kimi-K2.6-DFlash --temp 0.6 --top-p 0.95 --thinking off"
)]
pub struct Chat {
    /// A .kdtr file or a checkpoint folder, with a tokenizer
    pub bundle: PathBuf,

    /// System prompt
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Chat")]
    pub system: Option<String>,
    /// Let the model think before it answers, or not [default: as the template has it]
    #[arg(long, value_enum, value_name = "SWITCH", help_heading = "Chat")]
    pub thinking: Option<Switch>,
    /// A Jinja file in place of the model's chat template
    #[arg(long, value_name = "FILE", help_heading = "Chat")]
    pub template: Option<PathBuf>,

    /// Draft nothing
    #[arg(long, conflicts_with_all = ["drafter", "budget"], help_heading = "Speculation")]
    pub no_draft: bool,
    /// Take the drafter of this folder, in its published form
    #[arg(long, value_name = "FOLDER", help_heading = "Speculation")]
    pub drafter: Option<PathBuf>,
    /// Nodes of a tree [default: 16]
    #[arg(long, value_name = "N", value_parser = budget(), help_heading = "Speculation")]
    pub budget: Option<u32>,

    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 4096, help_heading = "Generation")]
    pub max_new: usize,
    /// Draw tokens at this temperature; 0 takes the likeliest [default: 0]
    #[arg(long, value_name = "T", value_parser = temperature, help_heading = "Generation")]
    pub temp: Option<f32>,
    /// Draw from the K likeliest tokens
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Generation")]
    pub top_k: Option<u32>,
    /// Draw from the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", value_parser = share, help_heading = "Generation")]
    pub top_p: Option<f32>,
    /// Draw from tokens with at least this share of the likeliest one's probability
    #[arg(long, value_name = "P", value_parser = share, help_heading = "Generation")]
    pub min_p: Option<f32>,
    /// Start of the random numbers [default: 0]
    #[arg(long, value_name = "N", help_heading = "Generation")]
    pub seed: Option<u64>,

    /// auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Device")]
    pub device: Choice,
    /// Force the kernels of one target
    #[arg(long, value_name = "TARGET", value_parser = PTX, help_heading = "Device")]
    pub ptx: Option<String>,
    /// What the cache keeps a token as: f8 takes 656 bytes a layer in place of 1,152, and rounds
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "bf16", help_heading = "Device")]
    pub kv: KvFormat,
    /// Tokens that the whole conversation may have [default: 16384, or what the model has]
    #[arg(long, value_name = "N", help_heading = "Device")]
    pub context: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DraftArg {
    None,
    Recorded,
    Dflash,
}

#[derive(Args)]
pub struct Inspect {
    /// A .kdtr file or a checkpoint folder
    pub bundle: PathBuf,
    /// Load the first K layers only, for bring-up: `0..K` or `K`
    #[arg(long, value_name = "0..K", value_parser = layers)]
    pub layers: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct Verify {
    /// A .kdtr file or a checkpoint folder
    pub bundle: PathBuf,
    /// Load the first K layers only, for bring-up: `0..K` or `K`
    #[arg(long, value_name = "0..K", value_parser = layers)]
    pub layers: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "A run that was ended goes on where it stopped when the same command is given again.\n\n\
    Examples:\n  \
    kdtree convert Kimi-K2.6 kimi.kdtr --drafter Kimi-K2.6-DFlash --shard-mb 10000\n  \
    kdtree convert DeepSeek-bf16 int4.kdtr --quantize w4a16 --layers 0..4")]
pub struct Convert {
    /// A checkpoint folder or a .kdtr file
    pub bundle: PathBuf,
    /// The file, or with --shard-mb the folder, to write; it must not exist
    pub out: PathBuf,
    /// Pack the drafter of this folder, too
    #[arg(long, value_name = "FOLDER")]
    pub drafter: Option<PathBuf>,
    /// Store routed experts of a plain checkpoint in this format: rounded to nearest, groups of 32
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<Quantize>,
    /// How their scales are chosen: the largest value fits, or a search for the least squared error [default: extreme]
    #[arg(long, value_enum, value_name = "HOW", requires = "quantize")]
    pub scales: Option<ScalesArg>,
    /// Write a folder with files of about N megabytes each
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub shard_mb: Option<u64>,
    /// Take the first K layers only: `0..K` or `K`
    #[arg(long, value_name = "0..K", value_parser = layers)]
    pub layers: Option<usize>,
    /// Make the work safe on disk every so many megabytes
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub sync_mb: u64,
    /// Only say how large the file would be
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Quantize {
    W4a16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScalesArg {
    Extreme,
    LeastSquares,
}

#[derive(Args)]
pub struct Tokenize {
    /// A .kdtr file or a checkpoint folder, with a tokenizer
    pub bundle: PathBuf,
    /// The text; `-` is stdin
    #[arg(required_unless_present_any = ["ids", "messages"], conflicts_with = "messages", allow_hyphen_values = true)]
    pub text: Option<String>,
    /// Turn these ids into text instead: `1,2,3`
    #[arg(long, value_name = "IDS", value_delimiter = ',', num_args = 1, conflicts_with_all = ["text", "templated"])]
    pub ids: Option<Vec<i32>>,
    /// Take special tokens of the text as such
    #[arg(long, conflicts_with = "ids")]
    pub special: bool,
    #[command(flatten)]
    pub conversation: Conversation,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "bundles/compare_layers.py compares the file with PyTorch in float32.")]
pub struct States {
    /// A .kdtr file or a checkpoint folder
    pub bundle: PathBuf,
    /// Tokens as ids: `1,2,3`
    #[arg(long, value_name = "IDS", value_delimiter = ',', num_args = 1, required = true)]
    pub prompt_ids: Vec<i32>,
    /// How many of them, at the end, go through the model one at a time, the others in chunks as of a prompt
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub single: usize,
    /// The safetensors file to write; it must not exist
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Load the first K layers only: `0..K` or `K`
    #[arg(long, value_name = "0..K", value_parser = layers)]
    pub layers: Option<usize>,
    /// auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: Choice,
    /// Force the kernels of one target
    #[arg(long, value_name = "TARGET", value_parser = PTX)]
    pub ptx: Option<String>,
}

#[derive(Args)]
pub struct Doctor {
    /// Where to try the kernels: auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: Choice,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Subcommand)]
pub enum Bench {
    /// Time operators at real sizes, over memory that no cache holds
    Kernel(BenchKernel),
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    kdtree bench kernel experts --m 1,8 --shape 7168x2048\n  \
    kdtree bench kernel w4a16 --shape 4096x7168 --m 1 --json")]
pub struct BenchKernel {
    /// Operators; all where none is named
    pub kernel: Vec<String>,
    /// Shapes: NxK of a product, HIDDENxINTER of experts, HEADSxCONTEXT of mla, N of others [default: those of K2.6]
    #[arg(long, value_name = "SHAPES", value_delimiter = ',')]
    pub shape: Vec<String>,
    /// Rows of activations [default: the operator's own]
    #[arg(long, value_name = "ROWS", value_delimiter = ',', value_parser = at_least_one)]
    #[arg(allow_negative_numbers = true)]
    pub m: Vec<usize>,
    /// What the cache of mla, rope and commit keeps a token as [default: bf16]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub kv: Option<KvFormat>,
    /// How tokens choose experts [default: even]
    #[arg(long, value_enum)]
    pub routing: Option<Routing>,
    /// How experts are stored [default: w4a16]
    #[arg(long, value_enum)]
    pub format: Option<Numbers>,
    /// Time a layer's experts with the shared one, and how it runs
    #[arg(long, value_enum, value_name = "HOW")]
    pub shared: Option<Shared>,
    /// The kernel of dense products by the end of its name (m8, wide16, tiled, …), not the one that the engine takes
    #[arg(long, value_name = "VARIANT")]
    pub variant: Option<Variant>,
    /// auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: Choice,
    /// Force the kernels of one target
    #[arg(long, value_name = "TARGET", value_parser = PTX)]
    pub ptx: Option<String>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct Completions {
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}
