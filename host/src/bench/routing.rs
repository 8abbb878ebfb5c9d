//! Which experts a token takes: the router's choice, the order by expert, and routings for timing the experts.

use std::rc::Rc;

use super::{Cases, Options, Routing, case, different, distance, prepared, rows, size};
use crate::device::{Device, Result};
use crate::kernels::{self, initial_state};
use crate::reference;
use crate::selfcheck::Random;

/// K2.6's number of experts, of those a token takes, and the factor of their weights.
pub const EXPERTS: usize = 384;
pub const TOP_K: usize = 8;
const SCALING: f32 = 2.827;
/// Experts on the CPU device.
pub const FEW_EXPERTS: usize = 16;
const ROWS: [usize; 4] = [1, 8, 64, 512];

/// The experts of `rows` tokens, distinct within a token.
pub fn choose(random: &mut Random, experts: usize, rows: usize, routing: Routing) -> Vec<u32> {
    let token = |random: &mut Random| {
        let mut all: Vec<u32> = (0..experts as u32).collect();
        (0..TOP_K).map(|_| all.swap_remove(random.below(all.len()))).collect::<Vec<_>>()
    };
    match routing {
        Routing::Even => (0..rows).flat_map(|_| token(random)).collect(),
        Routing::Same => token(random).repeat(rows),
    }
}

fn experts_of(device: &Device, options: &Options) -> Result<usize> {
    size(options, if device.is_cuda() { EXPERTS } else { FEW_EXPERTS })
}

/// `route`, by rows; the shape is the number of experts.
pub fn route<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let experts = experts_of(device, options)?;
    Ok(Box::new(rows(device, options, &ROWS).into_iter().map(move |rows| {
        let bytes = (rows * (experts + 2 * TOP_K) + experts) * size_of::<f32>();
        case(device, "route", format!("{TOP_K} of {experts}"), rows, bytes, |random| {
            let (logits, bias) = (random.floats(rows * experts), random.floats(experts));
            let (d_logits, d_bias) = (device.upload(&logits)?, device.upload(&bias)?);
            let (ids, weights) = (device.alloc(rows * TOP_K)?, Rc::new(device.alloc(rows * TOP_K)?));
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
                    top_k: TOP_K,
                    scaling: SCALING,
                    norm: true,
                };
                kernels::route(device, args)
            };
            let error =
                move || Ok(distance(&result.read()?, &reference::route(&logits, &bias, TOP_K, SCALING, true).1));
            Ok(prepared(run, error))
        })
    })))
}

/// `expert_sort`, by rows of eight pairs each; the shape is the number of experts.
pub fn sort<'a>(device: &'a Device, options: &'a Options) -> Result<Cases<'a>> {
    let (experts, routing) = (experts_of(device, options)?, options.routing);
    Ok(Box::new(rows(device, options, &ROWS).into_iter().map(move |rows| {
        let pairs = rows * TOP_K;
        let bytes = (2 * pairs + 1 + 3 * pairs) * size_of::<u32>();
        case(device, "sort", format!("{TOP_K} of {experts}"), rows, bytes, |random| {
            let ids = choose(random, experts, rows, routing);
            let (d_ids, order) = (device.upload(&ids)?, Rc::new(device.alloc(pairs)?));
            let (result, tiles) = (order.clone(), device.alloc(1 + 3 * pairs)?);
            let run = move |device: &Device| {
                let (ids, order, tiles) = (d_ids.view(), order.view_mut(), tiles.view_mut());
                kernels::expert_sort(device, kernels::ExpertSort { ids, order, tiles, pairs, experts })
            };
            let error = move || Ok(different(&result.read()?, &reference::expert_sort(&ids, experts).0));
            Ok(prepared(run, error))
        })
    })))
}
