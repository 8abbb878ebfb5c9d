//! Trees and states for the attention cases.

use gpu::args::state;

/// A tree: `parents[i] < i`, the root's is itself.
#[derive(Clone, Debug)]
pub struct Tree {
    pub parents: Vec<usize>,
}

impl Tree {
    /// Each row the child of the one before.
    pub fn chain(rows: usize) -> Self {
        Self { parents: (0..rows).map(|i| i.saturating_sub(1)).collect() }
    }

    /// Every tree of `rows` rows.
    pub fn all(rows: usize) -> Vec<Self> {
        let mut trees = vec![vec![0]];
        for i in 1..rows {
            trees = trees.iter().flat_map(|t| (0..i).map(move |p| [&t[..], &[p]].concat())).collect();
        }
        trees.into_iter().map(|parents| Self { parents }).collect()
    }

    pub fn rows(&self) -> usize {
        self.parents.len()
    }

    /// Rows from the root to `row`.
    pub fn path(&self, row: usize) -> Vec<usize> {
        let mut path = vec![row];
        while let Some(&at) = path.last().filter(|&&at| at != 0) {
            path.push(self.parents[at]);
        }
        path.reverse();
        path
    }

    pub fn depths(&self) -> Vec<u32> {
        (0..self.rows()).map(|row| self.path(row).len() as u32 - 1).collect()
    }

    pub fn ancestors(&self) -> Vec<u32> {
        let words = self.rows().div_ceil(32);
        let mut bits = vec![0; self.rows() * words];
        for row in 0..self.rows() {
            self.path(row).iter().for_each(|i| bits[row * words + i / 32] |= 1 << (i % 32));
        }
        bits
    }
}

/// A state with `committed` tokens and the accepted path `path`.
pub fn state_words(committed: usize, path: &[usize]) -> Vec<u32> {
    let mut words = vec![0; state::STATE_WORDS];
    words[state::COMMITTED] = committed as u32;
    words[state::PATH_LEN] = path.len() as u32;
    words[state::BONUS] = 11;
    words[state::NEXT_BONUS] = 22;
    for (r, &row) in path.iter().enumerate() {
        words[state::PATH + r] = row as u32;
    }
    words
}
