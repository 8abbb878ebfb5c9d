//! How many blocks of a kernel are meant to be on a multiprocessor at once, and whether their registers fit.
//!
//! A kernel leaves that in its PTX: `cuda_std::thread::expect_blocks`, which the macros of the products write for each
//! of them, with what their launchers count on; and `#[kernel(threads = .., blocks = ..)]`, which also becomes
//! directives that hold the assembler to it.

use std::collections::BTreeMap;

/// Registers of a multiprocessor, and what a thread's are rounded up to.
const REGISTERS: u32 = 65_536;
const REGISTER_UNIT: u32 = 8;

const EXPECTED: &str = "// blocks expected: ";
const BOUNDS: &str = "// launch bounds: ";

/// What a kernel's PTX says of its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Threads of a block and blocks of a multiprocessor that a launcher counts on.
    pub expected: Option<[u32; 2]>,
    /// Of the mark of launch bounds.
    pub bounds: Option<[u32; 2]>,
    /// What the directives before its body say.
    pub directives: Option<[u32; 2]>,
}

impl Blocks {
    /// What is wrong with a kernel that takes `registers` a thread.
    pub fn faults(&self, registers: u32) -> Vec<String> {
        let mut faults = Vec::new();
        for [threads, blocks] in [self.expected, self.bounds].into_iter().flatten() {
            let most = REGISTERS / (threads * blocks).max(1) / REGISTER_UNIT * REGISTER_UNIT;
            if registers > most {
                faults.push(format!(
                    "{blocks} blocks of {threads} threads a multiprocessor: at most {most} registers, found {registers}"
                ));
            }
        }
        if self.bounds != self.directives {
            let shown =
                |pair: Option<[u32; 2]>| pair.map_or("none".into(), |[threads, blocks]| format!("{threads}, {blocks}"));
            faults.push(format!(
                "launch bounds: expected the directives {}, found {}",
                shown(self.bounds),
                shown(self.directives)
            ));
        }
        faults
    }
}

/// The kernels of a PTX text that say something.
pub fn read(text: &str) -> BTreeMap<String, Blocks> {
    let mut all = BTreeMap::new();
    let mut kernel = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some((_, rest)) = line.split_once(".entry ") {
            kernel = rest.split('(').next().map(|name| name.trim().to_string());
        }
        let Some(name) = &kernel else { continue };
        let mut of = |change: fn(&mut Blocks, [u32; 2]), pair: Option<[u32; 2]>| {
            if let Some(pair) = pair {
                change(all.entry(name.clone()).or_default(), pair);
            }
        };
        if let Some(rest) = line.strip_prefix(EXPECTED) {
            of(|b, pair| b.expected = Some(pair), pair(rest));
        } else if let Some(rest) = line.strip_prefix(BOUNDS) {
            of(|b, pair| b.bounds = Some(pair), pair(rest));
        } else if let Some(rest) = line.strip_prefix(".maxntid ") {
            let threads = rest.split(',').next().and_then(|n| n.trim().parse().ok());
            of(|b, [threads, _]| b.directives = Some([threads, 0]), threads.map(|threads| [threads, 0]));
        } else if let Some(rest) = line.strip_prefix(".minnctapersm ") {
            let blocks = rest.trim().parse().ok();
            of(
                |b, [_, blocks]| b.directives = Some([b.directives.unwrap_or_default()[0], blocks]),
                blocks.map(|blocks| [0, blocks]),
            );
        }
    }
    all
}

fn pair(text: &str) -> Option<[u32; 2]> {
    let (threads, blocks) = text.split_once(' ')?;
    Some([threads.parse().ok()?, blocks.trim().parse().ok()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "\
.visible .entry held(
\t.param .align 8 .b8 held_param_0[120]
)
.maxntid 256, 1, 1
.minnctapersm 2
{
\t// begin inline asm
\t// launch bounds: 256 2
\t// end inline asm
\t// blocks expected: 256 2
}
.visible .entry free(
)
{
\t// blocks expected: 256 3
}
.visible .entry other(
)
{
}
";

    #[test]
    fn marks_and_directives_are_read() {
        let all = read(PTX);
        let two = Some([256, 2]);
        assert_eq!(all["held"], Blocks { expected: two, bounds: two, directives: two });
        assert_eq!(all["free"], Blocks { expected: Some([256, 3]), ..Blocks::default() });
        assert_eq!(all.len(), 2);
    }

    /// One register more than fits, whether or not the kernel is bounded.
    #[test]
    fn one_register_too_many_is_a_fault() {
        let all = read(PTX);
        assert!(all["held"].faults(128).is_empty() && all["free"].faults(80).is_empty());
        assert_eq!(
            all["free"].faults(81),
            ["3 blocks of 256 threads a multiprocessor: at most 80 registers, found 81"]
        );
        assert_eq!(all["held"].faults(129).len(), 2);
        // Registers are given out eight at a time: 84 would fit by number.
        assert_eq!(all["free"].faults(84).len(), 1);
    }

    #[test]
    fn a_bound_without_its_directives_is_a_fault() {
        let all = read(&PTX.replace(".maxntid 256, 1, 1\n.minnctapersm 2\n", ""));
        assert_eq!(all["held"].faults(64), ["launch bounds: expected the directives 256, 2, found none"]);
        let all = read(&PTX.replace(".minnctapersm 2", ".minnctapersm 1"));
        assert_eq!(all["held"].faults(64), ["launch bounds: expected the directives 256, 2, found 256, 1"]);
    }
}
