"""Whether another order of f32 sums, which no two programs share, could change a golden of a tiny bundle.

A sum taken otherwise moves a router's key by some thousandths: bf16 roundings fall the other way and add up. Where the
k-th and the (k+1)-th key are closer than that, another expert runs and logits jump, however wide the gap. A few orders
of sums meet such a flip only by chance, so flips are also forced.
"""
import numpy as np

from .reference import Arithmetic, Mixture, Model, replay

# (arithmetic, rows a block; None for all at once)
ORDERS = [(Arithmetic(np.float32), None), (Arithmetic(np.float32, reverse=True), 7), (Arithmetic(np.float64), None),
          (Arithmetic(np.float64), 1)]
# Router keys are moved by -size or +size, or the last expert chosen and the first one left out swap places wherever
# their keys are closer than a limit. Under JITTER and NEAR_SWAP, what another program is likely to do, gaps have to
# stay where they are. Under NOISE and SWAP, more than a program does, tokens have to stay, with gaps above NOISE_GAP.
JITTER, JITTER_SEEDS, NEAR_SWAP = 0.001, (11, 12, 13), 0.002
NOISE, NOISE_SEEDS, SWAP, NOISE_GAP = 0.004, (1, 2, 3, 4), 0.006, 0.25
POSITIONS = 512


class DisturbedMixture(Mixture):
    """Chooses by keys to which `noise` [POSITIONS, E] is added; swaps the last two candidates if closer than `swap`."""

    noise, swap, positions = None, 0.0, None

    def choose(self, keys):
        if self.noise is not None:
            keys = keys + self.noise[self.positions]
        order = np.argsort(-keys, axis=-1, kind="stable")
        last = np.take_along_axis(keys, order[:, self.top - 1:self.top + 1], -1)
        near = last[:, 0] - last[:, 1] < self.swap
        order[near, self.top - 1] = order[near, self.top]
        return order[:, :self.top]


class DisturbedModel(Model):
    """The same at a position whenever and in whatever block it is decoded."""

    mixture = DisturbedMixture

    def __init__(self, config, settings, weights, size=0.0, seed=0, swap=0.0):
        super().__init__(config, settings, weights)
        self.mixtures = [mlp for *_, mlp in self.layers if isinstance(mlp, Mixture)]
        rng = np.random.default_rng(seed)
        for mlp in self.mixtures:
            mlp.swap = swap
            if size:
                mlp.noise = (size * rng.choice([-1, 1], (POSITIONS, len(mlp.experts)))).astype(np.float32)

    def forward(self, ids, positions, *rest):
        for mlp in self.mixtures:
            mlp.positions = positions
        return super().forward(ids, positions, *rest)


class Variants:
    """Models of one bundle that must decode what the plain one does."""

    def __init__(self, config, settings, weights):
        make = lambda **how: DisturbedModel(config, settings, weights, **how)  # noqa: E731
        self.close = [(make(swap=NEAR_SWAP), None)]
        self.close += [(make(size=JITTER, seed=s), None) for s in JITTER_SEEDS]
        self.close += [(Model(config, settings, weights, arith), step) for arith, step in ORDERS]
        self.disturbed = [make(swap=SWAP)] + [make(size=NOISE, seed=s) for s in NOISE_SEEDS]

    def spread(self, prompt, tokens, gaps, limit):
        """Largest change of a gap under orders of sums and small noise; infinite past `limit` or if a token changes."""
        worst = 0.0
        for model, step in self.close:
            best, gap = replay(model, prompt, tokens, step)
            worst = max(worst, float(np.abs(gap - gaps).max()))
            if worst > limit or (best != tokens).any():
                return np.inf
        return worst

    def noise_gap(self, prompt, tokens, steps=(None, 1)):
        """Smallest gap with disturbed routers, in one block and by single tokens; 0 once below NOISE_GAP."""
        smallest = np.inf
        for step in steps:
            for model in self.disturbed:
                best, gap = replay(model, prompt, tokens, step)
                smallest = min(smallest, float(gap.min()))
                if smallest < NOISE_GAP or (best != tokens).any():
                    return 0.0
        return smallest
