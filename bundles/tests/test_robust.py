"""Forced expert choices: they happen, they are the same however rows are cut into blocks, and goldens survive them."""
import sys
import unittest
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kdtr import tiny  # noqa: E402
from kdtr.format import Bundle  # noqa: E402
from kdtr.reference import Model, replay  # noqa: E402
from kdtr.robust import NOISE_GAP, DisturbedModel, Variants  # noqa: E402


class Routing(unittest.TestCase):
    def setUp(self):
        self.bundle = Bundle.read(ROOT / "k26-tiny-f32.kdtr")
        self.parts = self.bundle.config, self.bundle.settings, self.bundle.weights

    def test_close_experts_swap(self):
        mlp = DisturbedModel(*self.parts, swap=0.006).mixtures[0]
        keys = np.zeros((2, 8), np.float32)
        keys[:, :4] = [[0.5, 0.9, 0.495, 0.1], [0.5, 0.9, 0.493, 0.1]]
        self.assertEqual(mlp.choose(keys).tolist(), [[1, 2], [1, 0]])

    def test_noise_belongs_to_a_position(self):
        mlp = DisturbedModel(*self.parts, size=0.004, seed=1).mixtures[0]
        self.assertEqual(np.unique(np.abs(mlp.noise)).tolist(), [np.float32(0.004)])
        mlp.positions = np.array([3])
        up, down = np.argmax(mlp.noise[3] > 0), np.argmax(mlp.noise[3] < 0)
        keys = np.zeros((1, 8), np.float32)
        keys[0, [up, down]] = 0.5, 0.507
        self.assertEqual(mlp.choose(keys)[0, 0], up)

    def test_disturbed_logits_differ(self):
        golden = self.bundle.goldens[0]
        plain = replay(Model(*self.parts), golden.prompt, golden.tokens)[1]
        for how in ({"swap": 0.05}, {"size": 0.05, "seed": 1}):
            gap = replay(DisturbedModel(*self.parts, **how), golden.prompt, golden.tokens)[1]
            self.assertGreater(np.abs(gap - plain).max(), self.bundle.settings["gap_tolerance"])

    def test_goldens_survive(self):
        for kind in tiny.KINDS:
            bundle = Bundle.read(ROOT / f"k26-tiny-{kind}.kdtr")
            variants = Variants(bundle.config, bundle.settings, bundle.weights)
            for i, golden in enumerate(bundle.goldens):
                found = variants.noise_gap(golden.prompt, golden.tokens, steps=(None,))
                self.assertGreaterEqual(found, NOISE_GAP, (kind, i))


if __name__ == "__main__":
    unittest.main()
