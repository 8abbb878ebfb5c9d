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

mod absorb;
mod attention;
mod experts;
mod memory;
mod positions;
mod products;
mod routing;
mod rows;
mod stored;
mod timing;
mod tree;

use crate::device::{Device, DeviceError, Result};
use crate::kernels::KvFormat;
use crate::linear::Variant;
use crate::selfcheck::Random;
pub use experts::Shared;
pub use memory::Memory;
pub use routing::Routing;
pub use stored::Numbers;
pub use timing::{Measured, REPLAYS, measure, sets};

const SEED: u64 = 26;

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
    /// What the cache of `mla` and `commit` keeps a token as.
    pub kv: KvFormat,
    /// How tokens choose experts.
    pub routing: Routing,
    /// How experts are stored.
    pub numbers: Numbers,
    /// How the shared expert runs; without one where nothing is said.
    pub shared: Option<Shared>,
    /// The kernel of dense products, in place of the one that `linear` takes.
    pub variant: Option<Variant>,
}

/// Values that a row of nearly every family has at least.
const ROW: u128 = 1024;

impl Options {
    /// Fails where no machine like this one has the memory for a case: at least half a byte for each element of a
    /// shape, and two for each of the rows by its longest side, which is at least [`ROW`].
    pub fn check(&self, device: &Device) -> Result<()> {
        let Some(free) = device.free_memory() else { return Ok(()) };
        let rows = self.rows.iter().copied().max().unwrap_or(1) as u128;
        let mut shapes: Vec<Vec<u128>> = vec![vec![1]];
        for text in &self.shapes {
            let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
            // What does not fit is as good as the largest.
            shapes.push(numbers.map(|digits| digits.parse().unwrap_or(u64::MAX.into())).collect());
        }
        let product = |numbers: &Vec<u128>| numbers.iter().fold(1u128, |all, &n| all.saturating_mul(n.max(1)));
        let elements = shapes.iter().map(product).max().unwrap_or(1);
        let longest = shapes.iter().flatten().copied().max().unwrap_or(1);
        let least = (elements / 2).max(rows.saturating_mul(longest.max(ROW)).saturating_mul(2));
        match usize::try_from(least) {
            Ok(bytes) if bytes as u64 <= free => Ok(()),
            bytes => Err(DeviceError::OutOfMemory { bytes: bytes.unwrap_or(usize::MAX) }),
        }
    }
}

/// Prepares the next case; none when there are no more. Cases are made one at a time: each holds gigabytes.
pub type Cases<'a> = Box<dyn Iterator<Item = Result<Case>> + 'a>;

/// A family's name on the command line, and its cases.
pub type Family = (&'static str, for<'a> fn(&'a Device, &'a Options) -> Result<Cases<'a>>);

/// Every family.
pub const FAMILIES: &[Family] = &[
    ("experts", experts::experts),
    ("gate", products::gate),
    ("w4a16", products::w4a16),
    ("w4a16-f32", products::w4a16_f32),
    ("bf16", products::bf16),
    ("absorb", absorb::absorb),
    ("f32", products::f32),
    ("mla", attention::mla),
    ("tree", tree::tree),
    ("topk", tree::top_k),
    ("pick", tree::pick),
    ("accept", tree::accept),
    ("commit", tree::commit),
    ("norm", rows::norm),
    ("swiglu", rows::swiglu),
    ("combine", rows::combine),
    ("embed", rows::embed),
    ("moves", rows::moves),
    ("rope", positions::rope),
    ("block", positions::block),
    ("route", routing::route),
    ("sort", routing::sort),
    ("repack", products::repack),
];

/// The rows that were asked for, or the `usual` ones; on the CPU device the first of those.
fn rows(device: &Device, options: &Options, usual: &[usize]) -> Vec<usize> {
    match (options.rows.is_empty(), device.is_cuda()) {
        (false, _) => options.rows.clone(),
        (true, true) => usual.to_vec(),
        (true, false) => usual[..1].to_vec(),
    }
}

/// The one number that a shape of most families is, or `usual`.
fn size(options: &Options, usual: usize) -> Result<usize> {
    let Some(text) = options.shapes.first() else { return Ok(usual) };
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| refused(format!("shape `{text}`: expected N")))
}

/// One set of memory: what runs over it, and how far its result is from the reference.
struct Prepared {
    run: Run,
    error: Box<dyn FnOnce() -> Result<f64>>,
}

fn prepared(run: impl Fn(&Device) -> Result<()> + 'static, error: impl FnOnce() -> Result<f64> + 'static) -> Prepared {
    Prepared { run: Box::new(run), error: Box::new(error) }
}

/// A case of as many sets of memory as the rules want, each made by `prepare`; the first is compared.
fn case(
    device: &Device,
    operator: &'static str,
    shape: String,
    rows: usize,
    bytes: usize,
    mut prepare: impl FnMut(&mut Random) -> Result<Prepared>,
) -> Result<Case> {
    let mut random = Random::new(SEED);
    let first = prepare(&mut random)?;
    (first.run)(device)?;
    let error = Some((first.error)()?);
    let mut runs = vec![first.run];
    for _ in 1..sets(device, bytes) {
        runs.push(prepare(&mut random)?.run);
    }
    Ok(Case { operator, shape, rows, bytes, flops: 0, runs, error })
}

/// Largest distance over the largest value; infinite where a value is NaN.
fn distance(found: &[f32], want: &[f64]) -> f64 {
    farthest(found.iter().map(|&v| f64::from(v)).zip(want.iter().copied()))
}

fn farthest(pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (mut distance, mut largest) = (0.0f64, f64::MIN_POSITIVE);
    for (found, want) in pairs {
        // NaN would be lost in `max`.
        distance = if found.is_nan() { f64::INFINITY } else { distance.max((found - want).abs()) };
        largest = largest.max(want.abs());
    }
    distance / largest
}

/// Share of values that differ.
fn different<T: PartialEq>(found: &[T], want: &[T]) -> f64 {
    found.iter().zip(want).filter(|(f, w)| f != w).count() as f64 / want.len().max(1) as f64
}

/// A shape that does not read, or a family that cannot be asked so.
pub(crate) fn refused(what: String) -> DeviceError {
    DeviceError::Request(what)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::device::{LAUNCHED, Mode};

    /// What a family is asked for where its own shapes and rows do not reach all of its kernels.
    struct Asked {
        family: &'static str,
        shapes: &'static [&'static str],
        rows: &'static [usize],
    }

    const DENSE: Asked = Asked { family: "", shapes: &["48x64"], rows: &[1] };
    const ASKED: &[Asked] = &[
        Asked { family: "w4a16", ..DENSE },
        Asked { family: "w4a16-f32", ..DENSE },
        Asked { family: "bf16", ..DENSE },
        Asked {
            family: "mla",
            shapes: &[
                "1x20:16/2",
                "1x20:32/1",
                "1x20:compact_16/1",
                "1x20:compact_32/1",
                "1x20:wide_64/9",
                "1x20:16/18",
                "1x20:16/35",
                "1x20:wide_halves/1",
            ],
            rows: &[1],
        },
        // Sorted by the blocks, by lists of 8, by lists of 16.
        Asked { family: "experts", shapes: &["64x64", "64x256"], rows: &[1, 5, 16] },
        Asked { family: "tree", shapes: &["8", "1024"], rows: &[8, 1024] },
        Asked { family: "block", shapes: &["20", "20:64"], rows: &[1] },
    ];

    /// Every format that a family has.
    fn options(family: &str) -> Vec<Options> {
        let asked = ASKED.iter().find(|asked| asked.family == family);
        let (shapes, rows) = asked.map_or((&[][..], &[][..]), |asked| (asked.shapes, asked.rows));
        let usual = Options {
            shapes: shapes.iter().map(ToString::to_string).collect(),
            rows: rows.to_vec(),
            ..Options::default()
        };
        match family {
            "experts" => [Numbers::W4a16, Numbers::W4a16F32, Numbers::Bf16, Numbers::F32]
                .map(|numbers| Options { numbers, ..usual.clone() })
                .into_iter()
                .chain([Shared::Beside, Shared::After].map(|how| Options { shared: Some(how), ..usual.clone() }))
                .collect(),
            "w4a16" | "w4a16-f32" | "bf16" => Variant::ALL
                .into_iter()
                .map(|variant| Options { variant: Some(variant), ..usual.clone() })
                .chain([usual.clone()])
                .collect(),
            "mla" | "rope" => KvFormat::ALL.map(|kv| Options { kv, ..usual.clone() }).to_vec(),
            _ => vec![usual],
        }
    }

    /// A list is no proof: what the timed runs launch is compared with all kernels that `doctor` tries.
    #[test]
    fn every_kernel_is_timed() -> Result<()> {
        let device = Device::cpu(Mode::Fast);
        let all: BTreeSet<_> = crate::selfcheck::run(&device).iter().map(|report| report.kernel).collect();
        LAUNCHED.take();
        Memory::measure(&device)?;
        let mut timed = LAUNCHED.take();
        for (name, cases) in FAMILIES {
            for options in options(name) {
                let cases = match cases(&device, &options) {
                    // Not every format has every variant.
                    Err(DeviceError::Request(_)) if options.variant.is_some() => continue,
                    cases => cases?,
                };
                for case in cases {
                    let case = case?;
                    let what = format!("{} {} x {}", case.operator, case.shape, case.rows);
                    assert!(case.error.is_none_or(|error| error < 0.02), "{what}: {:?}", case.error);
                    LAUNCHED.take();
                    case.runs[0](&device)?;
                    let launched = LAUNCHED.take();
                    assert!(!launched.is_empty(), "{what} launches nothing");
                    timed.extend(launched);
                }
            }
        }
        let missing: Vec<_> = all.difference(&timed).collect();
        assert!(missing.is_empty(), "no bench times {missing:?}");
        Ok(())
    }
}
