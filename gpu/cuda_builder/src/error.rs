//! What can go wrong between kernel source and PTX, each with the way out of it.

use crate::Arch;
use std::path::{Path, PathBuf};
use std::{fmt, io};

/// Why there is no PTX.
#[derive(Debug)]
#[non_exhaustive]
pub enum BuildError {
    /// A file or folder that could not be used.
    Io { doing: &'static str, path: PathBuf, error: io::Error },
    /// A variable of the environment that names no known architecture.
    UnknownArch { variable: &'static str, found: String },
    /// A variable that cargo sets for build scripts and that is absent.
    NoVariable { variable: &'static str },
    /// The crate's manifest has no name, or no workspace lies above it.
    Manifest { path: PathBuf, expected: &'static str },
    /// No rustc that can compile kernels: one line for each candidate.
    NoToolchain { tried: Vec<String> },
    /// The inner cargo failed.
    Compile { arch: Arch, command: String, output: String },
    /// The PTX is not for what was asked, as happens when flags do not reach the compiler.
    WrongHeader { path: PathBuf, field: &'static str, expected: String, found: String },
    /// Kernels that can panic: kernel and the function it reaches.
    Panics { path: PathBuf, calls: Vec<(String, String)> },
}

impl BuildError {
    pub(crate) fn io(doing: &'static str, path: &Path, error: io::Error) -> Self {
        BuildError::Io { doing, path: path.to_path_buf(), error }
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::Io { doing, path, error } => write!(f, "cannot {doing} {}: {error}", path.display()),
            BuildError::UnknownArch { variable, found } => {
                let known = Arch::ALL.map(Arch::name).join(", ");
                write!(f, "{variable}: expected some of {known}, found `{found}`")
            }
            BuildError::NoVariable { variable } => {
                write!(f, "{variable} is not set: not run by cargo as a build script?")
            }
            BuildError::Manifest { path, expected } => write!(f, "{}: expected {expected}, found none", path.display()),
            BuildError::NoToolchain { tried } => {
                writeln!(f, "no rustc here can compile the kernels to PTX. Tried:")?;
                tried.iter().try_for_each(|line| writeln!(f, "  - {line}"))?;
                write!(
                    f,
                    "Any one of these fixes it:\n  rustup component add rust-src\n  \
                     apt-get install rustc-web rust-web-src\n  \
                     {}=/path/to/rustc   (with lib/rustlib/src/rust/library in its sysroot)",
                    crate::RUSTC_VARIABLE
                )
            }
            BuildError::Compile { arch, command, output } => {
                write!(f, "compiling the kernels for {arch} failed.\n  {command}\n{}", output.trim_end())
            }
            BuildError::WrongHeader { path, field, expected, found } => write!(
                f,
                "{}: expected `{field} {expected}`, found `{field} {found}`: the compiler did not get its flags",
                path.display()
            ),
            BuildError::Panics { path, calls } => {
                writeln!(f, "{}: a kernel must not panic, but", path.display())?;
                calls.iter().try_for_each(|(kernel, callee)| writeln!(f, "  kernel `{kernel}` reaches {callee}"))?;
                write!(
                    f,
                    "look for slice indexing, division by a variable, unwrap, or overflow checks in these kernels"
                )
            }
        }
    }
}

impl std::error::Error for BuildError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BuildError::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}
