//! The architectures PTX is built for, and which of them to build now.

use crate::BuildError;
use std::fmt;

/// Names the architectures to build, separated by commas; unset or empty means all.
pub const ARCHS_VARIABLE: &str = "KDTREE_PTX_ARCHS";

/// A PTX target. A GPU runs the PTX of its own and of every lower architecture, but sm_90's on itself alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// Ampere and later: `mma.sync` in bf16, `ldmatrix`, `cp.async`.
    Sm80,
    /// Hopper: bulk copies with mbarrier, `wgmma`. Compiled for `sm_90a`, which no other GPU runs.
    Sm90,
    /// Blackwell, workstation and consumer.
    Sm120,
}

impl Arch {
    /// Every architecture, lowest first.
    pub const ALL: [Arch; 3] = [Arch::Sm80, Arch::Sm90, Arch::Sm120];

    /// The name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm90 => "sm_90",
            Arch::Sm120 => "sm_120",
        }
    }

    /// The name that rustc, ptxas and `.target` use.
    pub const fn target(self) -> &'static str {
        match self {
            Arch::Sm90 => "sm_90a",
            other => other.name(),
        }
    }

    /// Whether a GPU of architecture `gpu` runs this one's PTX.
    pub fn runs_on(self, gpu: Arch) -> bool {
        self == gpu || (self < gpu && self != Arch::Sm90)
    }

    /// The PTX version as `.version` spells it. The lowest that has what kernels for this architecture use: a driver
    /// refuses a version above its own, and the back end's default for sm_90, 7.8, lacks bulk copies.
    pub const fn ptx_version(self) -> &'static str {
        match self {
            Arch::Sm80 => "7.4",
            Arch::Sm90 => "8.0",
            Arch::Sm120 => "8.7",
        }
    }

    /// The same as a rustc target feature.
    pub const fn ptx_feature(self) -> &'static str {
        match self {
            Arch::Sm80 => "ptx74",
            Arch::Sm90 => "ptx80",
            Arch::Sm120 => "ptx87",
        }
    }

    /// The architecture of that name.
    pub fn parse(name: &str) -> Option<Arch> {
        Arch::ALL.into_iter().find(|arch| arch.name() == name)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Those of `archs` that `KDTREE_PTX_ARCHS` allows.
pub fn selected(archs: &[Arch]) -> Result<Vec<Arch>, BuildError> {
    match std::env::var(ARCHS_VARIABLE) {
        Ok(list) => select(archs, &list),
        Err(_) => Ok(archs.to_vec()),
    }
}

fn select(archs: &[Arch], list: &str) -> Result<Vec<Arch>, BuildError> {
    let mut wanted = Vec::new();
    for name in list.split([',', ' ']).filter(|name| !name.is_empty()) {
        let unknown = || BuildError::UnknownArch { variable: ARCHS_VARIABLE, found: name.to_string() };
        wanted.push(Arch::parse(name).ok_or_else(unknown)?);
    }
    if wanted.is_empty() {
        return Ok(archs.to_vec());
    }
    let chosen: Vec<Arch> = archs.iter().copied().filter(|arch| wanted.contains(arch)).collect();
    match chosen.is_empty() {
        true => Err(BuildError::UnknownArch { variable: ARCHS_VARIABLE, found: list.to_string() }),
        false => Ok(chosen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_means_all() {
        assert_eq!(select(&Arch::ALL, " , ").unwrap(), Arch::ALL);
    }

    #[test]
    fn a_list_keeps_the_order_of_architectures() {
        assert_eq!(select(&Arch::ALL, "sm_120,sm_80").unwrap(), [Arch::Sm80, Arch::Sm120]);
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known() {
        let error = select(&Arch::ALL, "sm_90,sm_75").unwrap_err().to_string();
        assert!(error.contains("`sm_75`") && error.contains("sm_80, sm_90, sm_120"), "{error}");
    }

    #[test]
    fn feature_and_version_agree() {
        for arch in Arch::ALL {
            assert_eq!(arch.ptx_feature(), format!("ptx{}", arch.ptx_version().replace('.', "")));
        }
    }
}
