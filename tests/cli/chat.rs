use std::path::Path;

use serde_json::json;

use super::checkpoint::Checkpoint;
use super::kimi::CHAT_TEMPLATE;
use super::program::{Run, bundle, run, run_with_input};

const SMALL: &str = "k26-small-int4";
const CHAT: &str = "<|im_user|>user<|im_middle|>fn<|im_end|><|im_assistant|>assistant<|im_middle|><think>";

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn tokenize(model: &Path, args: &[&str]) -> Run {
    run([&["tokenize", path(model)], args].concat())
}

/// The small model as a folder with a chat template.
fn folder(root: &Path, change: impl FnOnce(&mut Checkpoint)) -> std::path::PathBuf {
    let mut model = Checkpoint::of(SMALL, true);
    model.texts.insert("chat_template.jinja".into(), CHAT_TEMPLATE.into());
    change(&mut model);
    model.write(&root.join("small"))
}

#[test]
fn a_prompt_becomes_a_message_when_asked() {
    let root = tempfile::tempdir().unwrap();
    let model = folder(root.path(), |_| {});
    let decode = |model: &Path, args: &[&str]| {
        let all = [&["decode", path(model), "--device", "cpu", "--max-new", "1", "--draft", "none", "--json"], args];
        run(all.concat()).expect(0, &[]).json()
    };
    let chat = decode(&model, &["--prompt", "fn", "--chat"]);
    assert_eq!((&chat["prompt"], &chat["prompt_tokens"]), (&json!(CHAT), &json!(12)));
    let quick = decode(&model, &["--prompt", "fn", "--chat", "--thinking", "off", "--system", "Rust."]);
    let text = format!("<|im_system|>system<|im_middle|>Rust.<|im_end|>{CHAT}</think>");
    assert_eq!(quick["prompt"], text);
    // Raw otherwise.
    let raw = decode(&model, &["--prompt", "fn"]);
    assert_eq!((&raw["prompt"], &raw["prompt_tokens"]), (&json!(null), &json!(1)));
    // A .kdtr file keeps the template; one without takes another.
    let file = root.path().join("small.kdtr");
    run(["convert", path(&model), path(&file)]).expect(0, &[]);
    assert_eq!(decode(&file, &["--prompt", "fn", "--chat"])["ids"], chat["ids"]);
    let template = model.join("chat_template.jinja");
    let other = decode(&bundle(SMALL), &["--prompt", "fn", "--chat", "--template", path(&template)]);
    assert_eq!((&other["prompt"], &other["ids"]), (&json!(CHAT), &chat["ids"]));
}

#[test]
fn a_template_may_stand_in_the_settings_and_use_their_tokens() {
    let root = tempfile::tempdir().unwrap();
    let template = "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}";
    for settings in
        [json!(template), json!([{ "name": "tools", "template": "" }, { "name": "default", "template": template }])]
    {
        let model = folder(root.path(), |model| {
            model.texts.remove("chat_template.jinja");
            model.edit("tokenizer_config.json", |config| {
                config["chat_template"] = settings.clone();
                config["bos_token"] = json!("[BOS]");
                config["eos_token"] = json!({ "content": "[EOS]", "lstrip": false });
            });
        });
        assert_eq!(
            tokenize(&model, &["--chat", "<|im_end|>"]).expect(0, &[]).stdout,
            "4080 4081 27 91 534 2087 91 29\n"
        );
        assert_eq!(tokenize(&model, &["--chat", "<|im_end|>", "--special"]).expect(0, &[]).stdout, "4080 4081 4082\n");
        std::fs::remove_dir_all(&model).unwrap();
    }
    for wrong in [json!(1), json!([{ "name": "tools", "template": "" }])] {
        let model = folder(root.path(), |model| {
            model.texts.remove("chat_template.jinja");
            model.edit("tokenizer_config.json", |config| config["chat_template"] = wrong.clone());
        });
        tokenize(&model, &["a"]).expect(3, &["tokenizer_config.json", "`chat_template`", "`default`"]);
        std::fs::remove_dir_all(&model).unwrap();
    }
}

#[test]
fn faults_name_file_and_place() {
    let root = tempfile::tempdir().unwrap();
    let model = folder(root.path(), |model| {
        model.texts.insert("chat_template.jinja".into(), "{{ bos_token }}\n{% if x %}".into());
    });
    tokenize(&model, &["--chat", "a"]).expect(3, &["small/chat_template.jinja: template line 2", "a Jinja template"]);
    let template = root.path().join("own.jinja");
    std::fs::write(&template, "{{ messages[0].content }}\n{{ raise_exception('no system prompts') }}").unwrap();
    let own = ["--template", path(&template)];
    let fault = ["own.jinja: template line 2", "no system prompts"];
    tokenize(&model, &[&["--chat", "a"], &own[..]].concat()).expect(3, &fault);
    tokenize(&model, &["--chat", "a", "--template", "/no/such"]).expect(3, &["/no/such", "No such file"]);
    // Without a use of the template its faults do not matter.
    tokenize(&model, &["a"]).expect(0, &[]);
    let messages = |text: &[u8]| run_with_input(["tokenize", path(&model), "--messages", "-"], text);
    messages(b"[{\"role\": \"robot\", \"content\": \"a\"}]").expect(3, &["-: messages[0].role: expected", "\"robot\""]);
    messages(b"[{]").expect(3, &["-: messages: expected", "line 1 column 3"]);
    messages(b"[\"\xff\"]").expect(3, &["-: ", "UTF-8"]);
    let file = root.path().join("none.json");
    tokenize(&model, &["--messages", path(&file)]).expect(3, &["none.json", "No such file"]);
    std::fs::write(&file, "[]").unwrap();
    let decode = ["decode", path(&model), "--messages", path(&file)];
    run(decode).expect(3, &["none.json: messages: expected a list with at least one message"]);
}

#[test]
fn flags_that_cannot_be_honoured() {
    let small = bundle(SMALL);
    let small = path(&small);
    let wrong = |args: &[&str], words: &[&str]| {
        let done = run(args);
        done.expect(2, words);
        assert_eq!(done.stdout, "", "{args:?}");
    };
    wrong(&["decode", small, "--prompt", "a", "--chat"], &["holds no chat template", "--template"]);
    wrong(&["decode", small, "--prompt", "", "--chat"], &["the prompt is empty"]);
    wrong(&["decode", small, "--golden", "0", "--chat"], &["--chat", "--prompt"]);
    wrong(&["decode", small, "--prompt", "a", "--messages", "x"], &["cannot be used with"]);
    wrong(&["decode", small, "--messages", "x", "--chat"], &["cannot be used with"]);
    wrong(&["decode", small, "--messages", "x", "--system", "a"], &["cannot be used with"]);
    wrong(&["decode", small, "--prompt", "a", "--system", "a"], &["required", "--chat"]);
    wrong(&["decode", small, "--prompt", "a", "--thinking", "on"], &["required", "--chat"]);
    wrong(&["decode", small, "--prompt", "a", "--template", "x"], &["required", "--chat"]);
    wrong(&["decode", small, "--prompt", "a", "--chat", "--thinking", "maybe"], &["invalid value 'maybe'"]);
    wrong(&["tokenize", small, "a", "--messages", "x"], &["cannot be used with"]);
    wrong(&["tokenize", small, "--ids", "1", "--chat"], &["cannot be used with"]);
    let root = tempfile::tempdir().unwrap();
    let template = root.path().join("plain.jinja");
    std::fs::write(&template, "{{ messages[0].content }}").unwrap();
    let args = ["decode", small, "--prompt", "a", "--chat", "--thinking", "on", "--template", path(&template)];
    wrong(&args, &["--thinking", "plain.jinja", "no switch"]);
}
