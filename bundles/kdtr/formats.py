"""Format cases: the logits of k26-tiny-bf16 with one linear in another format, for each linear and format in turn.

README.md in bundles/ lists names and shapes. f32 values are those of k26-tiny-f32 and are not stored again; codes and
scales are. A case is one prompt in one block; the logits are those of its last row.
"""
import numpy as np

from . import tiny
from .format import Weight
from .reference import Arithmetic, Mixture, Model, best_and_gap

# Name of a format -> (format, scale format); the base has all linears in bf16.
FORMATS = {"f32": ("f32", None), "w4a16-bf16": ("w4a16", "bf16"), "w4a16-f32": ("w4a16", "f32")}
EXPERT = 6  # the first choice of the prompt's last row
PARTS = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LINEARS = [f"model.layers.1.self_attn.{n}" for n in ATTENTION]
LINEARS += [f"model.layers.0.mlp.{n}" for n in PARTS] + ["model.layers.1.mlp.gate"]
LINEARS += [f"model.layers.1.mlp.{where}.{n}" for where in (f"experts.{EXPERT}", "shared_experts") for n in PARTS]
LINEARS += ["lm_head"]
SETTINGS = {"lora_norm_eps": 1e-6}
PROMPT_SEED, PROMPT_LENGTH = 7_000_321, 6
# No expert choice of any case is closer than MIN_MARGIN, and no last row's best logit; another order of sums moves
# logits by at most half of TOLERANCE, in the L2 norm and relative to the logits'.
MIN_MARGIN, MIN_GAP, TOLERANCE = 0.02, 0.5, 0.0075
ORDERS = (Arithmetic(np.float32), Arithmetic(np.float32, reverse=True), Arithmetic(np.float64))


class WatchedMixture(Mixture):
    """Keeps what it chose, and the smallest margin between the last expert chosen and the first one left out."""

    ids, margin = None, np.inf

    def choose(self, keys):
        best = -np.sort(-keys, -1)
        self.margin = float((best[:, self.top - 1] - best[:, self.top]).min())
        self.ids = super().choose(keys)
        return self.ids


class WatchedModel(Model):
    mixture = WatchedMixture


def apart(found, want):
    """L2 norm of the difference, relative to that of `want`."""
    found, want = found.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


def logits(name, weights, prompt):
    """Last row's logits f32 [V] after checks that no order of sums could change them by much."""
    found = []
    for arith in ORDERS:
        model = WatchedModel(tiny.CONFIG, SETTINGS, weights, arith)
        found.append(model.causal(prompt, model.cache(len(prompt)), 0)[0][-1])
        mixtures = [mlp for *_, mlp in model.layers if isinstance(mlp, Mixture)]
        margin, gap = min(m.margin for m in mixtures), best_and_gap(found[-1][None])[1][0]
        if not (margin > MIN_MARGIN and gap > MIN_GAP and mixtures[0].ids[-1, 0] == EXPERT):
            experts = mixtures[0].ids[-1].tolist()
            raise SystemExit(f"{name}: router margin {margin:.4f}, gap {gap:.3f}, last row's experts {experts}")
    moved = max(apart(other, found[0]) for other in found[1:])
    if not 2 * moved <= TOLERANCE:
        raise SystemExit(f"{name}: another order of sums moves logits by {moved:.5f}, tolerance {TOLERANCE}")
    return found[0]


def generate():
    """All arrays of format-cases.safetensors."""
    values, base = tiny.float_weights(), tiny.weights("bf16")
    prompt = tiny.prompt_of(PROMPT_SEED, PROMPT_LENGTH)
    out = {"prompt": prompt, "tolerance": np.array([TOLERANCE], np.float32), "logits": logits("base", base, prompt)}
    for linear in LINEARS:
        name = linear + ".weight"
        for label, how in FORMATS.items():
            weight, case = Weight.encode(values[name], *how), f"{linear}.{label}"
            out[case + ".logits"] = logits(case, base | {name: weight}, prompt)
            if weight.format == "w4a16":
                out |= {case + ".qw": weight.data, case + ".sc": weight.scale}
    return out
