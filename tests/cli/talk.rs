use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::checkpoint::Checkpoint;
use super::kimi::CHAT_TEMPLATE;
use super::program::{bundle, command, run, run_with_input};

const SMALL: &str = "k26-small-int4";
const ANSWER: usize = 3;

/// The small model as a folder with a chat template, whose drafter is elsewhere.
fn folder(root: &Path) -> PathBuf {
    let mut model = Checkpoint::of(SMALL, true);
    model.texts.insert("chat_template.jinja".into(), CHAT_TEMPLATE.into());
    model.write(&root.join("small"))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What `decode` answers to a conversation, with as many tokens.
fn answer(model: &Path, messages: serde_json::Value, more: &[&str]) -> String {
    let args = ["decode", text(model), "--device", "cpu", "--max-new", "3", "--json", "--messages", "-"];
    let done = run_with_input([&args[..], more].concat(), messages.to_string().as_bytes());
    done.expect(0, &[]).json()["text"].as_str().unwrap().to_string()
}

/// Lines of an answer as `chat` prints it.
fn printed(answer: &str) -> String {
    if answer.is_empty() || answer.ends_with('\n') { answer.into() } else { format!("{answer}\n") }
}

#[test]
fn turns_go_on_and_are_forgotten() {
    let root = tempfile::tempdir().unwrap();
    let model = folder(root.path());
    let limit = ANSWER.to_string();
    let chat = |input: &str, more: &[&str]| {
        let args = ["chat", text(&model), "--device", "cpu", "--max-new", &limit];
        run_with_input([&args[..], more].concat(), input.as_bytes())
    };
    let user = |text: &str| serde_json::json!({ "role": "user", "content": text });
    let off = ["--thinking", "off"];
    let first = answer(&model, serde_json::json!([user("fn main")]), &off);
    let said = serde_json::json!({ "role": "assistant", "content": first });
    let second = answer(&model, serde_json::json!([user("fn main"), said, user("impl\nfor")]), &off);
    let other = answer(&model, serde_json::json!([user("impl\nfor")]), &off);
    // A message over two lines, an empty line, one that is forgotten, and what comes after the end.
    let done = chat("fn main\n\nimpl\\\nfor\r\n/new\nimpl\\\nfor\n/quit\nfn main\n", &off);
    done.expect(0, &["[", "3 out in ", "cut at the limit"]);
    assert_eq!(done.stdout, printed(&first) + &printed(&second) + &printed(&other));
    // Reasoning that was cut off is no answer: the template leaves it out of the next turn.
    let system = ["--system", "Be brief."];
    let rules = serde_json::json!({ "role": "system", "content": "Be brief." });
    let first = answer(&model, serde_json::json!([rules, user("fn")]), &[]);
    let said = serde_json::json!({ "role": "assistant", "content": "", "reasoning": first });
    let second = answer(&model, serde_json::json!([rules, user("fn"), said, user("use")]), &[]);
    let done = chat("fn\nuse", &system);
    assert_eq!(done.expect(0, &[]).stdout, printed(&first) + &printed(&second));
    assert!(chat("", &[]).expect(0, &[]).stdout.is_empty());
    chat("/help\n", &[]).expect(0, &["/help: there are /new and /quit"]);
    // Messages are text, and the session outlives one that is too long.
    let words = "struct ".repeat(60);
    let done = chat(&format!("{words}\nfn\n"), &["--context", "60"]);
    done.expect(0, &["the context holds 60", "/new begins another", "3 out in"]);
    assert_eq!(done.stdout, printed(&answer(&model, serde_json::json!([user("fn")]), &[])));
}

#[test]
fn drafts_and_draws_change_no_rule() {
    let root = tempfile::tempdir().unwrap();
    let model = folder(root.path());
    let drafter = Checkpoint::drafter_of(SMALL).write_single(&root.path().join("drafter"));
    let chat = |more: &[&str]| {
        let args = ["chat", text(&model), "--device", "cpu", "--max-new", "6"];
        run_with_input([&args[..], more].concat(), b"fn main() {\n").expect(0, &["6 out in "]).stdout.clone()
    };
    assert_eq!(chat(&["--drafter", text(&drafter), "--budget", "8"]), chat(&[]));
    let drawn = ["--temp", "0.8", "--top-p", "0.9", "--min-p", "0.01", "--top-k", "50", "--seed", "7"];
    assert_eq!(chat(&drawn), chat(&[&drawn[..], &["--drafter", text(&drafter)]].concat()));
}

/// Reads all that comes, on a thread of its own.
fn collect(mut from: impl Read + Send + 'static) -> Arc<Mutex<Vec<u8>>> {
    let all = Arc::new(Mutex::new(Vec::new()));
    let to = all.clone();
    std::thread::spawn(move || {
        let mut bytes = [0; 256];
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            to.lock().unwrap().extend_from_slice(&bytes[..n]);
        }
    });
    all
}

/// Ctrl-C ends an answer and not the conversation; at the prompt it ends the program.
#[cfg(unix)]
#[test]
fn an_interrupt_ends_one_answer() {
    let root = tempfile::tempdir().unwrap();
    let model = folder(root.path());
    let args = ["chat", text(&model), "--device", "cpu", "--max-new", "3000", "--thinking", "off"];
    let mut child = command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let id = child.id().to_string();
    let interrupt = || assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let [out, err] = [collect(child.stdout.take().unwrap()), collect(child.stderr.take().unwrap())];
    let wait = |what: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !what() {
            assert!(start.elapsed() < Duration::from_secs(60), "{}", String::from_utf8_lossy(&err.lock().unwrap()));
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    for answers in 1..=2 {
        let before = out.lock().unwrap().len();
        input.write_all(b"fn main() {\n").unwrap();
        wait(&|| out.lock().unwrap().len() > before);
        interrupt();
        wait(&|| String::from_utf8_lossy(&err.lock().unwrap()).matches("interrupted]").count() == answers);
        // What was printed before that has been collected, and the program waits for a message.
        std::thread::sleep(Duration::from_millis(100));
    }
    interrupt();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn what_a_conversation_needs() {
    let root = tempfile::tempdir().unwrap();
    let model = folder(root.path());
    let model = text(&model);
    let small = bundle(SMALL);
    run(["chat", text(&small)]).expect(2, &["holds no chat template", "--template"]);
    run(["chat", text(&bundle("k26-tiny-f32"))]).expect(2, &["holds no tokenizer"]);
    run(["chat", model, "--budget", "4"]).expect(2, &["--budget", "no drafter"]);
    run(["chat", model, "--seed", "4"]).expect(2, &["--temp"]);
    run(["chat", model, "--max-new", "0"]).expect(2, &["--max-new"]);
    run(["chat", model, "--context", "0"]).expect(2, &["--context 0"]);
    run(["chat", model, "--no-draft", "--budget", "4"]).expect(2, &["cannot be used with"]);
    let template = root.path().join("plain.jinja");
    std::fs::write(&template, "{{ messages[0].content }}").unwrap();
    run(["chat", model, "--template", text(&template), "--thinking", "on"]).expect(2, &["--thinking", "no switch"]);
    let done = run_with_input(["chat", model, "--device", "cpu"], b"a\xffb\n");
    done.expect(3, &["UTF-8"]);
}
