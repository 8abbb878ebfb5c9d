//! From what was typed to what is done. A flag that cannot be honoured is an error here, before anything is loaded.

use crate::cli::args::{Decode, DraftArg};
use crate::cli::commands::prompt::{self, Prompt};
use crate::cli::commands::read_text;
use crate::cli::failure::{Failure, Result};
use crate::device::Choice;
use crate::engine::{Draft, Growth, Sampling};
use crate::text::Tokenizer;
use crate::weights::{Bundle, Golden};

pub const DEFAULT_BUDGET: u32 = 16;
const DEFAULT_MAX_NEW: usize = 256;

/// A definite request.
pub struct Plan<'a> {
    pub prompt: Vec<i32>,
    /// What the chat template made of the conversation.
    pub rendered: Option<String>,
    /// The golden to compare with, and its number.
    pub golden: Option<&'a Golden>,
    pub golden_index: usize,
    pub draft: Draft,
    /// 0 without drafts.
    pub budget: usize,
    pub growth: Growth,
    /// None: greedy.
    pub sampling: Option<Sampling>,
    pub max_new: usize,
    pub context: usize,
    pub stop_ids: Vec<i32>,
    pub stop_texts: Vec<String>,
}

/// Rules among the flags alone.
pub fn check_flags(args: &Decode) -> Result<()> {
    let draft = args.draft;
    if args.checked && args.device != Choice::Cpu {
        return usage("--checked is a mode of the CPU device: say --device cpu, too");
    }
    if args.ptx.is_some() && args.device == Choice::Cpu {
        return usage("--ptx chooses a GPU's kernels; --device cpu has none");
    }
    if draft == Some(DraftArg::Recorded) && args.golden.is_none() {
        return usage("--draft recorded replays a golden's drafts: say --golden N, too");
    }
    if args.plan_gpus.is_some() && !args.plan {
        return usage("--plan-gpus names cards for a plan: say --plan, too");
    }
    if args.drafter.is_some() && matches!(draft, Some(DraftArg::None | DraftArg::Recorded)) {
        return usage("--drafter names a drafter's folder; this --draft has no use for it");
    }
    if draft == Some(DraftArg::None) && args.budget.is_some() {
        return usage("--budget sizes a tree of drafts; --draft none has none");
    }
    if draft == Some(DraftArg::None) && (args.min_prob.is_some() || args.spine) {
        return usage("--min-prob and --spine shape a tree of drafts; --draft none has none");
    }
    if sampling(args).is_none() {
        let flags = [
            ("--top-k", args.top_k.is_some()),
            ("--top-p", args.top_p.is_some()),
            ("--min-p", args.min_p.is_some()),
            ("--seed", args.seed.is_some()),
        ];
        if let Some((flag, _)) = flags.into_iter().find(|(_, given)| *given) {
            return usage(format!("{flag} shapes how tokens are drawn: say --temp T above 0, too"));
        }
    } else if args.golden.is_some() {
        return usage("--golden compares with greedy tokens; --temp above 0 draws others");
    }
    if args.conversation.chat && args.prompt.is_none() && args.prompt_file.is_none() {
        return usage("--chat makes a message of a text: say --prompt or --prompt-file, too");
    }
    if args.stop.iter().any(String::is_empty) {
        return usage("--stop wants a text that is not empty");
    }
    Ok(())
}

fn usage<T>(text: impl Into<String>) -> Result<T> {
    Err(Failure::usage(text))
}

impl<'a> Plan<'a> {
    pub fn new(args: &Decode, bundle: &'a Bundle, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let vocab = bundle.config().vocab_size;
        let golden = args.golden.map(|i| golden(bundle, i)).transpose()?;
        let Prompt { ids: prompt, text } = prompt(args, golden, bundle, tokenizer)?;
        let rendered = Some(text).filter(|_| args.conversation.is_templated());
        let (draft, budget) = draft(args, bundle, golden)?;
        let (max_new, context) = room(args, bundle, golden, prompt.len())?;
        if !args.stop.is_empty() && tokenizer.is_none() {
            return usage("--stop wants text, and the bundle holds no tokenizer: use --stop-id");
        }
        let mut stop_ids = args.stop_id.clone();
        check_ids("--stop-id", &stop_ids, vocab)?;
        if !args.ignore_stop {
            stop_ids.extend_from_slice(&bundle.settings().stop_token_ids);
        }
        Ok(Self {
            prompt,
            rendered,
            golden,
            golden_index: args.golden.unwrap_or_default(),
            draft,
            budget,
            growth: growth(args),
            sampling: sampling(args),
            max_new,
            context,
            stop_ids,
            stop_texts: args.stop.clone(),
        })
    }
}

fn golden(bundle: &Bundle, i: usize) -> Result<&Golden> {
    let count = bundle.goldens().len();
    bundle.goldens().get(i).ok_or_else(|| {
        let file = bundle.path().display();
        Failure::usage(match count {
            0 => format!("--golden {i}: {file} holds no goldens"),
            _ => format!("--golden {i}: {file} holds goldens 0 to {}", count - 1),
        })
    })
}

fn prompt(args: &Decode, golden: Option<&Golden>, bundle: &Bundle, tokenizer: Option<&Tokenizer>) -> Result<Prompt> {
    let of_ids = |ids: &Vec<i32>| Prompt { ids: ids.clone(), text: String::new() };
    let prompt = if let Some(golden) = golden {
        of_ids(&golden.prompt)
    } else if let Some(ids) = &args.prompt_ids {
        check_ids("--prompt-ids", ids, bundle.config().vocab_size)?;
        of_ids(ids)
    } else {
        let Some(tokenizer) = tokenizer else {
            return usage("the bundle holds no tokenizer: use --prompt-ids or --golden");
        };
        let text = match (&args.prompt, &args.prompt_file) {
            (Some(text), _) => Some(text.clone()),
            (None, Some(file)) => Some(read_text(file)?),
            (None, None) => None,
        };
        prompt::read(text, args.special, &args.conversation, bundle, tokenizer)?
    };
    if prompt.ids.is_empty() { usage(prompt::EMPTY) } else { Ok(prompt) }
}

fn check_ids(flag: &str, ids: &[i32], vocab: usize) -> Result<()> {
    match ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= vocab)) {
        None => Ok(()),
        Some(id) => usage(format!("{flag}: token {id} is outside the vocabulary of {vocab}")),
    }
}

/// Source of drafts and nodes of a tree.
fn draft(args: &Decode, bundle: &Bundle, golden: Option<&Golden>) -> Result<(Draft, usize)> {
    let draft = match args.draft {
        None if bundle.drafter().is_some() => Draft::Dflash,
        None | Some(DraftArg::None) => Draft::None,
        Some(DraftArg::Dflash) if bundle.drafter().is_none() => {
            return usage("--draft dflash: the bundle holds no drafter");
        }
        Some(DraftArg::Dflash) => Draft::Dflash,
        Some(DraftArg::Recorded) if golden.is_none_or(|g| g.draft.is_none()) => {
            return usage("--draft recorded: the golden holds no recorded drafts");
        }
        Some(DraftArg::Recorded) => Draft::Recorded,
    };
    match (draft, args.budget) {
        (Draft::None, Some(_)) => usage("--budget sizes a tree of drafts; the bundle holds no drafter"),
        (Draft::None, None) if args.min_prob.is_some() || args.spine => {
            usage("--min-prob and --spine shape a tree of drafts; the bundle holds no drafter")
        }
        (Draft::None, None) => Ok((draft, 0)),
        (_, budget) => Ok((draft, budget.unwrap_or(DEFAULT_BUDGET) as usize)),
    }
}

fn sampling(args: &Decode) -> Option<Sampling> {
    let temperature = args.temp.filter(|&t| t > 0.0)?;
    Some(Sampling {
        temperature,
        top_k: args.top_k.unwrap_or(0),
        top_p: args.top_p.unwrap_or(1.0),
        min_p: args.min_p.unwrap_or(0.0),
        seed: args.seed.unwrap_or(0),
    })
}

fn growth(args: &Decode) -> Growth {
    // A path's probability is a product, its score the sum of the logarithms.
    Growth { floor: args.min_prob.map_or(f32::NEG_INFINITY, f32::ln), spine: args.spine }
}

/// Tokens to produce, and the context for them.
fn room(args: &Decode, bundle: &Bundle, golden: Option<&Golden>, prompt: usize) -> Result<(usize, usize)> {
    let most = bundle.config().max_position_embeddings;
    if let Some(context) = args.context.filter(|&c| c == 0 || c > most) {
        return usage(format!("--context {context}: the model has 1 to {most}"));
    }
    let limit = args.context.unwrap_or(most);
    if prompt > limit {
        return usage(format!("the prompt has {prompt} tokens, the context holds {limit}"));
    }
    let wanted = golden.map_or(DEFAULT_MAX_NEW, |g| g.tokens.len());
    if let (Some(golden), Some(asked)) = (golden, args.max_new)
        && asked > golden.tokens.len()
    {
        return usage(format!("--max-new {asked}: the golden has {} tokens to compare with", golden.tokens.len()));
    }
    let max_new = args.max_new.unwrap_or_else(|| if golden.is_some() { wanted } else { wanted.min(limit - prompt) });
    match prompt.checked_add(max_new) {
        Some(needed) if needed <= limit => Ok((max_new, args.context.unwrap_or(needed))),
        _ => usage(format!("{prompt} prompt tokens and {max_new} new ones pass the context of {limit}")),
    }
}
