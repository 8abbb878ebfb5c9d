//! Launcher of [`gpu::kernels::expert_sort`].

use cuda_std::{Global, GlobalMut};
use gpu::args::tokens::ExpertSortArgs;
use gpu::kernels::expert_sort as kernel;

use super::{contract, holds};
use crate::device::{Device, Dims, Result};

/// Pairs of (token, slot) sorted by expert, stable, and the tiles of the grouped products.
pub struct ExpertSort {
    /// `[pairs]`, each in `0..experts`: another id ends the launch with an error.
    pub ids: Global<u32>,
    /// `[pairs]`: pair indices, by expert, then ascending.
    pub order: GlobalMut<u32>,
    /// `[1 + 3 * pairs]`: the number of tiles, then (expert, first index into `order`, count 1..=tile) of each.
    pub tiles: GlobalMut<u32>,
    pub pairs: usize,
    pub experts: usize,
    /// Pairs of a tile at most: 8, or what [`crate::linear::Sorting`] says.
    pub tile: usize,
}

/// Queues the sort. With no pairs it still writes that there are no tiles.
pub fn expert_sort(device: &Device, p: ExpertSort) -> Result<()> {
    let name = kernel::EXPERT_SORT.name();
    let most = kernel::MAX_EXPERTS;
    contract(name, (1..=most).contains(&p.experts), || format!("{} experts; 1 to {most} are possible", p.experts))?;
    contract(name, p.pairs <= kernel::MAX_PAIRS, || {
        format!("{} pairs; at most {} are possible", p.pairs, kernel::MAX_PAIRS)
    })?;
    contract(name, (1..=kernel::MAX_TILE as usize).contains(&p.tile), || {
        format!("tiles of {}; 1 to {} are possible", p.tile, kernel::MAX_TILE)
    })?;
    holds(name, "ids", p.ids.len(), p.pairs)?;
    holds(name, "order", p.order.len(), p.pairs)?;
    holds(name, "tiles", p.tiles.len(), 1 + 3 * p.pairs)?;
    let (pairs, experts, tile) = (p.pairs as u32, p.experts as u32, p.tile as u32);
    let args = ExpertSortArgs { ids: p.ids, order: p.order, tiles: p.tiles, pairs, experts, tile };
    let dims = Dims { grid: [1, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch_overlapping(&kernel::EXPERT_SORT, dims, args)
}
