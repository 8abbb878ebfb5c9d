//! Runs the inner cargo that compiles a kernel crate to PTX.
//!
//! What is easily got wrong, and shows late:
//! - the inner cargo has its own target folder, since the outer one holds the lock of the shared one;
//! - cargo hands build scripts an empty `CARGO_ENCODED_RUSTFLAGS`, which beats `RUSTFLAGS`, and clippy a workspace
//!   wrapper; both are removed, and the header of the output is checked;
//! - PTX comes from `--emit=asm` without linking, a file that cargo does not track. When the compiler, its flags or the
//!   workspace's manifest are not those of the last build, or the file is gone, cargo's record of the crate is dropped:
//!   it may hold an older build with today's flags and call it fresh while the file is another's.

use crate::{Arch, BuildError, Toolchain};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, io};

const TARGET: &str = "nvptx64-nvidia-cuda";
const PROFILE: &str = "ptx";

/// Keeps rustc from copying a block into both sides of a branch. It knows nothing of convergence: between two tests of
/// one condition it made two copies of a barrier, and lanes of one warp that wait at different ones never meet (seen as
/// an endless launch). LLVM's own pass of that name is off on targets whose branches diverge.
const NO_COPIES: &str = "-Zmir-enable-passes=-JumpThreading";

/// Variables of an outer cargo, rustup or clippy that change what the inner cargo compiles.
const NOT_INHERITED: [&str; 9] = [
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_BUILD_TARGET",
    "CARGO_TARGET_DIR",
    "CARGO_BUILD_RUSTC_WRAPPER",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "CLIPPY_ARGS",
    "__CARGO_TESTS_ONLY_SRC_ROOT",
];

/// Compiles the crate in `crate_dir` and says where the PTX is.
pub fn compile(crate_dir: &Path, arch: Arch, toolchain: &Toolchain, show: bool) -> Result<PathBuf, BuildError> {
    let manifest = crate_dir.join("Cargo.toml");
    let text = fs::read_to_string(&manifest).map_err(|e| BuildError::io("read", &manifest, e))?;
    let expected = "a `name` under [package]";
    let name = package_name(&text).ok_or(BuildError::Manifest { path: manifest.clone(), expected })?;
    let workspace = workspace_of(crate_dir)?;
    let target_dir = workspace.join("target").join("ptx").join(arch.name());
    let out = target_dir.join(TARGET).join(PROFILE);
    let ptx = out.join("deps").join(format!("{}.s", name.replace('-', "_")));

    let flags = format!("-Ctarget-cpu={} -Ctarget-feature=+{} {NO_COPIES}", arch.target(), arch.ptx_feature());
    let root = workspace.join("Cargo.toml");
    let root_text = fs::read_to_string(&root).map_err(|e| BuildError::io("read", &root, e))?;
    let stamp = Stamp {
        path: target_dir.join(format!("{name}.stamp")),
        text: [&toolchain.version, &flags, &root_text].map(String::as_str).join("\n"),
    };
    if !ptx.is_file() || !stamp.holds() {
        stamp.remove()?;
        forget(&out.join(".fingerprint"), name)?;
    }

    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["rustc", "--quiet", "--lib", "--profile", PROFILE, "--target", TARGET, "-Zbuild-std=core"]);
    cargo.args(["--crate-type", "cdylib", "--color", if show { "auto" } else { "never" }]);
    cargo.arg("--manifest-path").arg(&manifest).arg("--target-dir").arg(&target_dir);
    cargo.args(["--", "--emit=asm", "-Zno-link"]);
    cargo.current_dir(&workspace).env("RUSTC", &toolchain.rustc).env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", &flags);
    for name in NOT_INHERITED {
        cargo.env_remove(name);
    }
    let command = format!("{cargo:?}");

    cargo.stdin(Stdio::null()).stdout(Stdio::null());
    if show {
        cargo.stderr(Stdio::inherit());
    }
    let run = cargo.output().map_err(|e| BuildError::io("run", Path::new(cargo.get_program()), e))?;
    if !run.status.success() {
        let output = String::from_utf8_lossy(&run.stderr).into_owned();
        return Err(BuildError::Compile { arch, command, output });
    }
    stamp.write()?;
    Ok(ptx)
}

/// What the last build was made with.
struct Stamp {
    path: PathBuf,
    text: String,
}

impl Stamp {
    fn holds(&self) -> bool {
        fs::read_to_string(&self.path).is_ok_and(|found| found == self.text)
    }

    fn remove(&self) -> Result<(), BuildError> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(BuildError::io("remove", &self.path, error)),
            _ => Ok(()),
        }
    }

    fn write(&self) -> Result<(), BuildError> {
        match self.holds() {
            true => Ok(()),
            false => fs::write(&self.path, &self.text).map_err(|e| BuildError::io("write", &self.path, e)),
        }
    }
}

/// Drops cargo's record of the crate, so that it is compiled again.
fn forget(fingerprints: &Path, name: &str) -> Result<(), BuildError> {
    let Ok(entries) = fs::read_dir(fingerprints) else { return Ok(()) };
    for entry in entries.flatten() {
        let file = entry.file_name();
        let hash = file.to_str().and_then(|file| file.strip_prefix(name)?.strip_prefix('-'));
        if hash.is_some_and(|hash| !hash.contains('-')) {
            fs::remove_dir_all(entry.path()).map_err(|e| BuildError::io("remove", &entry.path(), e))?;
        }
    }
    Ok(())
}

/// The folder of the workspace that holds `crate_dir`.
pub fn workspace_of(crate_dir: &Path) -> Result<PathBuf, BuildError> {
    let start = fs::canonicalize(crate_dir).map_err(|e| BuildError::io("find the crate", crate_dir, e))?;
    let is_root = |dir: &&Path| {
        let text = fs::read_to_string(dir.join("Cargo.toml"));
        text.is_ok_and(|text| text.lines().any(|line| line.trim() == "[workspace]"))
    };
    let found = start.ancestors().find(is_root).map(Path::to_path_buf);
    found.ok_or(BuildError::Manifest { path: start, expected: "a Cargo.toml with [workspace] here or above" })
}

/// The value of `name` under `[package]`.
fn package_name(manifest: &str) -> Option<&str> {
    let package = manifest.lines().skip_while(|line| line.trim() != "[package]").skip(1);
    let mut fields = package.take_while(|line| !line.trim_start().starts_with('['));
    fields.find_map(|line| line.trim().strip_prefix("name")?.trim_start().strip_prefix('=')?.split('"').nth(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_packages_own() {
        let manifest =
            "[lib]\nname = \"other\"\n[package]\nversion = \"1\"\nname = \"gpu\"\n[[bin]]\nname = \"third\"\n";
        assert_eq!(package_name(manifest), Some("gpu"));
        assert_eq!(package_name("[package]\nversion = \"1\"\n[lib]\nname = \"other\"\n"), None);
    }

    #[test]
    fn the_workspace_is_found_from_inside() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = workspace_of(here).unwrap();
        assert!(root.join("gpu/cuda_builder").is_dir());
        assert!(workspace_of(&here.join("absent")).unwrap_err().to_string().contains("absent"));
    }

    #[test]
    fn forgetting_a_crate_leaves_its_neighbours() {
        let dir = std::env::temp_dir().join(format!("cuda_builder-forget-{}", std::process::id()));
        for name in ["gpu-0123456789abcdef", "gpu-extra-0123456789abcdef", "core-0123456789abcdef"] {
            fs::create_dir_all(dir.join(name)).unwrap();
        }
        forget(&dir, "gpu").unwrap();
        let left = fs::read_dir(&dir).unwrap().count();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(left, 2);
        forget(&dir, "gpu").unwrap();
    }
}
