"""routing-cases.safetensors: the experts that the trained model's routers choose for consecutive tokens of real text.

For `kdtree bench kernel experts --routing recorded`: how uneven the experts of a batch of neighbouring tokens are.
"""
import numpy as np

from .acceptance import read_prompts
from .reference import Arithmetic, Mixture, Model


class RecordingMixture(Mixture):
    """Keeps what it has chosen last."""

    def choose(self, keys):
        self.chosen = super().choose(keys)
        return self.chosen


class RecordingModel(Model):
    mixture = RecordingMixture


def generate(bundle):
    """The 30 held-out prompts through the model -> ids U8 [layers, prompts, tokens, experts a token]."""
    model = RecordingModel(bundle.config, bundle.settings, bundle.weights, Arithmetic(np.float64))
    mixtures = [mlp for *_, mlp in model.layers if isinstance(mlp, RecordingMixture)]
    ids = []
    for prompt in read_prompts():
        model.causal(prompt, model.cache(len(prompt)), 0)
        ids.append([mlp.chosen for mlp in mixtures])
    return {"ids": np.array(ids).swapaxes(0, 1).astype(np.uint8),
            "experts": np.array([bundle.config["n_routed_experts"]], np.int32)}
