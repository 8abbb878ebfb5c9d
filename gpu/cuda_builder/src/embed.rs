//! The one call of a build script: compile for every architecture and write what the host includes.

use crate::{ARCHS_VARIABLE, Arch, BuildError, CudaBuilder, PtxFile, RUSTC_VARIABLE, Toolchain, compile, selected};
use miniz_oxide::deflate::compress_to_vec_zlib;
use std::fmt::Write as _;
use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

/// Of deflate, 0 to 10. Higher ones take longer and gain a hundredth.
const LEVEL: u8 = 8;

/// Compiles the crate in `crate_dir` (relative to the package whose build script calls) for `archs`, less those that
/// `KDTREE_PTX_ARCHS` leaves out, and writes `<arch>.ptx.z` (a zlib
/// stream) and `ptx.rs` to `OUT_DIR`. Tells cargo when to do so again.
pub fn embed(crate_dir: impl AsRef<Path>, archs: &[Arch]) -> Result<Vec<PtxFile>, BuildError> {
    let out = std::env::var_os("OUT_DIR").ok_or(BuildError::NoVariable { variable: "OUT_DIR" })?;
    let builder = CudaBuilder::new(crate_dir);
    rerun_if_changed(&builder.crate_dir)?;
    let toolchain = Toolchain::find(&builder.crate_dir)?;
    if toolchain.rustc.is_absolute() {
        println!("cargo::rerun-if-changed={}", toolchain.rustc.display());
    }
    let files = builder.build_all(&selected(archs)?, &toolchain)?;
    write_table(Path::new(&out), &files)?;
    Ok(files)
}

impl CudaBuilder {
    /// Compiles for several architectures side by side: each has its own target folder, and most of the first build is
    /// core's, on one thread.
    pub fn build_all(&self, archs: &[Arch], toolchain: &Toolchain) -> Result<Vec<PtxFile>, BuildError> {
        thread::scope(|scope| {
            let start = |&arch: &Arch| scope.spawn(move || self.clone().arch(arch).build_with(toolchain));
            let running: Vec<_> = archs.iter().map(start).collect();
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        })
    }
}

/// Everything that goes into the PTX: the crate with the crates inside its folder, the workspace's manifest (profile
/// `ptx`) and lock file, and the variables read here.
fn rerun_if_changed(crate_dir: &Path) -> Result<(), BuildError> {
    let workspace = compile::workspace_of(crate_dir)?;
    for path in [crate_dir.to_path_buf(), workspace.join("Cargo.toml"), workspace.join("Cargo.lock")] {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    for variable in [ARCHS_VARIABLE, RUSTC_VARIABLE] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    Ok(())
}

/// Writes the PTX files and the table of them. A file that is already right keeps its time, so nothing is compiled
/// again.
fn write_table(out: &Path, files: &[PtxFile]) -> Result<(), BuildError> {
    let mut table = String::from(
        "/// Architecture and zlib stream of the PTX, lowest first.\npub const PTX: &[(&str, &[u8])] = &[\n",
    );
    for file in files {
        let name = format!("{}.ptx.z", file.arch);
        write_if_changed(out.join(&name), &compress_to_vec_zlib(file.text.as_bytes(), LEVEL))?;
        let include = format!("include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}\"))");
        // Writing to a string cannot fail.
        let _ = writeln!(table, "    (\"{}\", {include}),", file.arch);
    }
    table.push_str("];\n");
    write_if_changed(out.join("ptx.rs"), table.as_bytes())
}

fn write_if_changed(path: PathBuf, bytes: &[u8]) -> Result<(), BuildError> {
    match fs::read(&path).is_ok_and(|found| found == bytes) {
        true => Ok(()),
        false => fs::write(&path, bytes).map_err(|e| BuildError::io("write", &path, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use miniz_oxide::inflate::decompress_to_vec_zlib;

    #[test]
    fn the_table_names_each_file_and_is_rewritten_only_when_it_differs() {
        let dir = std::env::temp_dir().join(format!("cuda_builder-table-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = |arch| PtxFile { arch, path: PathBuf::new(), text: format!(".target {arch}"), kernels: vec![] };
        write_table(&dir, &[file(Arch::Sm80), file(Arch::Sm120)]).unwrap();
        let table = fs::read_to_string(dir.join("ptx.rs")).unwrap();
        let before = fs::metadata(dir.join("sm_80.ptx.z")).unwrap().modified().unwrap();
        write_table(&dir, &[file(Arch::Sm80)]).unwrap();
        let after = fs::metadata(dir.join("sm_80.ptx.z")).unwrap().modified().unwrap();
        let packed = fs::read(dir.join("sm_120.ptx.z")).unwrap();
        let shorter = fs::read_to_string(dir.join("ptx.rs")).unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert!(table.contains("(\"sm_80\", include_bytes!") && table.contains("/sm_120.ptx.z"), "{table}");
        assert!(!shorter.contains("sm_120"), "{shorter}");
        assert_eq!(before, after);
        assert_eq!(decompress_to_vec_zlib(&packed).unwrap(), b".target sm_120");
    }
}
