//! Finds a rustc that can compile kernels: recent enough, and with the library sources of the same release, since core
//! is compiled from them (`-Zbuild-std` looks in `<sysroot>/lib/rustlib/src/rust/library` and nowhere else).

use crate::BuildError;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the rustc that compiles kernels.
pub const RUSTC_VARIABLE: &str = "KDTREE_DEVICE_RUSTC";

/// The first release whose PTX back end knows sm_120 with PTX 8.7 and the features that cuda_std uses.
const OLDEST: (u32, u32) = (1, 95);

/// Debian's rustc; rustc-web and rust-web-src bring a recent one to stable releases.
const DISTRIBUTION: &str = "/usr/bin/rustc";

/// A rustc that can compile kernels.
#[derive(Debug, Clone)]
pub struct Toolchain {
    /// The compiler.
    pub rustc: PathBuf,
    /// `rustc -vV`, which identifies it.
    pub version: String,
    /// The sources that core is compiled from.
    pub sources: PathBuf,
}

impl Toolchain {
    /// Looks at the variable [`RUSTC_VARIABLE`] (and then at nothing else), the active toolchain as seen from `dir`,
    /// and the distribution's rustc, in that order.
    pub fn find(dir: &Path) -> Result<Toolchain, BuildError> {
        if let Some(rustc) = std::env::var_os(RUSTC_VARIABLE).filter(|value| !value.is_empty()) {
            return probe(Path::new(&rustc), dir)
                .map_err(|why| BuildError::NoToolchain { tried: vec![format!("{RUSTC_VARIABLE}: {why}")] });
        }
        let active = std::env::var_os("RUSTC").map_or_else(|| PathBuf::from("rustc"), PathBuf::from);
        let mut tried = Vec::new();
        for (origin, rustc) in [("the active toolchain", active), ("the distribution's", DISTRIBUTION.into())] {
            match probe(&rustc, dir) {
                Ok(toolchain) => return Ok(toolchain),
                Err(why) => tried.push(format!("{origin}: {why}")),
            }
        }
        Err(BuildError::NoToolchain { tried })
    }

    /// The first line of `rustc -vV` without the program's name, for people.
    pub fn release(&self) -> &str {
        self.version.lines().next().unwrap_or_default().trim_start_matches("rustc ")
    }
}

fn probe(rustc: &Path, dir: &Path) -> Result<Toolchain, String> {
    let name = rustc.display();
    let version = ask(rustc, &["-vV"], dir)?;
    let release = field(&version, "release").ok_or(format!("{name} -vV names no release"))?.to_string();
    if number(&release).is_none_or(|found| found < OLDEST) {
        return Err(format!("{name} is {release}, expected {}.{} or later", OLDEST.0, OLDEST.1));
    }
    let sysroot = ask(rustc, &["--print", "sysroot"], dir)?;
    let sources = Path::new(sysroot.trim()).join("lib/rustlib/src/rust");
    if !sources.join("library/core/src/lib.rs").is_file() || !sources.join("library/Cargo.lock").is_file() {
        return Err(format!(
            "{name} {release} has no library sources, expected in {}",
            sources.join("library").display()
        ));
    }
    if let Ok(found) = std::fs::read_to_string(sources.join("src/version"))
        && found.trim() != release.split('-').next().unwrap_or_default()
    {
        return Err(format!("{name} is {release}, but the sources in {} are {}", sources.display(), found.trim()));
    }
    Ok(Toolchain { rustc: rustc.to_path_buf(), version, sources })
}

fn ask(rustc: &Path, arguments: &[&str], dir: &Path) -> Result<String, String> {
    let output = Command::new(rustc).args(arguments).current_dir(dir).output();
    let output = output.map_err(|error| format!("cannot run {}: {error}", rustc.display()))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_string();
        return Err(format!("{} {} failed: {words}", rustc.display(), arguments.join(" ")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn field<'a>(version: &'a str, name: &str) -> Option<&'a str> {
    version.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

fn number(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_rustc_says_of_itself() {
        let version = "rustc 1.96.0 (ac68faa20 2026-05-25)\nbinary: rustc\nrelease: 1.96.0\nLLVM version: 22.1.8\n";
        assert_eq!(field(version, "release"), Some("1.96.0"));
        assert_eq!(field(version, "LLVM version"), Some("22.1.8"));
        assert_eq!(field(version, "commit"), None);
        assert_eq!(number("1.96.0"), Some((1, 96)));
        assert_eq!(number("1.97.0-nightly"), Some((1, 97)));
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let why = probe(Path::new("no-such-rustc"), Path::new(".")).unwrap_err();
        assert!(why.contains("no-such-rustc"), "{why}");
    }

    #[cfg(unix)]
    #[test]
    fn an_old_compiler_and_missing_sources_are_told_apart() {
        let dir = std::env::temp_dir().join(format!("cuda_builder-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let script = |name: &str, release: &str| {
            let path = dir.join(name);
            let text = format!(
                "#!/bin/sh\nif [ $1 = -vV ]; then echo 'release: {release}'; else echo {}; fi\n",
                dir.display()
            );
            // By another process: a test that starts a program meanwhile would hand it this one's open file, and a
            // file that is open for writing cannot be run.
            let shell = ["-c", r#"printf %s "$1" > "$0" && chmod +x "$0""#];
            assert!(Command::new("sh").args(shell).arg(&path).arg(text).status().unwrap().success());
            path
        };
        let old = probe(&script("old", "1.63.0"), &dir).unwrap_err();
        let bare = probe(&script("bare", "1.96.0"), &dir).unwrap_err();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(old.contains("1.63.0") && old.contains("1.95 or later"), "{old}");
        assert!(bare.contains("no library sources"), "{bare}");
    }
}
