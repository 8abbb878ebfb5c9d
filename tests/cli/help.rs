use super::program::run;

/// Compares with the text in the source. After a change that is meant, the right text is in the failure's message.
fn same(args: &[&str], expected: &str) {
    let done = run(args);
    done.expect(0, &[]);
    assert!(done.stdout == expected, "kdtree {} says now:\n{}", args.join(" "), done.stdout);
    assert_eq!(done.stderr, "");
}

#[test]
fn help_is_word_for_word() {
    same(&["--help"], include_str!("help/kdtree.txt"));
    same(&["decode", "--help"], include_str!("help/decode.txt"));
    same(&["chat", "--help"], include_str!("help/chat.txt"));
    same(&["tokenize", "--help"], include_str!("help/tokenize.txt"));
}

#[test]
fn every_command_has_help_and_completions() {
    let commands =
        ["decode", "chat", "inspect", "verify", "convert", "tokenize", "states", "doctor", "bench", "completions"];
    for command in commands {
        assert!(run([command, "--help"]).expect(0, &[]).stdout.contains(&format!("Usage: kdtree {command}")));
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(["completions", shell]).expect(0, &[]).stdout.clone();
        assert!(commands.iter().all(|c| script.contains(c)) && script.contains("trace-tree"), "{shell}");
    }
    assert!(run(["--version"]).expect(0, &[]).stdout.starts_with("kdtree "));
}
