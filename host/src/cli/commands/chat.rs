//! `kdtree chat`: a conversation over stdin and stdout. Answers go to stdout as they come, all else to stderr.

use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;
use std::time::Instant;

use super::answer::{Printer, generate};
use super::decode::DEFAULT_BUDGET;
use super::{load, open, read_text};
use crate::cli::args::{Chat, Switch};
use crate::cli::failure::{Failure, Result};
use crate::cli::output;
use crate::device::Device;
use crate::engine::{Draft, Engine, EngineOptions, Outcome, Request, Sampling, StopReason};
use crate::text::{ChatTemplate, Messages, Tokenizer};
use crate::weights::{Bundle, TemplateSource, Verify};

const DEFAULT_CONTEXT: usize = 16_384;
const FORGET: &str = "/new";
const QUIT: [&str; 2] = ["/quit", "/exit"];
/// What ends a model's reasoning, and what its prompt ends with when it is to reason.
const END_OF_REASONING: &str = "</think>";
const REASONING: &str = "<think>";

pub fn run(args: &Chat) -> Result<()> {
    let mut bundle = open(&args.bundle, Verify::WhenSmall, None)?;
    if let Some(folder) = &args.drafter {
        bundle.attach_drafter(folder)?;
    }
    let file = args.bundle.display();
    let tokenizer =
        Tokenizer::of(&bundle)?.ok_or_else(|| Failure::usage(format!("{file}: the bundle holds no tokenizer")))?;
    let own = args.template.as_ref().map(|file| -> Result<TemplateSource> {
        Ok(TemplateSource { text: read_text(file)?, file: file.clone(), place: String::new() })
    });
    let own = own.transpose()?;
    let source = own.as_ref().or(bundle.chat_template());
    let source =
        source.ok_or_else(|| Failure::usage(format!("{file} holds no chat template: give one with --template")))?;
    let template = ChatTemplate::new(source)?;
    if args.thinking.is_some() && !template.has_thinking() {
        let file = source.file.display();
        return Err(Failure::usage(format!("--thinking: the chat template of {file} has no switch for it")));
    }
    let options = options(args, &bundle)?;
    let device = Device::open(args.device, args.ptx.as_deref())?;
    let info = device.info();
    output::note(format_args!("{} on {} ({})", bundle.settings().name, info.device, info.name));
    let mut engine = load::open(&bundle, device, options)?;
    let mut talk =
        Talk { args, bundle: &bundle, tokenizer: &tokenizer, template, said: Messages::start(args.system.as_deref()) };
    let mut input = Input { terminal: std::io::stdin().is_terminal() };
    if input.terminal {
        output::note(format_args!("{FORGET} forgets what was said; Ctrl-C ends an answer; {} or Ctrl-D ends", QUIT[0]));
    }
    while let Some(line) = input.message()? {
        match line.trim() {
            "" => {}
            FORGET => talk.said = Messages::start(args.system.as_deref()),
            command if QUIT.contains(&command) => break,
            command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                output::note(format_args!("{command}: there are {FORGET} and {}", QUIT[0]));
            }
            _ => talk.turn(&mut engine, &line, options.budget)?,
        }
    }
    Ok(())
}

/// How the engine is opened.
fn options(args: &Chat, bundle: &Bundle) -> Result<EngineOptions> {
    let most = bundle.config().max_position_embeddings;
    let context = args.context.unwrap_or(DEFAULT_CONTEXT.min(most));
    if context == 0 || context > most {
        return Err(Failure::usage(format!("--context {context}: the model has 1 to {most}")));
    }
    if args.max_new == 0 {
        return Err(Failure::usage("--max-new 0: an answer has at least one token"));
    }
    let drafts = bundle.drafter().is_some() && !args.no_draft;
    if args.budget.is_some() && !drafts {
        return Err(Failure::usage("--budget sizes a tree of drafts; the bundle holds no drafter"));
    }
    let temperature = args.temp.filter(|&t| t > 0.0);
    let shaping = args.top_k.is_some() || args.top_p.is_some() || args.min_p.is_some() || args.seed.is_some();
    if temperature.is_none() && shaping {
        let flags = "--top-k, --top-p, --min-p and --seed shape how tokens are drawn";
        return Err(Failure::usage(format!("{flags}: say --temp T above 0, too")));
    }
    let sampling = temperature.map(|temperature| Sampling {
        temperature,
        top_k: args.top_k.unwrap_or(0),
        top_p: args.top_p.unwrap_or(1.0),
        min_p: args.min_p.unwrap_or(0.0),
        seed: args.seed.unwrap_or(0),
    });
    Ok(EngineOptions {
        kv: args.kv,
        context: Some(context),
        draft: if drafts { Draft::Dflash } else { Draft::None },
        budget: if drafts { args.budget.unwrap_or(DEFAULT_BUDGET) as usize } else { 0 },
        sampling,
        ..EngineOptions::default()
    })
}

/// Where messages come from.
struct Input {
    terminal: bool,
}

impl Input {
    /// The next message: a line, and those after it while one ends with a backslash. None at the end of the input.
    fn message(&mut self) -> Result<Option<String>> {
        let mut message = String::new();
        loop {
            if self.terminal {
                let mark = if message.is_empty() { "> " } else { ". " };
                // Nobody reading stderr is no reason to fail.
                let _ = write!(std::io::stderr().lock(), "{mark}");
            }
            let mut line = String::new();
            let read = std::io::stdin().lock().read_line(&mut line);
            let read = read.map_err(|source| Failure::File { file: Path::new("-").to_path_buf(), source })?;
            let line = line.strip_suffix('\n').unwrap_or(&line);
            let line = line.strip_suffix('\r').unwrap_or(line);
            match line.strip_suffix('\\') {
                Some(start) if read > 0 => {
                    message.push_str(start);
                    message.push('\n');
                }
                _ => {
                    message.push_str(line);
                    return Ok((read > 0 || !message.is_empty()).then_some(message));
                }
            }
        }
    }
}

/// A conversation.
struct Talk<'a> {
    args: &'a Chat,
    bundle: &'a Bundle,
    tokenizer: &'a Tokenizer,
    template: ChatTemplate<'a>,
    said: Messages,
}

impl Talk<'_> {
    /// Takes a message and prints the answer. A message that there is no room for is said and not taken.
    fn turn(&mut self, engine: &mut Engine, message: &str, budget: usize) -> Result<()> {
        let mut said = self.said.clone();
        said.user(message);
        let thinking = self.args.thinking.map(|switch| switch == Switch::On);
        let rendered = self.template.render(&said, thinking, self.tokenizer, false)?;
        let prompt = self.tokenizer.encode_rendered(&rendered)?;
        let (length, context) = (prompt.len(), engine.context());
        let room = context.saturating_sub(length);
        if room == 0 {
            output::note(format_args!(
                "the conversation has {length} tokens now, the context holds {context}: {FORGET} begins another, and \
                 --context N makes room"
            ));
            return Ok(());
        }
        let stop_ids = self.bundle.settings().stop_token_ids.clone();
        let mut printer = Printer::new(&stop_ids, &[], Some(self.tokenizer), false);
        let request =
            Request { prompt, max_new: self.args.max_new.min(room), stop_ids: stop_ids.clone(), golden: None };
        let start = Instant::now();
        let outcome = generate(engine, &request, budget, &mut printer)?;
        let seconds = start.elapsed().as_secs_f64();
        let (text, _) = printer.finish()?;
        let text = text.unwrap_or_default();
        let (reasoning, answer) = match text.split_once(END_OF_REASONING) {
            Some((reasoning, answer)) => (Some(reasoning), answer),
            // Cut off before the answer began.
            None if rendered.text.trim_end().ends_with(REASONING) => (Some(text.as_str()), ""),
            None => (None, text.as_str()),
        };
        said.assistant(reasoning, answer);
        self.said = said;
        output::note(summary(&outcome, length, seconds));
        Ok(())
    }
}

/// What an answer took.
fn summary(outcome: &Outcome, prompt: usize, seconds: f64) -> String {
    let (tokens, rounds) = (outcome.ids.len(), outcome.rounds.len());
    let end = match outcome.stop {
        StopReason::Token(_) => "",
        StopReason::MaxNew => ", cut at the limit",
        StopReason::Stopped => ", interrupted",
    };
    format!("[{prompt} tokens in, {tokens} out in {rounds} rounds, {seconds:.1} s{end}]")
}
