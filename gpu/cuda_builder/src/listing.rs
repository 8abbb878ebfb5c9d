//! Reads a PTX listing: its header, its kernels, and which functions call which.
//!
//! The compiler inlines nearly everything, so a call that is left in a kernel is worth a look, and one into core's
//! panics is refused: on a GPU it would end the whole launch without a word, and its formatting code costs registers
//! and stack.

use crate::{Arch, BuildError};
use std::collections::BTreeMap;
use std::path::Path;

/// What a PTX file holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// `.version`, for instance `8.0`.
    pub version: String,
    /// `.target`, for instance `sm_90`.
    pub target: String,
    /// Kernels in file order.
    pub kernels: Vec<String>,
    /// For each function with a body, kernels too, the functions it calls; an indirect call is listed by its register.
    pub calls: BTreeMap<String, Vec<String>>,
}

/// Reads a listing. Never fails: what it does not know, it skips.
pub fn read(text: &str) -> Listing {
    let mut listing = Listing::default();
    let mut current: Option<String> = None;
    let mut depth = 0usize;
    let mut statement = String::new();
    for line in text.lines() {
        let code = line.split("//").next().unwrap_or_default();
        if depth == 0 {
            header(&mut listing, code);
        }
        for c in code.chars() {
            match c {
                '{' if depth == 0 => {
                    current = function(&statement, &mut listing);
                    depth = 1;
                    statement.clear();
                }
                '{' => depth += 1,
                '}' => {
                    depth = depth.saturating_sub(1);
                    statement.clear();
                }
                ';' => {
                    let callers = current.as_ref().and_then(|name| listing.calls.get_mut(name));
                    if let (Some(calls), Some(callee)) = (callers, callee(&statement)) {
                        calls.push(callee.to_string());
                    }
                    statement.clear();
                }
                _ => statement.push(c),
            }
        }
        statement.push(' ');
    }
    listing
}

/// Checks that `text` is for `arch` and that no kernel in it reaches a panic. Returns the kernels.
pub fn check(text: &str, arch: Arch, path: &Path) -> Result<Vec<String>, BuildError> {
    let listing = read(text);
    let fields = [(".target", arch.target(), &listing.target), (".version", arch.ptx_version(), &listing.version)];
    for (field, expected, found) in fields {
        if found != expected {
            let (expected, found) = (expected.to_string(), found.clone());
            return Err(BuildError::WrongHeader { path: path.to_path_buf(), field, expected, found });
        }
    }
    let panics = |kernel: &String| Some((kernel.clone(), listing.reaches_core(kernel)?));
    let calls: Vec<(String, String)> = listing.kernels.iter().filter_map(panics).collect();
    match calls.is_empty() {
        true => Ok(listing.kernels),
        false => Err(BuildError::Panics { path: path.to_path_buf(), calls }),
    }
}

impl Listing {
    /// The first function of core, panic handler or unknown (indirect) function that `kernel` can reach by calls.
    pub fn reaches_core(&self, kernel: &str) -> Option<String> {
        let mut seen = vec![kernel];
        let mut next = 0;
        while let Some(&caller) = seen.get(next) {
            next += 1;
            for callee in self.calls.get(caller).into_iter().flatten() {
                if is_panic(callee) {
                    return Some(callee.clone());
                }
                if !seen.contains(&callee.as_str()) {
                    seen.push(callee);
                }
            }
        }
        None
    }
}

/// Mangled names carry each part of a path after its length: `4core` is the crate core.
fn is_panic(symbol: &str) -> bool {
    ["panic", "4core", "rust_begin_unwind"].iter().any(|part| symbol.contains(part)) || symbol.starts_with('%')
}

fn header(listing: &mut Listing, code: &str) {
    let mut words = code.split_whitespace();
    match (words.next(), words.next()) {
        (Some(".version"), Some(version)) => listing.version = version.to_string(),
        (Some(".target"), Some(target)) => listing.target = target.trim_end_matches(',').to_string(),
        _ => {}
    }
}

/// Takes down the function whose heading `statement` is.
fn function(statement: &str, listing: &mut Listing) -> Option<String> {
    let (is_kernel, rest) = match (statement.split_once(".entry"), statement.split_once(".func")) {
        (Some((_, rest)), _) => (true, rest),
        (_, Some((_, rest))) => (false, rest),
        _ => return None,
    };
    let name = first_name(rest)?.to_string();
    if is_kernel {
        listing.kernels.push(name.clone());
    }
    listing.calls.insert(name.clone(), Vec::new());
    Some(name)
}

/// The callee of a call: `call.uni (retval0), name, (param0)`, where result and parameters may be absent.
fn callee(statement: &str) -> Option<&str> {
    let at = statement.split_whitespace().find(|word| *word == "call" || word.starts_with("call."))?;
    first_name(statement.split_once(at)?.1)
}

/// The first name of `text` after an optional parenthesised result and a comma.
fn first_name(text: &str) -> Option<&str> {
    let mut text = text.trim_start();
    if text.starts_with('(') {
        text = text.split_once(')')?.1.trim_start_matches([',', ' ', '\t']);
    }
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "_$.%".contains(c))).unwrap_or(text.len());
    (end > 0).then(|| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "//\n// Generated by LLVM\n//\n.version 8.0\n.target sm_90a\n.address_size 64\n";
    const BODY: &str = "
.visible .entry first(
	.param .b32 first_param_0
)
.maxntid 128
{
	.reg .b32 	%r<3>;
	@%p1 bra 	$L__BB0_2;
	// call.uni _ZN4core9panicking5panic17hE, ();
	{ .reg .pred p; mbarrier.try_wait p, [%r1]; }
	ret;
}
.func  (.param .b32 func_retval0) _RNvCs1_3gpu6helper(
	.param .b32 p0
)
{
	call.uni 
	_RNvNtCs2_4core9panicking18panic_bounds_check, 
	(
	param0
	);
}
.visible .entry second()
{
	{
	.param .b32 retval0;
	call.uni (retval0), _RNvCs1_3gpu6helper, (param0);
	}
	ret;
}
";

    #[test]
    fn header_kernels_and_calls_are_read() {
        let listing = read(&format!("{HEAD}{BODY}"));
        assert_eq!((listing.version.as_str(), listing.target.as_str()), ("8.0", "sm_90a"));
        assert_eq!(listing.kernels, ["first", "second"]);
        assert_eq!(listing.calls["first"], Vec::<String>::new());
        assert_eq!(listing.calls["second"], ["_RNvCs1_3gpu6helper"]);
        assert_eq!(listing.calls["_RNvCs1_3gpu6helper"], ["_RNvNtCs2_4core9panicking18panic_bounds_check"]);
    }

    #[test]
    fn a_panic_behind_a_helper_names_the_kernel() {
        let error = check(&format!("{HEAD}{BODY}"), Arch::Sm90, Path::new("gpu.s")).unwrap_err().to_string();
        assert!(error.contains("kernel `second` reaches") && error.contains("panic_bounds_check"), "{error}");
        assert!(!error.contains("`first`"), "{error}");
    }

    #[test]
    fn indirect_calls_are_refused() {
        let text = format!("{HEAD}.visible .entry k()\n{{\n\tcall (retval0), %rd1, (param0), prototype_0;\n}}\n");
        assert!(check(&text, Arch::Sm90, Path::new("gpu.s")).is_err());
    }

    #[test]
    fn the_wrong_target_or_version_is_refused() {
        let path = Path::new("gpu.s");
        let target = check(&HEAD.replace("sm_90a", "sm_30"), Arch::Sm90, path).unwrap_err().to_string();
        assert!(target.contains("expected `.target sm_90a`, found `.target sm_30`"), "{target}");
        let version = check(&HEAD.replace("8.0", "7.8"), Arch::Sm90, path).unwrap_err().to_string();
        assert!(version.contains("`.version 7.8`"), "{version}");
        assert_eq!(check(HEAD, Arch::Sm90, path).unwrap(), Vec::<String>::new());
    }
}
