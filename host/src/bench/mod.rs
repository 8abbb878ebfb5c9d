//! `kdtree bench kernel`: what an operator takes, by rules that are the same for all.
//!
//! An operator runs over several sets of memory in turn, together beyond four times the L2 ([`sets`]; at most 64 sets:
//! what moves less than a sixteenth of the L2 in a run stays below that), recorded as one graph; the graph is replayed
//! [`REPLAYS`] times, and a time is a replay's divided by the runs in it. Rates are given beside what plain kernels of
//! the same program copy and read on the same device ([`Memory`]); a rate above the read rate is refused, for it would
//! mean that the bytes did not come from memory. On the CPU device the shapes are tiny and only the errors mean
//! anything.
//!
//! One file a family, each with its `cases`; [`FAMILIES`] lists them.

mod attention;
mod memory;
mod products;
mod timing;
mod tree;

use crate::device::{Device, DeviceError, Result};
pub use memory::Memory;
pub use timing::{Measured, REPLAYS, measure, sets};

/// One run of an operator over one set of memory.
pub type Run = Box<dyn Fn(&Device) -> Result<()>>;

/// An operator at one shape, ready to run.
pub struct Case {
    pub operator: &'static str,
    /// What is multiplied or read, in words.
    pub shape: String,
    /// Rows of activations, nodes of a tree: what the operator is asked for at once.
    pub rows: usize,
    /// Bytes that must move between memory and the chip in one run.
    pub bytes: usize,
    /// Multiplications and additions of one run.
    pub flops: usize,
    /// The same work over different memory.
    pub runs: Vec<Run>,
    /// Largest distance from the reference over its largest value, where it was compared.
    pub error: Option<f64>,
}

/// What was asked for.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Shapes in the family's own notation; its K2.6 shapes where there are none.
    pub shapes: Vec<String>,
    /// Rows; the family's own where there are none.
    pub rows: Vec<usize>,
    /// How tokens choose experts.
    pub routing: Routing,
}

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Routing {
    /// Each token's experts are drawn evenly from all.
    #[default]
    Even,
    /// All tokens take the same experts.
    Same,
}

/// Prepares the next case; none when there are no more. Cases are made one at a time: each holds gigabytes.
pub type Cases<'a> = Box<dyn Iterator<Item = Result<Case>> + 'a>;

/// A family's name on the command line, and its cases.
pub type Family = (&'static str, for<'a> fn(&'a Device, &'a Options) -> Result<Cases<'a>>);

/// Every family.
pub const FAMILIES: &[Family] = &[
    ("experts", products::experts),
    ("w4a16", products::w4a16),
    ("bf16", products::bf16),
    ("mla", attention::mla),
    ("tree", tree::tree),
    ("topk", tree::top_k),
    ("pick", tree::pick),
    ("accept", tree::accept),
    ("commit", tree::commit),
];

/// A shape that does not read, or a family that cannot be asked so.
pub(crate) fn refused(what: String) -> DeviceError {
    DeviceError::Unsupported(what)
}
