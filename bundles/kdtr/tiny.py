"""The four tiny bundles: one random model of Kimi K2.6's shape in f32, bf16, INT4 and a mix of formats.

Head geometry is the large model's (512 latent, 64 rotated, 128 + 128 a head); the rest is small and the vocabulary odd.
All four derive from the same float32 weights.
"""
import math
import re

import numpy as np

from . import drafts
from .format import Bundle, Golden, Weight
from .reference import Model, greedy, replay
from .robust import Variants

SEED = 20_260
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "torch_dtype": "bfloat16",
    "vocab_size": 1003, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "n_shared_experts": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 2.827, "q_lora_rank": 64,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "use_cache": True,
    "max_position_embeddings": 262144, "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "num_nextn_predict_layers": 0, "bos_token_id": 1000, "eos_token_id": 1001, "pad_token_id": 1002,
}
NORMS = ("input_layernorm", "post_attention_layernorm", "q_a_layernorm", "kv_a_layernorm", "model.norm")
ATTENTION_GAIN, DENSE_GAIN, EXPERT_GAIN, LOGIT_SIZE, SUCCESSOR_GAIN = 0.8, 0.5, 0.12, 6.0, 2.4

PROMPT_LENGTHS, NEW_TOKENS, MIN_DIFFERENT = (16, 24, 33, 70), 64, 32
# A prompt is kept if none of its gaps is smaller than MIN_GAP, they move by no more than SPREAD_LIMIT between orders of
# sums, and forced expert choices change no token (`robust`). A bundle's tolerance is twice what was measured, which
# leaves room for orders not tried here.
SPREAD_LIMIT, MIN_GAP, MAX_CANDIDATES = 0.35, 0.8, 5_000
LATE = 40  # the bf16 bundle stops at a token that its first golden reaches no earlier than here
KINDS = ("f32", "bf16", "int4", "mixed")
# Weights in the mixed bundle, first match wins: (pattern, format, scale format).
MIX = [
    (r"layers\.1\.self_attn\..*_proj", "w4a16", "bf16"),
    (r"layers\.2\.self_attn\.(q_a|o)_proj", "f32", None),
    (r"layers\.0\.self_attn\.kv_a_proj", "f32", None),
    (r"layers\.0\.mlp\.(gate|up)_proj", "w4a16", "f32"),
    (r"layers\.1\.mlp\.experts\.3\.gate_proj", "f32", None),
    (r"layers\.1\.mlp\.experts\.3\.up_proj", "w4a16", "bf16"),
    (r"layers\.1\.mlp\.experts\.3\.down_proj", "bf16", None),
    (r"layers\.1\.mlp\.experts\.[0-4]\.", "w4a16", "bf16"),
    (r"layers\.1\.mlp\.experts\.7\.", "f32", None),
    (r"layers\.2\.mlp\.experts\.[02468]\.", "w4a16", "f32"),
    (r"layers\.2\.mlp\.shared_experts\.(gate|up)_proj", "w4a16", "f32"),
    (r"layers\.2\.mlp\.gate\.weight", "f32", None),
    (r"layers\.2\..*layernorm", "f32", None),
    (r"lm_head", "w4a16", "f32"),
]


def float_weights(config=CONFIG, seed=SEED):
    """Names -> float32 weights, by the checkpoint's names.

    Plain random matrices give near-ties at every few steps, which no two orders of summation decide alike. So a row of
    the head also points at the embedding of the token before it in one long cycle: the current token votes for its
    successor, attention and experts overrule it at about every tenth step, and gaps are wide.
    """
    c, rng, out = config, np.random.default_rng(seed), {}
    d, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    query = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]

    def normal(n, k, gain):
        """[n, k]; an input of size one gives an output of size `gain`."""
        return (rng.standard_normal((n, k)) * (gain / np.sqrt(k))).astype(np.float32)

    def matrix(name, n, k, gain=1.0):
        out[name + ".weight"] = normal(n, k, gain)

    def norm(name, n):
        out[name + ".weight"] = (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    def ffn(pre, width, gain):
        matrix(pre + "gate_proj", width, d, 1.5)
        matrix(pre + "up_proj", width, d, 1.5)
        matrix(pre + "down_proj", d, width, gain)

    points = rng.standard_normal((c["vocab_size"], d))
    points *= 1 / np.sqrt((points * points).sum(-1, keepdims=True))  # unit length
    out["model.embed_tokens.weight"] = (points * np.sqrt(d)).astype(np.float32)
    for i in range(c["num_hidden_layers"]):
        pre = f"model.layers.{i}."
        norm(pre + "input_layernorm", d)
        norm(pre + "post_attention_layernorm", d)
        att = pre + "self_attn."
        matrix(att + "q_a_proj", c["q_lora_rank"], d)
        norm(att + "q_a_layernorm", c["q_lora_rank"])
        matrix(att + "q_b_proj", heads * query, c["q_lora_rank"])
        matrix(att + "kv_a_proj_with_mqa", latent + c["qk_rope_head_dim"], d)
        norm(att + "kv_a_layernorm", latent)
        matrix(att + "kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent)
        matrix(att + "o_proj", d, heads * c["v_head_dim"], ATTENTION_GAIN)
        if i < c["first_k_dense_replace"]:
            ffn(pre + "mlp.", c["intermediate_size"], DENSE_GAIN)
            continue
        matrix(pre + "mlp.gate", c["n_routed_experts"], d)
        bias = 0.05 * rng.standard_normal(c["n_routed_experts"])
        out[pre + "mlp.gate.e_score_correction_bias"] = bias.astype(np.float32)
        for e in range(c["n_routed_experts"]):
            ffn(f"{pre}mlp.experts.{e}.", c["moe_intermediate_size"], EXPERT_GAIN)
        ffn(pre + "mlp.shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"], DENSE_GAIN)
    norm("model.norm", d)
    cycle = rng.permutation(c["vocab_size"])
    head = normal(c["vocab_size"], d, LOGIT_SIZE)
    head[np.roll(cycle, -1)] += (LOGIT_SIZE * SUCCESSOR_GAIN * points[cycle]).astype(np.float32)
    out["lm_head.weight"] = head
    return out


def formats(kind, name):
    """(format, scale format) of a weight in bundle k26-tiny-`kind`."""
    if name.endswith("e_score_correction_bias"):
        return "f32", None
    if kind == "mixed":
        return next((found[1:] for found in MIX if re.search(found[0], name)), ("bf16", None))
    if kind == "int4":
        return ("w4a16", "bf16") if ".experts." in name else ("bf16", None)
    return kind, None


def weights(kind):
    return {n: Weight.encode(w, *formats(kind, n)) for n, w in float_weights().items()}


def prompt_of(seed, length):
    """Random ordinary tokens; id 0 is one of them."""
    return np.random.default_rng(seed).integers(0, CONFIG["bos_token_id"], length).astype(np.int32)


def find_golden(models, settings, length, first_seed, unlike=None):
    """The first prompt whose greedy continuation is no loop, has wide gaps, and is robust.

    `unlike` is a model that must not give the same continuation. Cheap demands come first.
    """
    plain, variants = models
    for seed in range(first_seed, first_seed + MAX_CANDIDATES):
        prompt = prompt_of(seed, length)
        found = greedy(plain, prompt, NEW_TOKENS, stop_below=MIN_GAP)
        if found is None or len(set(found[0])) < MIN_DIFFERENT or set(found[0]) & set(settings["stop_token_ids"]):
            continue
        if unlike and (replay(unlike, prompt, found[0])[0] == found[0]).all():
            continue
        if not variants.noise_gap(prompt, found[0], steps=(None,)):
            continue
        spread = variants.spread(prompt, *found, SPREAD_LIMIT)
        noise_gap = variants.noise_gap(prompt, found[0]) if np.isfinite(spread) else 0
        if noise_gap:
            return seed, Golden(prompt, *found), spread, noise_gap
    raise SystemExit(f"{settings['name']}: none of {MAX_CANDIDATES} prompts of {length} tokens gives a golden")


def tolerance(spread):
    """Twice the measured spread, up to the next twentieth."""
    return math.ceil(40 * spread) / 20


def late_stop(goldens):
    """A token that golden 0 first produces late and that no other golden holds."""
    tokens = goldens[0].tokens.tolist()
    elsewhere = {int(t) for g in goldens[1:] for t in g.tokens}
    late = [t for i, t in enumerate(tokens) if i >= LATE and tokens.index(t) == i and t not in elsewhere]
    if not late:
        raise SystemExit("no token of golden 0 occurs late and nowhere else")
    return late[0]


def generate(kind, log=print):
    """Build bundle k26-tiny-`kind`."""
    settings = {"name": f"k26-tiny-{kind}", "lora_norm_eps": 1e-6, "stop_token_ids": [CONFIG["eos_token_id"]]}
    stored = weights(kind)
    models = Model(CONFIG, settings, stored), Variants(CONFIG, settings, stored)
    float_model = Model(CONFIG, settings, weights("f32")) if kind == "int4" else None
    goldens, measured = [], []
    for i, length in enumerate(PROMPT_LENGTHS):
        seed, golden, *sizes = find_golden(models, settings, length, 100_000 * i, None if i else float_model)
        golden.draft_ids, golden.draft_logp = drafts.record(golden.tokens, CONFIG["vocab_size"], i)
        goldens.append(golden)
        measured.append((seed, *sizes))
        log(f"k26-tiny-{kind} golden {i}: prompt {length} tokens (seed {seed}), {len(set(golden.tokens))} different, "
            f"smallest gap {golden.gap.min():.3f}, gaps move by {sizes[0]:.3f}, {sizes[1]:.3f} under routing noise")
    seeds, spreads, noise_gaps = zip(*measured)
    if kind == "bf16":
        settings["stop_token_ids"].append(late_stop(goldens))
    settings |= {"gap_tolerance": tolerance(max(spreads)), "gap_spread": [round(s, 4) for s in spreads],
                 "noise_gap": [round(g, 4) for g in noise_gaps], "prompt_seeds": seeds}
    if kind == "int4":
        first_differences(goldens, float_model, log)
    drafts.check_rounds(models[0], goldens, log)
    return Bundle(CONFIG, settings, stored, goldens)


def first_differences(goldens, float_model, log):
    """Print where the INT4 goldens leave the float32 model's output; one must, or INT4 would go untested."""
    found = [np.nonzero(greedy(float_model, g.prompt, NEW_TOKENS)[0] != g.tokens)[0] for g in goldens]
    for i, differ in enumerate(found):
        log(f"golden {i}: int4 first differs from f32 at " + (f"token {differ[0]}" if len(differ) else "no token"))
    if not any(len(differ) for differ in found):
        raise SystemExit("all goldens of k26-tiny-int4 are what the float32 model writes")
