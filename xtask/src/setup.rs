//! Brings a fresh machine to the point where everything can be built and tested: installs what is missing, and only
//! that.
//!
//! What is needed beyond Cargo's own dependencies: a rustc with library sources for the kernels (see
//! `gpu/cuda_builder`), Python with the generator's packages, and `ptxas`, which a wheel brings. The last two live in
//! `.venv`.

use crate::process;
use anyhow::{Context, Result, bail};
use cuda_builder::Toolchain;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The assembler; the last release line whose PTX drivers of CUDA 13.0 take.
const NVCC: &str = "nvidia-cuda-nvcc==13.0.88";
const REQUIREMENTS: &str = "bundles/requirements.txt";
/// Names another assembler than the one of the wheel.
const PTXAS_VARIABLE: &str = "KDTREE_PTXAS";

/// Installs what is missing. Quick when nothing is.
pub fn run(root: &Path) -> Result<()> {
    let toolchain = device_toolchain(root)?;
    eprintln!("device rustc: {} ({})", toolchain.rustc.display(), toolchain.release());
    venv(root)?;
    eprintln!("assembler: {}", ptxas(root)?.display());
    Ok(())
}

/// The interpreter that has the generator's packages.
pub fn python(root: &Path) -> PathBuf {
    root.join(".venv/bin/python")
}

/// The assembler: `KDTREE_PTXAS`, or the wheel's.
pub fn ptxas(root: &Path) -> Result<PathBuf> {
    if let Some(path) = env::var_os(PTXAS_VARIABLE).filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    let lib = root.join(".venv/lib");
    find(&lib, "ptxas").with_context(|| format!("no ptxas in {}: `cargo xtask setup` installs it", lib.display()))
}

fn device_toolchain(root: &Path) -> Result<Toolchain> {
    let gpu = root.join("gpu");
    let Err(missing) = Toolchain::find(&gpu) else { return Ok(Toolchain::find(&gpu)?) };
    if env::var_os(cuda_builder::RUSTC_VARIABLE).is_some() {
        return Err(missing.into());
    }
    apt(&["rustc-web", "rust-web-src"]).with_context(|| missing.to_string())?;
    Ok(Toolchain::find(&gpu)?)
}

/// Creates `.venv` with the generator's packages and the assembler, unless what it was made from is still wanted.
fn venv(root: &Path) -> Result<()> {
    let requirements = root.join(REQUIREMENTS);
    let wanted = fs::read_to_string(&requirements).unwrap_or_default();
    let stamp = root.join(".venv/requirements.stamp");
    let stamp_text = format!("{NVCC}\n{wanted}");
    let python = python(root);
    let runs = || process::output(Command::new(&python).args(["-c", ""])).is_ok();
    if fs::read_to_string(&stamp).is_ok_and(|found| found == stamp_text) && runs() && ptxas(root).is_ok() {
        return Ok(());
    }
    let has_venv = || process::output(Command::new("python3").args(["-c", "import venv, ensurepip"])).is_ok();
    if !has_venv() {
        apt(&["python3", "python3-venv"])?;
    }
    if !runs() {
        eprintln!("creating .venv");
        process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(root.join(".venv")))?;
    }
    let mut pip = Command::new(&python);
    pip.current_dir(root).args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", NVCC]);
    if requirements.is_file() {
        pip.args(["-r", REQUIREMENTS]);
    }
    eprintln!(".venv: {}", process::shown(&pip));
    process::run(&mut pip).context("Python packages could not be installed: is there a network?")?;
    fs::write(&stamp, stamp_text).with_context(|| format!("write {}", stamp.display()))
}

/// Installs Debian packages, as root or through sudo.
fn apt(packages: &[&str]) -> Result<()> {
    let typed = format!("apt-get update && apt-get install {}", packages.join(" "));
    if !process::exists("apt-get") {
        bail!("{} are missing and there is no apt-get here: install their like by hand", packages.join(" and "));
    }
    let root = process::output(Command::new("id").arg("-u"))?.trim() == "0";
    if !root && !process::exists("sudo") {
        bail!("{} are missing and can be installed only by root: {typed}", packages.join(" and "));
    }
    let apt_get = |arguments: &[&str]| {
        let mut command = if root { Command::new("env") } else { Command::new("sudo") };
        command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"]).args(arguments);
        process::run(&mut command)
    };
    eprintln!("installing {}", packages.join(" "));
    apt_get(&["update"])
        .and_then(|()| apt_get(&[&["install", "--no-install-recommends"], packages].concat()))
        .with_context(|| format!("could not install packages (no network, or not allowed?); by hand: {typed}"))
}

/// The first file of that name below `dir`.
fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    let file = entries.iter().find(|path| path.is_file() && path.file_name().is_some_and(|found| found == name));
    file.cloned().or_else(|| entries.iter().filter(|path| path.is_dir()).find_map(|path| find(path, name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_below() {
        let dir = env::temp_dir().join(format!("xtask-find-{}", std::process::id()));
        fs::create_dir_all(dir.join("a/bin")).unwrap();
        fs::write(dir.join("a/bin/ptxas"), "").unwrap();
        let found = find(&dir, "ptxas");
        let none = find(&dir, "nvlink");
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found, Some(dir.join("a/bin/ptxas")));
        assert_eq!(none, None);
    }
}
