//! Assembles PTX with `ptxas -v` and reads what it says about each kernel. The same PTX for the same GPU is assembled
//! once: reports are kept in `target/ptxas-cache`, under a hash of PTX, GPU and assembler.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, process};

/// What a kernel takes on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    pub registers: u32,
    /// Static shared memory in bytes; dynamic shared memory is the launcher's.
    pub shared: u32,
    /// Local memory a thread, in bytes.
    pub stack: u32,
    /// Bytes spilled, stores and loads together.
    pub spills: u32,
}

/// The assembler and its cache.
pub struct Assembler {
    program: PathBuf,
    version: String,
    cache: PathBuf,
}

impl Assembler {
    /// An assembler that keeps its reports below `root`.
    pub fn new(program: PathBuf, root: &Path) -> Result<Self> {
        let version = crate::process::output(Command::new(&program).arg("--version"))?;
        let cache = root.join("target/ptxas-cache");
        fs::create_dir_all(&cache).with_context(|| format!("create {}", cache.display()))?;
        Ok(Self { program, version, cache })
    }

    /// The release, for people.
    pub fn release(&self) -> &str {
        self.version.lines().find(|line| line.contains("release")).unwrap_or("ptxas").trim()
    }

    /// Assembles `text` for `gpu`: usage by kernel.
    pub fn assemble(&self, text: &str, gpu: &str) -> Result<BTreeMap<String, Usage>> {
        let mut hasher = DefaultHasher::new();
        (text, gpu, &self.version).hash(&mut hasher);
        let kept = self.cache.join(format!("{:016x}.txt", hasher.finish()));
        if let Ok(report) = fs::read_to_string(&kept) {
            return Ok(parse(&report));
        }
        let hash = hasher.finish();
        let [ptx, cubin] = ["ptx", "cubin"].map(|end| self.cache.join(format!("{}-{hash:016x}.{end}", process::id())));
        // As it ships, launch bounds included.
        fs::write(&ptx, text).with_context(|| format!("write {}", ptx.display()))?;
        let mut command = Command::new(&self.program);
        command.args(["--verbose", "--gpu-name", gpu, "--output-file"]).arg(&cubin).arg(&ptx);
        let output = command.output().with_context(|| format!("start {}", self.program.display()))?;
        // Only the report is wanted; what was never written needs no removal.
        let _ = (fs::remove_file(&ptx), fs::remove_file(&cubin));
        let report = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if !output.status.success() {
            bail!("ptxas refuses {} for {gpu}:\n{}", ptx.display(), report.trim_end());
        }
        report.lines().filter(|line| line.contains("warning")).for_each(|line| eprintln!("{gpu}: {line}"));
        fs::write(&kept, &report).with_context(|| format!("write {}", kept.display()))?;
        Ok(parse(&report))
    }
}

/// Reads the report of `ptxas -v`. Functions that are not kernels count as well: theirs is the stack and spill of
/// whoever calls them.
fn parse(report: &str) -> BTreeMap<String, Usage> {
    let mut usages: BTreeMap<String, Usage> = BTreeMap::new();
    let (mut entry, mut function) = (None, None);
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            entry = rest.split('\'').next().map(String::from);
            function = entry.clone();
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            function = Some(name.trim().to_string());
        } else if let (true, Some(name)) = (line.contains("bytes stack frame"), &function) {
            let usage = usages.entry(name.clone()).or_default();
            usage.stack = before(line, " bytes stack frame");
            usage.spills = before(line, " bytes spill stores") + before(line, " bytes spill loads");
        } else if let (true, Some(name)) = (line.contains("Used ") && line.contains(" registers"), &entry) {
            let usage = usages.entry(name.clone()).or_default();
            usage.registers = before(line, " registers");
            usage.shared = before(line, " bytes smem");
        }
    }
    usages
}

/// The number that ends right before `unit`; 0 where there is none.
fn before(line: &str, unit: &str) -> u32 {
    let Some(text) = line.find(unit).map(|end| &line[..end]) else { return 0 };
    let start = text.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    text[start..].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'clean' for 'sm_90'
ptxas info    : Function properties for clean
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1152 bytes smem, 380 bytes cmem[0]
ptxas info    : Compile time = 4.101 ms
ptxas info    : Compiling entry function 'heavy' for 'sm_90'
ptxas info    : Function properties for heavy
    48 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 48 bytes cumulative stack size
ptxas info    : Function properties for helper
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
";

    #[test]
    fn a_clean_kernel_is_read() {
        let expected = Usage { registers: 40, shared: 1152, stack: 0, spills: 0 };
        assert_eq!(parse(REPORT)["clean"], expected);
    }

    #[test]
    fn a_planted_spill_is_read() {
        let expected = Usage { registers: 255, shared: 0, stack: 48, spills: 44 };
        assert_eq!(parse(REPORT)["heavy"], expected);
    }

    #[test]
    fn functions_beside_kernels_are_read() {
        assert_eq!(parse(REPORT)["helper"].stack, 8);
        assert_eq!(parse(REPORT).len(), 3);
    }
}
