//! Which experts a token takes: the router's choice, the order by expert, and routings for timing the experts.

use std::rc::Rc;

use super::{Cases, Options, case, different, distance, prepared, refused, rows, size};
use crate::device::{Device, Result};
use crate::kernels::{self, initial_state};
use crate::reference;
use crate::selfcheck::Random;

/// Experts of a layer, and those that a token takes.
#[derive(Clone, Copy)]
pub struct Counts {
    pub experts: usize,
    pub top_k: usize,
}

/// K2.6's, and what the CPU device can do in a moment.
const K26: Counts = Counts { experts: 384, top_k: 8 };
const FEW: Counts = Counts { experts: 16, top_k: 8 };
/// Pairs of a tile.
const TILE: usize = gpu::kernels::stream::TILE_M;
/// Factor of K2.6's weights.
const SCALING: f32 = 2.827;
const ROWS: [usize; 4] = [1, 8, 64, 512];
/// Tokens of a recorded prompt at most.
const RECORDED_ROWS: [usize; 3] = [1, 8, 64];

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Routing {
    /// Each token's experts are drawn evenly from all.
    #[default]
    Even,
    /// All tokens take the same experts.
    Same,
    /// As a trained model's routers chose for consecutive tokens of a text: 4 of 32 experts.
    Recorded,
}

/// Written by `bundles/kdtr/routing.py`.
const RECORDED: &[u8] = include_bytes!("../../../bundles/routing-cases.safetensors");

/// What the routers of a trained model chose.
struct Recorded {
    counts: Counts,
    /// Tokens of a prompt.
    tokens: usize,
    /// `[layers * prompts, tokens, top_k]`.
    ids: Vec<u32>,
}

impl Recorded {
    fn read() -> Result<Self> {
        let broken = |what: &dyn std::fmt::Display| refused(format!("the recorded routing: {what}"));
        let file = safetensors::SafeTensors::deserialize(RECORDED).map_err(|e| broken(&e))?;
        let ids = file.tensor("ids").map_err(|e| broken(&e))?;
        let experts = file.tensor("experts").map_err(|e| broken(&e))?;
        let (&[.., tokens, top_k], &[experts, ..]) = (ids.shape(), experts.data()) else {
            return Err(broken(&"expected ids [layers, prompts, tokens, experts a token]"));
        };
        let counts = Counts { experts: usize::from(experts), top_k };
        Ok(Self { counts, tokens, ids: ids.data().iter().map(|&id| u32::from(id)).collect() })
    }
}

impl Routing {
    /// The experts that there are and that a token takes.
    pub fn counts(self, device: &Device) -> Result<Counts> {
        match (self, device.is_cuda()) {
            (Self::Recorded, _) => Ok(Recorded::read()?.counts),
            (_, true) => Ok(K26),
            (_, false) => Ok(FEW),
        }
    }

    /// The experts of `rows` tokens, distinct within a token: ids `[rows, top_k]`.
    pub fn choose(self, random: &mut Random, Counts { experts, top_k }: Counts, rows: usize) -> Result<Vec<u32>> {
        let token = |random: &mut Random| {
            let mut all: Vec<u32> = (0..experts as u32).collect();
            (0..top_k).map(|_| all.swap_remove(random.below(all.len()))).collect::<Vec<_>>()
        };
        match self {
            Self::Even => Ok((0..rows).flat_map(|_| token(random)).collect()),
            Self::Same => Ok(token(random).repeat(rows)),
            Self::Recorded => {
                let Recorded { tokens, ids, .. } = Recorded::read()?;
                if rows > tokens {
                    return Err(refused(format!("{rows} rows: the recorded texts have {tokens} tokens each")));
                }
                let text = random.below(ids.len() / (tokens * top_k));
                let first = (text * tokens + random.below(tokens - rows + 1)) * top_k;
                Ok(ids[first..first + rows * top_k].to_vec())
            }
        }
    }
}

fn holds_token(experts: usize, top_k: usize) -> Result<()> {
    if experts < top_k { Err(refused(format!("{experts} experts: a token takes {top_k}"))) } else { Ok(()) }
}

/// `route`, by rows; the shape is the number of experts.
pub fn route<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let Counts { experts: usual, top_k } = Routing::Even.counts(device)?;
    let experts = size(options, usual)?;
    holds_token(experts, top_k)?;
    Ok(Box::new(rows(device, options, &ROWS).into_iter().map(move |rows| {
        let bytes = (rows * (experts + 2 * top_k) + experts) * size_of::<f32>();
        case(device, "route", format!("{top_k} of {experts}"), rows, bytes, |random| {
            let (logits, bias) = (random.floats(rows * experts), random.floats(experts));
            let (d_logits, d_bias) = (device.upload(&logits)?, device.upload(&bias)?);
            let (ids, weights) = (device.alloc(rows * top_k)?, Rc::new(device.alloc(rows * top_k)?));
            let (result, state) = (weights.clone(), device.upload(&initial_state(0, 0, 0))?);
            let run = move |device: &Device| {
                let args = kernels::Route {
                    logits: d_logits.view(),
                    bias: d_bias.view(),
                    ids: ids.view_mut(),
                    weights: weights.view_mut(),
                    state: state.view_mut(),
                    rows,
                    experts,
                    top_k,
                    scaling: SCALING,
                    norm: true,
                };
                kernels::route(device, args)
            };
            let error =
                move || Ok(distance(&result.read()?, &reference::route(&logits, &bias, top_k, SCALING, true).1));
            Ok(prepared(run, error))
        })
    })))
}

/// `expert_sort`, by rows of eight pairs each; the shape is the number of experts.
pub fn sort<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let routing = options.routing;
    let usual = routing.counts(device)?;
    let counts = Counts { experts: size(options, usual.experts)?, ..usual };
    let Counts { experts, top_k } = counts;
    holds_token(experts, top_k)?;
    let usual = if routing == Routing::Recorded { &RECORDED_ROWS[..] } else { &ROWS };
    Ok(Box::new(rows(device, options, usual).into_iter().map(move |rows| {
        let pairs = rows * top_k;
        let bytes = (2 * pairs + 1 + 3 * pairs) * size_of::<u32>();
        case(device, "sort", format!("{top_k} of {experts}"), rows, bytes, |random| {
            let ids = routing.choose(random, counts, rows)?;
            let (d_ids, order) = (device.upload(&ids)?, Rc::new(device.alloc(pairs)?));
            let (result, tiles) = (order.clone(), device.alloc(1 + 3 * pairs)?);
            let run = move |device: &Device| {
                let (ids, order, tiles) = (d_ids.view(), order.view_mut(), tiles.view_mut());
                kernels::expert_sort(device, kernels::ExpertSort { ids, order, tiles, pairs, experts, tile: TILE })
            };
            let error = move || Ok(different(&result.read()?, &reference::expert_sort(&ids, experts, TILE).0));
            Ok(prepared(run, error))
        })
    })))
}
