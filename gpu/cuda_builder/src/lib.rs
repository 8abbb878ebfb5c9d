//! Compiles a kernel crate to PTX with rustc's own `nvptx64-nvidia-cuda` back end.
//!
//! The names follow the published crate of the same name (`CudaBuilder::new("gpu").arch(..).build()`), which needs a
//! 2021 compiler and libNVVM and cannot target today's GPUs; nothing else is shared with it.
//!
//! A build script needs one call, [`embed`]: it compiles the crate for every architecture and writes `<arch>.ptx.z` and
//! `ptx.rs` (`pub const PTX: &[(&str, &[u8])]`, architecture and zlib stream of the text, lowest first) to `OUT_DIR`.
//! The kernels are compiled by an inner cargo with its own target folder, `target/ptx/<arch>`, and the toolchain that
//! [`Toolchain::find`] names.
//!
//! Every output is checked before it is used: `.target` and `.version` are those asked for, and no kernel reaches
//! core's panics.
//!
//! | variable | meaning |
//! |---|---|
//! | `KDTREE_DEVICE_RUSTC` | the rustc that compiles kernels; nothing else is tried |
//! | `KDTREE_PTX_ARCHS` | for instance `sm_90` or `sm_80,sm_90`: only these are built, to iterate faster |

mod arch;
mod bounds;
mod compile;
mod embed;
mod error;
pub mod listing;
mod toolchain;

pub use arch::{ARCHS_VARIABLE, Arch, selected};
pub use embed::embed;
pub use error::BuildError;
pub use toolchain::{RUSTC_VARIABLE, Toolchain};

use std::path::{Path, PathBuf};

/// One compilation of a kernel crate.
#[derive(Debug, Clone)]
pub struct CudaBuilder {
    crate_dir: PathBuf,
    arch: Arch,
    show_warnings: bool,
}

/// A checked PTX file.
#[derive(Debug, Clone)]
pub struct PtxFile {
    /// The architecture that its `.target` names.
    pub arch: Arch,
    /// Where the compiler left it, without its launch bounds; the next build overwrites it.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
    /// The kernels in it, in file order.
    pub kernels: Vec<String>,
}

impl CudaBuilder {
    /// Compiles the crate in `crate_dir`. A relative path starts at the package whose build script runs
    /// (`CARGO_MANIFEST_DIR`), or at the current folder.
    pub fn new(crate_dir: impl AsRef<Path>) -> Self {
        let base = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
        Self { crate_dir: base.join(crate_dir), arch: Arch::Sm80, show_warnings: false }
    }

    /// The architecture to compile for; the lowest one by default.
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = arch;
        self
    }

    /// Lets the inner cargo's progress and warnings through to stderr.
    pub fn show_warnings(mut self, show: bool) -> Self {
        self.show_warnings = show;
        self
    }

    /// Finds the device toolchain, compiles, and checks what came out.
    pub fn build(&self) -> Result<PtxFile, BuildError> {
        self.build_with(&Toolchain::find(&self.crate_dir)?)
    }

    /// As [`CudaBuilder::build`], with a toolchain found before: saves the search when several targets are built.
    pub fn build_with(&self, toolchain: &Toolchain) -> Result<PtxFile, BuildError> {
        let path = compile::compile(&self.crate_dir, self.arch, toolchain, self.show_warnings)?;
        let text = std::fs::read_to_string(&path).map_err(|e| BuildError::io("read the PTX", &path, e))?;
        let text = if self.arch == Arch::Sm90 { bounds::apply(&text) } else { text };
        let kernels = listing::check(&text, self.arch, &path)?;
        Ok(PtxFile { arch: self.arch, path, text, kernels })
    }
}
