//! A drafter that does not fit its model costs time and nothing else shows it: this says so.

/// Rounds that are looked at.
const ROUNDS: usize = 64;
/// Accepted drafts a round below which something is wrong. A drafter that fits has more than one.
const FEW: f64 = 0.1;

/// Counts what the first rounds accept.
pub struct Watch {
    drafts: bool,
    runs: usize,
    tokens: usize,
}

impl Watch {
    /// For trees of `budget` nodes; 0 is no drafts.
    pub fn new(budget: usize) -> Self {
        Self { drafts: budget > 0, runs: 0, tokens: 0 }
    }

    /// Takes the length of a run of tokens: the first comes from the prompt, every other from a round. Gives the
    /// warning, once, where there is reason.
    pub fn see(&mut self, run: usize) -> Option<String> {
        if !self.drafts || run == 0 || self.runs > ROUNDS {
            return None;
        }
        self.runs += 1;
        self.tokens += run;
        let rounds = self.runs - 1;
        let accepted = self.tokens - self.runs;
        (rounds == ROUNDS && (accepted as f64) < FEW * rounds as f64).then(|| {
            format!(
                "WARNING: the first {rounds} rounds accepted {accepted} drafted tokens in all. The drafter does not \
                 fit this model (made for another one, other tapped layers, another tokenizer?). The output is right \
                 all the same, but drafting only costs time: --draft none is faster."
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warns_once_and_only_of_few() {
        let warnings = |each: usize, budget: usize| {
            let mut watch = Watch::new(budget);
            (0..200).filter_map(|_| watch.see(each)).count()
        };
        assert_eq!((warnings(1, 16), warnings(2, 16), warnings(1, 0)), (1, 0, 0));
        let mut watch = Watch::new(4);
        assert!((0..5).all(|_| watch.see(0).is_none()) && (0..64).all(|_| watch.see(1).is_none()));
        assert!(watch.see(1).is_some_and(|text| text.contains("first 64 rounds accepted 0 ")));
    }
}
