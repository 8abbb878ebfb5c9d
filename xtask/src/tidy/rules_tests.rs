//! Each rule against a planted violation, and against what it must let pass.

use super::*;

fn findings(path: &str, text: &str) -> Vec<String> {
    check(path, text, &BTreeSet::from(["bf16_gemm".to_string()]))
}

fn assert_found(path: &str, text: &str, expected: &str) {
    let found = findings(path, text);
    assert!(found.len() == 1 && found[0].starts_with(expected), "expected {expected}, found {found:?}");
}

fn assert_clean(path: &str, text: &str) {
    assert_eq!(findings(path, text), Vec::<String>::new(), "{text}");
}

#[test]
fn long_files_are_refused() {
    assert_found("host/src/a.rs", &"\n".repeat(601), "host/src/a.rs:601: file size: at most 600 lines, found 601");
    assert_clean("bundles/a.py", &"\n".repeat(600));
    assert_clean("docs/a.md", &"\n".repeat(2000));
}

#[test]
fn long_lines_are_refused() {
    assert_found("a.py", &"é".repeat(121), "a.py:1: line length: at most 120 columns, found 121");
    assert_clean("a.rs", &"é".repeat(120));
    assert_clean("a.md", &"x".repeat(500));
}

#[test]
fn paths_of_one_machine_are_refused() {
    for folder in MACHINE {
        assert_found("a.md", &format!("see /{folder}/me"), "a.md:1: absolute path");
        assert_found("a.toml", &format!("path = \"/{folder}/me\""), "a.toml:1: absolute path");
        assert_clean(
            "a.md",
            &format!("host/{folder}/x, ${{HOME}}/{folder}/x, https://a.example/{folder}/x, ../{folder}/x"),
        );
    }
}

#[test]
fn assembly_has_one_room() {
    assert_found("host/src/a.rs", "\nfn f() { core::arch::asm!(\"nop\") }", "host/src/a.rs:2: inline assembly: `asm!`");
    assert_found("gpu/src/a.rs", "global_asm!(\"\");", "gpu/src/a.rs:1: inline assembly: `global_asm!`");
    assert_clean("gpu/cuda_std/src/a.rs", "asm!(\"nop\")");
    assert_clean("host/src/a.rs", "naked_asm!(\"jmp\"); // asm!\nlet x = \"asm!\"; use core::arch::asm;");
}

#[test]
fn products_are_launched_by_linear_only() {
    let launch = "device.launch(&kernels::gemm::BF16_GEMM, grid, args);";
    assert_found("host/src/model/a.rs", launch, "host/src/model/a.rs:1: product kernel: `BF16_GEMM`");
    assert_found("host/src/a.rs", "module.get(\"bf16_gemm\")", "host/src/a.rs:1: product kernel: `bf16_gemm`");
    for path in ["host/src/linear/a.rs", "host/src/linear.rs", "gpu/src/a.rs", "tests/a.rs", "host/src/bench/gemm.rs"] {
        assert_clean(path, launch);
    }
    assert_clean("host/src/model/a.rs", "// BF16_GEMM\nlinear(weight, x, y); my_bf16_gemm();");
}

#[test]
fn unsafe_without_a_reason_is_refused() {
    assert_found("a.rs", "fn f() {\n    unsafe { g() }\n}", "a.rs:2: unsafe block");
    assert_found("a.rs", "unsafe impl Send for X {}", "a.rs:1: unsafe impl");
    assert_found("a.rs", "/// Does it.\npub unsafe fn f() {}", "a.rs:2: unsafe fn");
    assert_found("a.rs", "pub unsafe extern \"C\" fn f() {}", "a.rs:1: unsafe fn");
    assert_found("a.rs", "unsafe extern \"C\" {\n}", "a.rs:1: unsafe block");
}

#[test]
fn unsafe_with_a_reason_passes() {
    assert_clean("a.rs", "// SAFETY: g is fine.\nlet x = unsafe { g() };");
    assert_clean("a.rs", "unsafe {\n    // SAFETY: g is fine.\n    g()\n}");
    let long = "/// x\n".repeat(12);
    assert_clean("a.rs", &format!("/// # Safety\n/// Call it once.\n{long}#[inline]\npub unsafe fn f() {{}}"));
    assert_clean(
        "a.rs",
        "#[unsafe(no_mangle)]\nfn f(g: unsafe extern \"C\" fn(i32)) {} // unsafe {\nfn not_unsafe() {}",
    );
}
