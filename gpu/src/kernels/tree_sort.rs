//! The sort of the tree builder's list: bins by score, then each entry counts those of its bin that are before it.

use cuda_std::{Shared, dynamic_shared, static_shared, thread, warp};

use super::tree_build::{Arrays, Build, SORT_BINS, THREADS};
use super::tree_list::{RANK_BITS, block_max, block_sums, depth_of, parent_of, place, rank_of, smaller};

// Whether entries tie or move, by rounds that alternate.
static_shared!(fn tree_build_moved() -> [u32; 2]);

impl<const WHOLE: bool> Build<WHOLE> {
    /// Brings the `count` listed nodes in order, the first `budget` of them to the tree.
    #[inline(always)]
    pub(super) fn sort(self, count: u32) {
        let t = thread::thread_idx_x();
        let (bins, rows) = ((SORT_BINS * THREADS) as usize, self.listed as usize + 1);
        let words = self.room.slice(2 * rows, 2 * rows + bins + 1);
        let (slots, row_of, starts) = (words.slice(0, rows), words.slice(rows, rows), words.slice(2 * rows, bins + 1));
        let entries = self.entries();
        let moved = tree_build_moved();
        // The dearest one's bin is the last; bins ascend with the cost, and equal scores share one.
        let mut cost = 0.0;
        let mut row = self.spine + 1 + t;
        while row <= count {
            cost = f32::max(cost, -self.list.score.get(row as usize));
            row += THREADS;
        }
        let last = f32::from_bits(block_max(cost.to_bits()));
        let scale = if last > f32::MIN_POSITIVE { bins as f32 / last } else { 0.0 };
        let bin_of = |row: u32| smaller((-self.list.score.get(row as usize) * scale) as u32, bins as u32 - 1) as usize;

        starts.set(t as usize, 0);
        starts.set((t + THREADS) as usize, 0);
        if t == 0 {
            starts.set(bins, count - self.spine);
            moved.set(0, 0);
        }
        thread::sync_threads();
        let mut row = self.spine + 1 + t;
        while row <= count {
            slots.set(row as usize, starts.atomic_add(bin_of(row), 1));
            row += THREADS;
        }
        thread::sync_threads();
        let own = (SORT_BINS * t) as usize;
        let (first, second) = (starts.get(own), starts.get(own + 1));
        let (start, _) = block_sums(first + second);
        starts.set(own, start);
        starts.set(own + 1, start + first);
        thread::sync_threads();
        let mut row = self.spine + 1 + t;
        while row <= count {
            let slot = starts.get(bin_of(row)) + slots.get(row as usize);
            slots.set(row as usize, slot);
            entries.set(slot as usize, (self.list.key(row) as u64) << u32::BITS);
            row += THREADS;
        }
        thread::sync_threads();
        let listed_row = |parent: u32| if parent <= self.spine { parent } else { row_of.get(parent as usize) };
        let mut round = 0;
        loop {
            let mut moves = false;
            let mut row = self.spine + 1 + t;
            while row <= count {
                let (bin, own) = (bin_of(row), entries.get(slots.get(row as usize) as usize));
                let (from, to) = (starts.get(bin), starts.get(bin + 1));
                let (mut before, mut equal, mut i) = (0, 0, from);
                while i < to {
                    let entry = entries.get(i as usize);
                    before += (entry > own) as u32;
                    equal += (entry == own) as u32;
                    i += 1;
                }
                let new = self.spine + 1 + from + before;
                // At first entries are scores alone, and equal ones are what makes another round.
                moves |= if round == 0 { equal > 1 } else { row_of.get(row as usize) != new };
                row_of.set(row as usize, new);
                row += THREADS;
            }
            if warp::ballot(moves) != 0 && warp::lane_id() == 0 {
                moved.atomic_or(round % 2, 1);
            }
            thread::sync_threads();
            if moved.get(round % 2) == 0 {
                break;
            }
            if t == 0 {
                moved.set(1 - round % 2, 0);
            }
            let mut row = self.spine + 1 + t;
            while row <= count {
                let place_ = self.list.place.get(row as usize);
                let after = !(listed_row(parent_of(place_)) << RANK_BITS | rank_of(place_));
                entries.set(slots.get(row as usize) as usize, (self.list.key(row) as u64) << u32::BITS | after as u64);
                row += THREADS;
            }
            thread::sync_threads();
            round += 1;
        }

        let mut row = t;
        while row <= count {
            let to = listed_row(row);
            if to <= self.budget {
                let (score, from) = (self.list.score.get(row as usize), self.list.place.get(row as usize));
                self.tree.set(to, score, place(listed_row(parent_of(from)), rank_of(from), depth_of(from)));
            }
            row += THREADS;
        }
        thread::sync_threads();
    }

    /// The entries of the sort: the first two words of each row of the room.
    #[inline(always)]
    fn entries(self) -> Shared<u64> {
        dynamic_shared(Arrays::at(self.budget, 0, 0).room, self.listed + 1)
    }
}
