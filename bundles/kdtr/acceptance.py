"""acceptance-cases.safetensors: accepted length on the 30 held-out prompts of the trained model's acceptance.json.

The prompts come from `train/prompts.json`. The twin decodes each one plainly and with every tree, with float64 sums and
the softmax of the published run, and must count the same rounds and tokens as acceptance.json in every mode, to the
last one.
"""
import json
from pathlib import Path

import numpy as np

from .dflash import Drafter
from .reference import Arithmetic, Model, greedy
from .tree import decode

PROMPTS = Path(__file__).resolve().parents[1] / "train" / "prompts.json"
PUBLISHED = "acceptance.json"
NEW_TOKENS = 128
CHAIN = 0  # stands for the drafter's best token at each depth, no tree
BUDGETS = (CHAIN, 4, 8, 16, 32, 64)


def mode(budget):
    """The name of a budget in acceptance.json."""
    return "dflash_chain" if budget == CHAIN else f"ddtree_{budget}"


def read_prompts():
    return np.array(json.loads(PROMPTS.read_text())["prompts"], np.int32)


def twin(bundle):
    """Target and drafter with the sums and the softmax of the published run."""
    target = Model(bundle.config, bundle.settings, bundle.weights, Arithmetic(np.float64, published=True))
    return target, Drafter(bundle.drafter_config, bundle.weights, target)


def count(target, drafter, prompt, budget):
    """Rounds of one prompt and the tokens that they commit, the last round not cut at the limit."""
    lengths = decode(target, drafter, prompt, NEW_TOKENS, None if budget == CHAIN else budget)[1]
    return len(lengths), sum(lengths)


def generate(bundle, models, log=print):
    """Prompts, greedy tokens with gaps, and counts by budget and prompt."""
    published = json.loads((Path(models) / PUBLISHED).read_text())
    prompts, (target, drafter) = read_prompts(), twin(bundle)
    if prompts.shape != (published["prompts"], published["prompt_tokens"]) or published["new_tokens"] != NEW_TOKENS:
        raise SystemExit(f"{PUBLISHED} speaks of other prompts than {PROMPTS.name}")
    plain = [greedy(target, prompt, NEW_TOKENS) for prompt in prompts]
    counts = np.empty((len(BUDGETS), len(prompts), 2), np.int32)
    for i, budget in enumerate(BUDGETS):
        counts[i] = [count(target, drafter, prompt, budget) for prompt in prompts]
        rounds, committed = (int(n) for n in counts[i].sum(0))
        want = published["modes"][mode(budget)]
        if (rounds, committed) != (want["rounds"], want["tokens_committed"]):
            raise SystemExit(f"{mode(budget)}: {committed} tokens in {rounds} rounds, {PUBLISHED} says "
                             f"{want['tokens_committed']} in {want['rounds']}")
        log(f"  {mode(budget)}: {committed} tokens in {rounds} rounds, as published")
    return {"prompts": prompts, "tokens": np.stack([p[0] for p in plain]), "gap": np.stack([p[1] for p in plain]),
            "budgets": np.array(BUDGETS, np.int32), "rounds": counts[..., 0].copy(),
            "committed": counts[..., 1].copy()}
