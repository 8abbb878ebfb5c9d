//! Launch bounds of kernels. rustc has no attribute that becomes `.maxntid` and `.minnctapersm`; a kernel that wants
//! them carries a comment in its body, and the directives are written where PTX has them: between the entry's
//! parameters and its body.
//!
//! Only for sm_90: the kernels that ask for two blocks a multiprocessor find shared memory for one on the others, and
//! are better off with all registers.

/// What stands before the numbers of threads and blocks.
const MARK: &str = "// launch bounds: ";

/// The PTX with the directives of each mark.
pub fn apply(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    // Where the body of the current function begins.
    let mut body = None;
    for line in text.lines() {
        if line == "{" {
            body = Some(lines.len());
        }
        let bounds = line.trim_start().strip_prefix(MARK).and_then(|bounds| bounds.split_once(' '));
        if let (Some((threads, blocks)), Some(at)) = (bounds, body) {
            lines.insert(at, format!(".maxntid {threads}, 1, 1\n.minnctapersm {blocks}"));
            body = None;
        }
        lines.push(line.into());
    }
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::apply;

    #[test]
    fn directives_stand_before_the_body_of_the_marked_kernel() {
        let of = |directives: &str| {
            format!(
                ".visible .entry a(\n)\n{{\n\tret;\n}}\n.visible .entry b(\n\t.param .b8 p[8]\n)\n\
                 {directives}{{\n\t// begin inline asm\n\t// launch bounds: 256 2\n\tret;\n}}\n"
            )
        };
        assert_eq!(apply(&of("")), of(".maxntid 256, 1, 1\n.minnctapersm 2\n"));
        assert_eq!(apply("no kernel\n"), "no kernel\n");
    }
}
