use kdtree::text::{TextStream, Tokenizer};
use kdtree::weights::{Bundle, TokenizerKind, TokenizerSpec};

use super::checkpoint::Checkpoint;
use super::hf::tokenizer_json;
use super::program::{bundle, run, run_with_input};

/// Texts with the ids that two other implementations give (Hugging Face tokenizers 0.23.3, tiktoken 0.14): ordinary
/// text, also where it spells special tokens.
const SAMPLES: &[(&str, &[i32])] = &[
    ("", &[]),
    (
        "fn main() {\n    println!(\"Kimi K2.6\");\n}\n",
        &[577, 1469, 284, 283, 258, 1758, 630, 42, 534, 72, 2105, 17, 13, 21, 785, 368],
    ),
    (
        "Hello, world! The quick brown fox jumps over 12345 lazy dogs.",
        &[
            3600, 318, 11, 323, 279, 1453, 0, 725, 1250, 2652, 305, 826, 77, 280, 887, 3502, 2584, 82, 1377, 220, 3324,
            3492, 220, 3931, 829, 70, 82, 13,
        ],
    ),
    ("I'm sure they'll say it's DON'T", &[40, 6, 76, 3565, 2057, 6, 881, 304, 601, 2599, 475, 1149, 6, 51]),
    ("  leading spaces\t\ttabs\n\n\nend  ", &[220, 301, 3097, 1974, 2544, 197, 197, 83, 4072, 1170, 198, 514, 256]),
    (
        "混合Mixed中文English123",
        &[162, 115, 115, 161, 238, 230, 44, 696, 309, 160, 116, 255, 162, 244, 229, 947, 70, 3756, 3324],
    ),
    (
        "e\u{301} 🦀🦀 \0\x07 ﬁ Ⅷ ½ ١٢٣٤",
        &[
            68, 136, 223, 220, 172, 253, 99, 222, 172, 253, 99, 222, 220, 188, 195, 220, 171, 105, 223, 220, 158, 227,
            100, 220, 126, 121, 220, 149, 94, 149, 95, 149, 96, 149, 97,
        ],
    ),
    ("\r\n\r\n  \n\t x\n", &[201, 198, 201, 198, 256, 198, 197, 792, 198]),
    (
        "impl<T: Into<Vec<u8>>> From<T> for Foo { type A = &'static str; }",
        &[
            539, 719, 25, 2226, 3701, 1832, 23, 749, 29, 2344, 719, 29, 377, 1592, 275, 597, 433, 274, 777, 1359, 876,
            26, 285,
        ],
    ),
    (
        "<|im_end|>[EOS]<think>[BOS]",
        &[27, 91, 534, 2087, 91, 29, 58, 36, 3514, 60, 27, 446, 1390, 29, 58, 33, 3514, 60],
    ),
    ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", &[2922, 2922, 2922, 2922]),
    ("\u{3000}\u{a0}\u{2028}x\x1c\x1dy", &[159, 222, 222, 126, 254, 158, 222, 101, 87, 216, 217, 88]),
];

fn tokenizer() -> Tokenizer {
    Tokenizer::of(&Bundle::open(&bundle("k26-small-int4")).unwrap()).unwrap().unwrap()
}

#[test]
fn ids_are_those_of_other_implementations() {
    let t = tokenizer();
    for (text, ids) in SAMPLES {
        assert_eq!(t.encode(text).unwrap(), *ids, "{text:?}");
        assert_eq!(t.decode(ids).unwrap(), *text);
    }
    assert_eq!(t.encode_with_specials("<|im_end|>[EOS]<think>[BOS]").unwrap(), [4082, 4081, 4087, 4080]);
    assert_eq!(t.encode_with_specials("a<|im_end|").unwrap(), t.encode("a<|im_end|").unwrap());
}

#[test]
fn goldens_spell_their_texts_also_in_pieces() {
    let bundle = Bundle::open(&bundle("k26-small-int4")).unwrap();
    let t = Tokenizer::of(&bundle).unwrap().unwrap();
    assert!(!bundle.golden_texts().is_empty());
    for (golden, text) in bundle.goldens().iter().zip(bundle.golden_texts()) {
        let mut stream = TextStream::new(&t, &[]);
        let pieces: Vec<String> = golden.tokens.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert_eq!(pieces.concat() + &stream.finish(), text.text);
        assert_eq!(t.decode(&golden.prompt).unwrap(), text.prompt);
    }
}

#[test]
fn the_command_gives_ids_and_text() {
    let file = bundle("k26-small-int4");
    let file = file.to_str().unwrap();
    let ids = |args: &[&str]| run([&["tokenize", file], args].concat()).expect(0, &[]).stdout.clone();
    assert_eq!(ids(&["fn main() {}"]), "577 1469 284 1215\n");
    assert_eq!(ids(&["<|im_end|>"]), "27 91 534 2087 91 29\n");
    assert_eq!(ids(&["<|im_end|>", "--special"]), "4082\n");
    assert_eq!(ids(&["-x"]), "12 87\n");
    assert_eq!(ids(&["--ids", "577,1469"]), "fn main\n");
    // A cut character, and one that is none.
    assert_eq!(ids(&["--ids", "172,253,99"]), "\u{fffd}\n");
    let piped = run_with_input(["tokenize", file, "-"], "é🦀\n".as_bytes());
    let document = run(["tokenize", file, "é🦀\n", "--json"]).expect(0, &[]).json();
    let ids: Vec<String> = document["ids"].as_array().unwrap().iter().map(|id| id.to_string()).collect();
    assert_eq!(piped.expect(0, &[]).stdout.trim_end(), ids.join(" "));
    assert_eq!(document["tokens"].as_array().unwrap().len(), ids.len());
}

#[test]
fn special_tokens_in_a_prompt_are_text_unless_asked_for() {
    let file = bundle("k26-small-int4");
    let file = file.to_str().unwrap();
    let tokens = |special: &[&str]| {
        let args = ["decode", file, "--device", "cpu", "--max-new", "0", "--json", "--prompt", "<|im_end|>"];
        run([&args[..], special].concat()).expect(0, &[]).json()["prompt_tokens"].clone()
    };
    assert_eq!((tokens(&[]), tokens(&["--special"])), (6.into(), 1.into()));
}

/// A folder that has the vocabulary as a tokenizer.json gives the same ids, and so does what is converted from it.
#[test]
fn the_other_kind_of_vocabulary_gives_the_same_ids() {
    let root = tempfile::tempdir().unwrap();
    let mut model = Checkpoint::of("k26-small-int4", true);
    let spec = Bundle::open(&bundle("k26-small-int4")).unwrap().tokenizer().unwrap().0.clone();
    let specials: Vec<(&str, u64)> = spec.special_tokens.iter().map(|(name, &id)| (name.as_str(), id.into())).collect();
    let ranks = model.texts.remove("tiktoken.model").unwrap();
    let whole = tokenizer_json(&ranks, &spec.pattern, &specials);
    model.texts.insert("tokenizer.json".into(), whole.to_string());
    // Without the settings, too: the special tokens stand in the file.
    model.texts.remove("tokenizer_config.json");
    let folder = model.write(&root.path().join("small"));
    let file = root.path().join("small.kdtr");
    let [folder, file] = [&folder, &file].map(|path| path.to_str().unwrap());
    run(["convert", folder, file]).expect(0, &[]);
    for path in [folder, file] {
        let opened = Bundle::open(path.as_ref()).unwrap();
        let t = Tokenizer::of(&opened).unwrap().unwrap();
        for (text, ids) in SAMPLES {
            assert_eq!(t.encode(text).unwrap(), *ids, "{text:?}");
            assert_eq!(t.decode(ids).unwrap(), *text);
        }
        assert_eq!(t.encode_with_specials("<|im_end|>[EOS]<think>[BOS]").unwrap(), [4082, 4081, 4087, 4080]);
        assert_eq!(opened.settings().stop_token_ids, [4081, 4082]);
        assert_eq!(run(["tokenize", path, "<|im_end|>", "--special"]).expect(0, &[]).stdout, "4082\n");
        let args = ["decode", path, "--device", "cpu", "--prompt", "fn main() {", "--max-new", "3", "--json"];
        let shipped = ["decode", bundle("k26-small-int4").to_str().unwrap()].map(str::to_string);
        let same = run(shipped.iter().map(String::as_str).chain(args[2..].iter().copied()).chain(["--draft", "none"]));
        let [found, same] = [run(args).expect(0, &[]).json(), same.expect(0, &[]).json()];
        assert_eq!((&found["ids"], &found["text"]), (&same["ids"], &same["text"]));
    }
    // What is not implemented is refused with file and place.
    let damaged = |change: &dyn Fn(&mut serde_json::Value), words: &[&str]| {
        let mut changed = whole.clone();
        change(&mut changed);
        std::fs::write(root.path().join("small/tokenizer.json"), changed.to_string()).unwrap();
        run(["tokenize", folder, "a"]).expect(3, &[words, &["small"]].concat());
    };
    damaged(&|t| t["normalizer"] = serde_json::json!({ "type": "NFKC" }), &["tokenizer.json, normalizer", "NFKC"]);
    damaged(&|t| t["model"]["type"] = "WordPiece".into(), &["tokenizer.json, model", "WordPiece"]);
    damaged(&|t| t["model"]["vocab"]["a"] = 5000.into(), &["tokenizer.json, model.vocab", "5000"]);
    damaged(&|t| t["added_tokens"][0]["id"] = "x".into(), &["tokenizer.json: field `added_tokens`"]);
    damaged(&|t| t["added_tokens"][0]["id"] = 5000.into(), &["special tokens with ids below"]);
}

/// Two vocabularies that Hugging Face's tokenizers 0.23.3 trained, whose lists do not hold every pair that spells a
/// token, with the ids that it gives: GPT-2's splits, and several splits one after the other.
#[test]
fn ids_are_those_of_hugging_faces_library() {
    let all: Vec<serde_json::Value> = serde_json::from_str(include_str!("hf-cases.json")).unwrap();
    assert_eq!(all.len(), 2);
    for trained in all {
        let special_tokens = [("<|end|>".to_string(), 0)].into();
        let template_tokens = Default::default();
        let spec = TokenizerSpec { kind: TokenizerKind::Json, pattern: String::new(), special_tokens, template_tokens };
        let t = Tokenizer::new(&spec, trained["tokenizer"].to_string().as_bytes(), 704).unwrap();
        for case in trained["cases"].as_array().unwrap() {
            let (text, ids): (String, Vec<i32>) = serde_json::from_value(case.clone()).unwrap();
            assert_eq!(t.encode(&text).unwrap(), ids, "{text:?}");
            assert_eq!(t.decode(&ids).unwrap(), text);
        }
        assert_eq!(t.encode_with_specials("a<|end|>").unwrap().last(), Some(&0));
        assert!(t.encode("<|end|>").unwrap().len() > 1);
    }
}
