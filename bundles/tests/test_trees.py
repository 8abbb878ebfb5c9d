"""Builder, walk and decoding: against brute force, and tree against plain."""
import sys
import unittest
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kdtr import cases, tiny  # noqa: E402
from kdtr.dflash import Drafter  # noqa: E402
from kdtr.format import Bundle  # noqa: E402
from kdtr.reference import Model, replay  # noqa: E402
from kdtr.tree import RecordedDrafter, accept, best_first, chain, decode, visibility  # noqa: E402


class Builder(unittest.TestCase):
    def test_against_brute_force(self):
        rng = np.random.default_rng(3)
        for k in range(60):
            step = None if k % 2 else 0.25  # multiples of a quarter tie often
            ids, logp = cases.marginals(rng, int(rng.integers(1, 6)), int(rng.integers(1, 9)), step)
            budget = int(rng.integers(0, 25))
            for found, want in zip(best_first(ids, logp, budget), cases.brute_force(ids, logp, budget)):
                self.assertEqual(found.tolist(), list(want))

    def test_order(self):
        ids, logp = cases.marginals(np.random.default_rng(4), 7, 16)
        _, parents, depths, scores = best_first(ids, logp, 64)
        self.assertTrue((np.diff(scores) <= 0).all())
        self.assertTrue((parents < np.arange(1, 65)).all())
        self.assertTrue((depths == np.concatenate(([0], depths))[parents] + 1).all())

    def test_one_column_is_the_chain(self):
        ids, logp = cases.marginals(np.random.default_rng(5), 7, 16)
        for a, b in zip(best_first(ids[:, :1], logp[:, :1], 64), chain(ids, logp)):
            self.assertEqual(a.tolist(), b.tolist())

    def test_nan_is_an_error_only_where_used(self):
        ids, logp = cases.marginals(np.random.default_rng(6), 7, 16)
        logp[3, 5] = np.nan
        self.assertEqual(len(best_first(ids, logp, 5)[0]), 5)
        with self.assertRaisesRegex(ValueError, "depth 4, rank 5"):
            best_first(ids, logp, 6)

    def test_a_sibling_never_shortens_the_walk(self):
        rng = np.random.default_rng(7)
        for _ in range(50):
            parents = [int(rng.integers(0, i + 1)) for i in range(12)]
            tokens, picks = rng.integers(0, 3, 12), rng.integers(0, 3, 13)
            seen = [len(accept(tokens[:n], parents[:n], picks)) for n in range(13)]
            self.assertEqual(seen, sorted(seen))

    def test_rows_see_their_ancestors(self):
        see = visibility([0, 0, 2])
        self.assertEqual(see.astype(int).tolist(), [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]])
        self.assertEqual(cases.ancestor_bits([0, 0, 2]).tolist(), [[1], [3], [5], [13]])


class Decoding(unittest.TestCase):
    def test_trees_and_chains_give_the_plain_output(self):
        for kind in tiny.KINDS:
            bundle = Bundle.read(ROOT / f"k26-tiny-{kind}.kdtr")
            model = Model(bundle.config, bundle.settings, bundle.weights)
            for golden in bundle.goldens[:2]:
                for budget in (None, 0, 5, 33):
                    out, lengths = decode(model, RecordedDrafter(golden), golden.prompt, len(golden.tokens), budget)
                    self.assertEqual(out.tolist(), golden.tokens.tolist(), (kind, budget))
                    self.assertGreaterEqual(sum(lengths) + 1, len(golden.tokens))

    def test_blocks_give_the_plain_output(self):
        bundle = Bundle.read(ROOT / "k26-tiny-mixed.kdtr")
        model, golden = Model(bundle.config, bundle.settings, bundle.weights), bundle.goldens[3]
        for step in (None, 5):
            best, gap = replay(model, golden.prompt, golden.tokens, step)
            self.assertEqual(best.tolist(), golden.tokens.tolist())
            self.assertLess(np.abs(gap - golden.gap).max(), bundle.settings["gap_tolerance"])

    def test_goldens_are_worth_testing(self):
        for kind in tiny.KINDS:
            bundle = Bundle.read(ROOT / f"k26-tiny-{kind}.kdtr")
            for golden in bundle.goldens:
                self.assertGreaterEqual(len(set(golden.tokens)), tiny.MIN_DIFFERENT)
                self.assertGreater(golden.gap.min(), bundle.settings["gap_tolerance"])
                mass = np.exp(golden.draft_logp.astype(np.float64)).sum(-1)
                self.assertTrue((mass <= 1).all() and (np.diff(golden.draft_logp, axis=-1) <= 0).all())

    def test_sliding_layers_see_their_window(self):
        """The lengths of the rounds, with which tests/model/checkpoints.rs compares the engine's."""
        bundle = Bundle.read(ROOT / "k26-small-int4.kdtr")
        target, golden = Model(bundle.config, bundle.settings, bundle.weights), bundle.goldens[0]
        found = {}
        for window in (24, 10_000):
            config = bundle.drafter_config | {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
            drafter = Drafter(config, bundle.weights, target)
            tokens, found[window] = decode(target, drafter, golden.prompt, 24, 16)
            self.assertEqual(tokens.tolist(), golden.tokens[:24].tolist())
        self.assertEqual(found[24][:12], [2, 1, 2, 3, 1, 1, 1, 2, 1, 2, 1, 1])
        # A window of everything is causal, and no window is not: rows of the block see each other both ways.
        self.assertNotEqual(found[10_000], decode(target, Drafter(bundle.drafter_config, bundle.weights, target),
                                                  golden.prompt, 24, 16)[1])

    def test_the_trained_drafter(self):
        bundle = Bundle.read(ROOT / "k26-small-int4.kdtr")
        target, golden = Model(bundle.config, bundle.settings, bundle.weights), bundle.goldens[4]
        drafter = Drafter(bundle.drafter_config, bundle.weights, target)
        rounds = {}
        for budget in (None, 32):
            out, rounds[budget] = decode(target, drafter, golden.prompt, 48, budget)
            self.assertEqual(out.tolist(), golden.tokens[:48].tolist())
            self.assertGreater(48 / len(rounds[budget]), 2)
        self.assertLessEqual(len(rounds[32]), len(rounds[None]))


if __name__ == "__main__":
    unittest.main()
