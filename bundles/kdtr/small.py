"""k26-small-int4.kdtr: the trained small model, its DFlash drafter and tokenizer, packed from the published layout.

Experts keep the nibbles and scales of the checkpoint bit for bit. The goldens' tokens come with the models; this module
decodes them again with the numpy reference and fails unless every token is the same.
"""
import base64
import json
import math
from pathlib import Path

import numpy as np

from .dflash import PREFIX, Drafter
from .format import Bundle, Golden, Weight, load_tensors
from .numerics import bf16_bits
from .reference import Arithmetic, Model, greedy, replay
from .tree import decode

TARGET, DRAFTER = "k26-small", "k26-small-dflash"
LORA_NORM_EPS = 1e-5  # trained so
STOP_TOKENS = ("[EOS]", "<|im_end|>")
BUDGETS = (None, 4, 8, 16, 32, 64)
DRAFT_WIDTH = 16
FIRST_DRAFT_MEDIAN, FIRST_DRAFT_LARGEST = 0.06, 0.7  # natural logarithms; twice what another order of sums does
ORDERS = [(Arithmetic(np.float32), None), (Arithmetic(np.float32, reverse=True), 7), (Arithmetic(np.float64), None),
          (Arithmetic(np.float64), 1)]


def read_folder(folder):
    """All shards of a checkpoint folder -> {name: Weight}; packed experts appear under NAME.weight."""
    raw = {}
    for shard in sorted(Path(folder).glob("*.safetensors")):
        raw |= load_tensors(shard)[0]
    if not raw:
        raise SystemExit(f"{folder}: no .safetensors file")
    out = {}
    for name, t in raw.items():
        if name.endswith(".weight_packed"):
            weight = name.removesuffix("_packed")
            n, k = (int(v) for v in raw[weight + "_shape"])
            if t.shape != (n, k // 8):
                raise SystemExit(f"{folder}: {name} is {t.shape}, its weight_shape says {n} x {k}")
            out[weight] = Weight("w4a16", t.view(np.uint8).reshape(n, k // 2), raw[weight + "_scale"])
        elif not name.endswith((".weight_scale", ".weight_shape")):
            out[name] = Weight("f32" if t.dtype == np.float32 else "bf16", t)
    return out


def read_tokenizer(folder):
    """tokenizer_config.json, the pattern of tokenizer.json and the raw tiktoken.model."""
    described = json.loads((folder / "tokenizer_config.json").read_text())
    split = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"][0]
    special = {t["content"]: int(i) for i, t in described["added_tokens_decoder"].items()}
    tokenizer = {"kind": "tiktoken", "pattern": split["pattern"]["Regex"], "special_tokens": special}
    return tokenizer, (folder / "tiktoken.model").read_bytes()


def decode_text(vocabulary, ids):
    """Ordinary token ids -> text."""
    table = [base64.b64decode(line.split()[0]) for line in vocabulary.splitlines()]
    return b"".join(table[i] for i in ids).decode("utf-8", "replace")


def record_drafts(target, drafter, golden):
    """What the drafter proposes when the bonus token is golden token p, for every p."""
    start, ids = len(golden.prompt), np.concatenate((golden.prompt, golden.tokens))
    features = target.causal(ids, target.cache(len(ids)), 0, drafter.taps)[1]
    drafter.ingest(features, 0)
    rounds = [drafter.propose(int(token), start + p) for p, token in enumerate(golden.tokens)]
    golden.draft_ids = np.stack([r[0][:, :DRAFT_WIDTH] for r in rounds])
    golden.draft_logp = np.stack([r[1][:, :DRAFT_WIDTH] for r in rounds])


def check_first_draft(golden, want, i):
    """The recorded first round against the one that the PyTorch reference stored."""
    theirs = {(d, t): p for d, row in enumerate(want["ids"]) for t, p in zip(row, want["logp"][d])}
    rows = zip(golden.draft_ids[0].tolist(), golden.draft_logp[0].tolist())
    ours = {(d, t): p for d, (ids, logp) in enumerate(rows) for t, p in zip(ids, logp)}
    common = theirs.keys() & ours.keys()
    apart = np.array([abs(theirs[k] - ours[k]) for k in common])
    if len(common) < 0.9 * len(theirs) or np.median(apart) > FIRST_DRAFT_MEDIAN or apart.max() > FIRST_DRAFT_LARGEST:
        raise SystemExit(f"golden {i}: {len(common)} of {len(theirs)} first drafts agree, log-probabilities to "
                         f"{np.median(apart):.4f} (median), {apart.max():.4f} (largest)")
    return apart.max()


def acceptance(target, drafter, goldens, log):
    """{"chain" or budget: committed tokens per round over all goldens, the round's known token included}."""
    out = {}
    for budget in BUDGETS:
        lengths = []
        for i, golden in enumerate(goldens):
            tokens, each = decode(target, drafter, golden.prompt, len(golden.tokens), budget)
            if (tokens != golden.tokens).any():
                at = int((tokens != golden.tokens).argmax())
                raise SystemExit(f"golden {i}: budget {budget} changes token {at} (gap {golden.gap[at]})")
            lengths += each
        name = "chain" if budget is None else str(budget)
        out[name] = round(sum(lengths) / len(lengths), 4)
        log(f"  {name}: {out[name]} tokens a round")
    return out


def read_models(folder):
    """Folder of models -> config, drafter config, weights of both under the bundle's names."""
    config, drafter_config = (json.loads((Path(folder) / n / "config.json").read_text()) for n in (TARGET, DRAFTER))
    drafter = {PREFIX + n: w for n, w in read_folder(Path(folder) / DRAFTER).items()}
    return config, drafter_config, read_folder(Path(folder) / TARGET) | drafter


def generate(models, log=print):
    """Pack the folders `models`/k26-small and `models`/k26-small-dflash with the goldens of `models`/goldens.json."""
    folder = Path(models)
    config, drafter_config, weights = read_models(folder)
    tokenizer, vocabulary = read_tokenizer(folder / TARGET)
    settings = {"name": "k26-small-int4", "lora_norm_eps": LORA_NORM_EPS,
                "stop_token_ids": [tokenizer["special_tokens"][t] for t in STOP_TOKENS]}
    target = Model(config, settings, weights)
    drafter = Drafter(drafter_config, weights, target)
    others = [(Model(config, settings, weights, a), step) for a, step in ORDERS]
    wanted, goldens, texts, spreads = json.loads((folder / "goldens.json").read_text())["goldens"], [], [], []
    for i, want in enumerate(wanted):
        prompt, tokens = np.array(want["prompt"], np.int32), np.array(want["tokens"], np.int32)
        golden = Golden(prompt, *greedy(target, prompt, len(tokens)))
        if (golden.tokens != tokens).any():
            raise SystemExit(f"golden {i}: token {(golden.tokens != tokens).argmax()} differs from goldens.json")
        record_drafts(target, drafter, golden)
        worst = check_first_draft(golden, want["first_round_draft"], i)
        spread = golden_spread(others, golden, i)
        goldens.append(golden)
        spreads.append(spread)
        texts.append({"prompt": decode_text(vocabulary, prompt), "text": decode_text(vocabulary, tokens)})
        if (texts[-1]["prompt"], texts[-1]["text"]) != (want["prompt_text"], want["text"]):
            raise SystemExit(f"golden {i}: its ids do not decode to the text of goldens.json")
        log(f"golden {i}: {len(tokens)} tokens agree, smallest gap {golden.gap.min():.3f}, gaps move by {spread:.3f}, "
            f"first draft's log-probabilities by {worst:.4f}")
    limits = [math.ceil(30 * spread) / 20 for spread in spreads]  # half as much again, up to the next twentieth
    if min(limits) >= min(golden.gap.min() for golden in goldens):
        raise SystemExit(f"a golden has a gap below the tolerance {min(limits)}: it may come out otherwise elsewhere")
    settings |= {"gap_tolerance": min(limits), "gap_tolerances": limits, "gap_spread": [round(s, 4) for s in spreads],
                 "expected_acceptance": acceptance(target, drafter, goldens, log)}
    return Bundle(config, settings, weights, goldens, drafter_config, tokenizer, vocabulary, texts)


def dflash_cases(bundle):
    """The drafter's first round of golden 0, stage by stage, from the target's features on."""
    golden = bundle.goldens[0]
    target = Model(bundle.config, bundle.settings, bundle.weights)
    drafter = Drafter(bundle.drafter_config, bundle.weights, target)
    committed = len(golden.prompt)
    features = target.causal(golden.prompt, target.cache(committed), 0, drafter.taps)[1]
    return dflash_stages(drafter, features, int(golden.tokens[0]), committed)


def dflash_stages(drafter, features, bonus, committed):
    """Features f32 [S, taps * D] -> every array of dflash-cases.safetensors."""
    drafter.ingest(features, 0)
    ids, logp = drafter.propose(bonus, committed)
    out = {"bonus": np.array([bonus], np.int32), "committed": np.array([committed], np.int32), "features": features,
           "context": bf16_bits(drafter.fuse(features)), "logits": drafter.logits(bonus, committed),
           "ids": ids[:, :DRAFT_WIDTH].copy(), "logp": logp[:, :DRAFT_WIDTH].copy()}
    for i, (keys, values) in enumerate(drafter.cache):
        out |= {f"keys.{i}": bf16_bits(keys), f"values.{i}": bf16_bits(values)}
    return {f"dflash.{n}": v for n, v in out.items()}


def golden_spread(others, golden, i):
    """Largest change of a gap under other orders of summation; every token must stay."""
    worst = 0.0
    for model, step in others:
        best, gap = replay(model, golden.prompt, golden.tokens, step)
        if (best != golden.tokens).any():
            raise SystemExit(f"golden {i}: token {(best != golden.tokens).argmax()} depends on the order of sums")
        worst = max(worst, float(np.abs(gap - golden.gap).max()))
    return worst
