//! The kernels' PTX in this program, and which of it a card takes.

use std::ffi::CString;

use miniz_oxide::inflate::decompress_to_vec_zlib;

use super::{DeviceError, Result};

// `pub const PTX: &[(&str, &[u8])]`: target and zlib stream of the text, lowest first. The build script writes it.
include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// Number of a target: 90 for `sm_90`.
fn number(target: &str) -> Option<u32> {
    target.strip_prefix("sm_")?.parse().ok()
}

/// Whether a card of this compute capability can run PTX of `target`.
///
/// PTX of a plain target runs on every later card, that of sm_90 (`wgmma`) on Hopper alone. sm_120 is used on its own
/// family alone: it is tuned for cards with 99 KiB of shared memory.
fn suits(target: &str, (major, minor): (u32, u32)) -> bool {
    match number(target) {
        Some(n) if n >= 120 => n / 10 == major && n % 10 <= minor,
        // Compiled for `sm_90a`.
        Some(90) => (major, minor) == (9, 0),
        Some(n) => n <= major * 10 + minor,
        None => false,
    }
}

/// The text of a target's PTX.
pub(super) fn unpack(target: &str, packed: &[u8]) -> Result<CString> {
    let broken = |text: String| DeviceError::Ptx { target: target.into(), text };
    let text = decompress_to_vec_zlib(packed).map_err(|e| broken(format!("their text does not unpack: {e}")))?;
    CString::new(text).map_err(|_| broken("the PTX holds a zero byte".into()))
}

/// What to try on a card of this capability, best first. `forced` is the target that `--ptx` names.
pub(super) fn candidates<'a>(
    ptx: &[(&'a str, &'a [u8])],
    card: &str,
    capability: (u32, u32),
    forced: Option<&str>,
) -> Result<Vec<(&'a str, &'a [u8])>> {
    let (major, minor) = capability;
    let names = ptx.iter().map(|p| p.0).collect::<Vec<_>>().join(", ");
    if ptx.is_empty() {
        return Err(DeviceError::Unsupported("this build holds no kernels for GPUs".into()));
    }
    let mut found: Vec<_> = ptx.iter().copied().filter(|p| suits(p.0, capability)).collect();
    found.sort_by_key(|p| std::cmp::Reverse(number(p.0)));
    let Some(forced) = forced else {
        return match found.is_empty() {
            false => Ok(found),
            true => Err(DeviceError::NoDevice(format!(
                "{card} has compute capability {major}.{minor}, and this build has kernels for {names}"
            ))),
        };
    };
    if !ptx.iter().any(|p| p.0 == forced) {
        return Err(DeviceError::Unsupported(format!("no kernels for `{forced}` in this build, only for {names}")));
    }
    found.retain(|p| p.0 == forced);
    match found.is_empty() {
        false => Ok(found),
        true => Err(DeviceError::Unsupported(format!(
            "{card} has compute capability {major}.{minor} and does not take kernels for {forced}"
        ))),
    }
}

/// Whether a failed load says that the driver is too old for the PTX, so that an older target is worth a try. Any other
/// failure is an error of the kernels.
pub(super) fn driver_too_old(code: i32, log: &str) -> bool {
    const UNSUPPORTED_PTX_VERSION: i32 = 222;
    code == UNSUPPORTED_PTX_VERSION || log.contains("Unsupported .version") || log.contains("Unsupported .target")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [(&str, &[u8]); 3] = [("sm_80", b"a"), ("sm_90", b"b"), ("sm_120", b"c")];

    fn chosen(capability: (u32, u32), forced: Option<&str>) -> Result<Vec<&'static str>> {
        Ok(candidates(&ALL, "Card", capability, forced)?.into_iter().map(|p| p.0).collect())
    }

    #[test]
    fn the_best_target_a_card_takes_comes_first() {
        for (capability, best) in [
            ((8, 0), &["sm_80"][..]),
            ((8, 6), &["sm_80"]),
            ((8, 9), &["sm_80"]),
            ((9, 0), &["sm_90", "sm_80"]),
            ((10, 0), &["sm_80"]),
            ((10, 3), &["sm_80"]),
            ((12, 0), &["sm_120", "sm_80"]),
            ((12, 1), &["sm_120", "sm_80"]),
            ((13, 0), &["sm_80"]),
        ] {
            assert_eq!(chosen(capability, None).unwrap(), best, "{capability:?}");
        }
    }

    #[test]
    fn a_card_that_takes_none_is_no_device() {
        let error = chosen((7, 5), None).unwrap_err();
        assert!(matches!(error, DeviceError::NoDevice(_)));
        assert_eq!(
            error.to_string(),
            "no CUDA device: Card has compute capability 7.5, and this build has kernels for sm_80, sm_90, sm_120"
        );
    }

    #[test]
    fn a_forced_target_is_the_only_one_or_an_error() {
        assert_eq!(chosen((12, 0), Some("sm_80")).unwrap(), ["sm_80"]);
        let error = chosen((9, 0), Some("sm_120")).unwrap_err().to_string();
        assert_eq!(error, "Card has compute capability 9.0 and does not take kernels for sm_120");
        let error = chosen((9, 0), Some("sm_75")).unwrap_err().to_string();
        assert_eq!(error, "no kernels for `sm_75` in this build, only for sm_80, sm_90, sm_120");
        assert!(matches!(candidates(&[], "Card", (9, 0), None), Err(DeviceError::Unsupported(_))));
    }

    #[test]
    fn only_an_old_driver_makes_it_try_an_older_target() {
        assert!(driver_too_old(222, ""));
        let log = "ptxas application ptx input, line 5; fatal   : Unsupported .version 8.7; current version is '8.0'";
        assert!(driver_too_old(218, log));
        assert!(!driver_too_old(218, "ptxas application ptx input, line 9; error : Unknown symbol 'x'"));
    }

    #[test]
    fn embedded_kernels_name_their_targets() {
        for (target, packed) in PTX {
            let text = unpack(target, packed).unwrap().into_string().unwrap();
            let line = if *target == "sm_90" { "sm_90a" } else { target };
            assert!(number(target).is_some() && text.contains(&format!(".target {line}\n")), "{target}");
        }
    }

    #[test]
    fn a_damaged_stream_is_an_error_of_its_target() {
        let Some((target, packed)) = PTX.first() else { return };
        let mut damaged = packed.to_vec();
        // The last four bytes are the text's checksum.
        *damaged.last_mut().unwrap() ^= 1;
        let error = unpack(target, &damaged).unwrap_err().to_string();
        assert!(error.contains(target) && error.contains("unpack"), "{error}");
    }
}
