//! Compiles the kernels for every architecture, assembles the PTX for the GPUs it is meant for, and prints what each
//! kernel takes. Spills, a stack frame, too much shared memory, a kernel that is missing, and on sm_90 more registers
//! than the blocks that its launcher counts on can have, are errors.

use crate::ptxas::{Assembler, Usage};
use crate::{blocks, kernels, setup};
use anyhow::{Result, bail};
use cuda_builder::{Arch, CudaBuilder, PtxFile, Toolchain, selected};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::path::Path;
use std::thread;

/// What a block may have on sm_120, the smallest of the GPUs aimed at.
const SHARED_LIMIT: u32 = 101_376;

/// A PTX file and the GPU it is assembled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    ptx: Arch,
    gpu: Arch,
}

type Table = BTreeMap<String, BTreeMap<Pair, Usage>>;

/// Builds, assembles, prints, judges.
pub fn run(root: &Path) -> Result<()> {
    let gpu = root.join("gpu");
    let assembler = Assembler::new(setup::ptxas(root)?, root)?;
    let files = CudaBuilder::new(&gpu).build_all(&selected(&Arch::ALL)?, &Toolchain::find(&gpu)?)?;
    let table = assemble(&assembler, &files)?;
    print!("{}", shown(&table, assembler.release()));
    let mut faults = faults(&table);
    faults.extend(missing(&kernels::in_source(root)?, &files));
    faults.extend(crowded(&table, &files, &kernels::bounded_in_source(root)?));
    if !faults.is_empty() {
        bail!("kernels not fit to ship, {} faults:\n  {}", faults.len(), faults.join("\n  "));
    }
    Ok(())
}

/// A GPU runs the PTX of its own architecture and of lower ones ([`Arch::runs_on`]), and may have to: `--ptx` forces
/// it.
fn pairs(files: &[PtxFile]) -> Vec<(Pair, &PtxFile)> {
    let gpus = |file: &PtxFile| Arch::ALL.into_iter().filter(move |&gpu| file.arch.runs_on(gpu)).collect::<Vec<_>>();
    let of = |file| gpus(file).into_iter().map(move |gpu| (Pair { ptx: file.arch, gpu }, file));
    files.iter().flat_map(of).collect()
}

fn assemble(assembler: &Assembler, files: &[PtxFile]) -> Result<Table> {
    let mut table = Table::new();
    thread::scope(|scope| {
        let start = |(pair, file): (Pair, _)| {
            let file: &PtxFile = file;
            scope.spawn(move || (pair, assembler.assemble(&file.text, pair.gpu.target())))
        };
        let running: Vec<_> = pairs(files).into_iter().map(start).collect();
        for thread in running {
            let (pair, usages) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            for (kernel, usage) in usages? {
                table.entry(kernel).or_default().insert(pair, usage);
            }
        }
        Ok(())
    })
    .map(|()| table)
}

/// One line a kernel: registers for each pair, then the worst of the rest.
fn shown(table: &Table, assembler: &str) -> String {
    let pairs: BTreeSet<Pair> = table.values().flat_map(|usages| usages.keys().copied()).collect();
    let width = table.keys().map(String::len).max().unwrap_or(0).max("kernel".len());
    let short = |arch: Arch| arch.name().trim_start_matches("sm_");
    let heads: Vec<String> = pairs.iter().map(|pair| format!("{}/{}", short(pair.ptx), short(pair.gpu))).collect();
    let mut text = format!("{assembler}; registers by PTX/GPU, the rest is the largest of all, in bytes\n");
    text += &format!("{:width$}", "kernel");
    heads.iter().for_each(|head| text += &format!(" {head:>7}"));
    text += &format!(" {:>7} {:>6} {:>6}\n", "shared", "spills", "stack");
    for (kernel, usages) in table {
        text += &format!("{kernel:width$}");
        for pair in &pairs {
            let registers = usages.get(pair).map_or("-".to_string(), |usage| usage.registers.to_string());
            text += &format!(" {registers:>7}");
        }
        let largest = |of: fn(&Usage) -> u32| usages.values().map(of).max().unwrap_or(0);
        let (shared, spills, stack) = (largest(|u| u.shared), largest(|u| u.spills), largest(|u| u.stack));
        text += &format!(" {shared:>7} {spills:>6} {stack:>6}\n");
    }
    text + &format!("{} kernels\n", table.len())
}

/// What is wrong with the kernels that were assembled.
fn faults(table: &Table) -> Vec<String> {
    let mut faults = Vec::new();
    for (kernel, usages) in table {
        for (Pair { ptx, gpu }, usage) in usages {
            let mut refuse = |what: &str, found: u32, limit: u32| {
                if found > limit {
                    faults.push(format!("{kernel} ({ptx} PTX on {gpu}): {what}: at most {limit} bytes, found {found}"));
                }
            };
            refuse("spills", usage.spills, 0);
            refuse("stack frame", usage.stack, 0);
            refuse("static shared memory", usage.shared, SHARED_LIMIT);
        }
    }
    faults
}

/// Kernels of the PTX for sm_90 that take more registers than their launchers count on, or lost their launch bounds;
/// `bounded` are those that have some in the source. Elsewhere shared memory allows fewer blocks.
fn crowded(table: &Table, files: &[PtxFile], bounded: &BTreeSet<String>) -> Vec<String> {
    let pair = Pair { ptx: Arch::Sm90, gpu: Arch::Sm90 };
    let Some(file) = files.iter().find(|file| file.arch == pair.ptx) else { return Vec::new() };
    let said = blocks::read(&file.text);
    let lost = bounded.iter().filter(|&kernel| said.get(kernel).is_none_or(|blocks| blocks.bounds.is_none()));
    let mut faults: Vec<_> = lost.map(|kernel| format!("{kernel}: its launch bounds are not in the PTX")).collect();
    for (kernel, blocks) in &said {
        let registers = table.get(kernel).and_then(|usages| usages.get(&pair)).map_or(0, |usage| usage.registers);
        faults.extend(blocks.faults(registers).into_iter().map(|fault| format!("{kernel} (sm_90): {fault}")));
    }
    faults
}

/// Every kernel of the source is in the highest PTX, and one that a lower PTX has is in every higher one.
fn missing(source: &BTreeSet<String>, files: &[PtxFile]) -> Vec<String> {
    let mut expected: BTreeSet<&String> = BTreeSet::new();
    let mut missing = Vec::new();
    for (i, file) in files.iter().enumerate() {
        if i + 1 == files.len() {
            expected.extend(source);
        }
        let absent = expected.iter().filter(|kernel| !file.kernels.contains(kernel));
        missing.extend(absent.map(|kernel| format!("{kernel}: expected in the PTX for {}, found none", file.arch)));
        expected.extend(&file.kernels);
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(usage: Usage) -> Table {
        let pair = Pair { ptx: Arch::Sm80, gpu: Arch::Sm120 };
        Table::from([("scale".to_string(), BTreeMap::from([(pair, usage)]))])
    }

    fn file(arch: Arch, kernels: &[&str]) -> PtxFile {
        let kernels = kernels.iter().map(|kernel| kernel.to_string()).collect();
        PtxFile { arch, path: "".into(), text: String::new(), kernels }
    }

    #[test]
    fn spills_stack_and_shared_memory_are_refused() {
        assert!(faults(&table(Usage { registers: 255, shared: SHARED_LIMIT, ..Usage::default() })).is_empty());
        let found = faults(&table(Usage { spills: 4, stack: 8, shared: SHARED_LIMIT + 1, ..Usage::default() }));
        assert_eq!(found.len(), 3);
        assert!(found[0].contains("scale (sm_80 PTX on sm_120): spills: at most 0 bytes, found 4"), "{}", found[0]);
    }

    #[test]
    fn the_table_has_a_line_a_kernel() {
        let text = shown(&table(Usage { registers: 17, shared: 128, ..Usage::default() }), "ptxas");
        assert!(text.contains("80/120") && text.contains("scale"), "{text}");
        assert!(text.lines().nth(2).unwrap().ends_with("     17     128      0      0"), "{text}");
    }

    #[test]
    fn each_ptx_is_assembled_for_its_own_gpu_and_higher_ones() {
        let files = Arch::ALL.map(|arch| file(arch, &[]));
        let found: Vec<_> = pairs(&files).iter().map(|(pair, _)| (pair.ptx, pair.gpu)).collect();
        use Arch::{Sm80, Sm90, Sm120};
        assert_eq!(found, [(Sm80, Sm80), (Sm80, Sm90), (Sm80, Sm120), (Sm90, Sm90), (Sm120, Sm120)]);
    }

    /// Through the table: what the assembler found beside what the PTX says.
    #[test]
    fn kernels_that_crowd_each_other_out_are_refused() {
        let text = ".entry scale(\n)\n{\n\t// blocks expected: 256 2\n}\n";
        let files = [PtxFile { text: text.into(), ..file(Arch::Sm90, &["scale"]) }];
        let pair = Pair { ptx: Arch::Sm90, gpu: Arch::Sm90 };
        let of = |registers| {
            let usage = Usage { registers, ..Usage::default() };
            crowded(&BTreeMap::from([("scale".to_string(), BTreeMap::from([(pair, usage)]))]), &files, &BTreeSet::new())
        };
        assert!(of(128).is_empty());
        assert_eq!(of(129).len(), 1);
        assert!(of(129)[0].starts_with("scale (sm_90): 2 blocks of 256 threads"), "{:?}", of(129));
        let lost = crowded(&Table::new(), &files, &BTreeSet::from(["scale".to_string()]));
        assert_eq!(lost, ["scale: its launch bounds are not in the PTX"]);
    }

    #[test]
    fn missing_kernels_are_named_with_their_architecture() {
        let source = BTreeSet::from(["a".to_string(), "bulk".to_string(), "new".to_string()]);
        let files = [file(Arch::Sm80, &["a"]), file(Arch::Sm90, &["a", "bulk"]), file(Arch::Sm120, &["a"])];
        let found = missing(&source, &files);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().all(|line| line.contains("sm_120")));
        assert!(missing(&BTreeSet::new(), &[file(Arch::Sm80, &["x"]), file(Arch::Sm90, &[])])[0].starts_with("x:"));
    }
}
