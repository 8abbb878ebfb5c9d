#!/usr/bin/env python3
"""Write the first layers of Kimi K2.6 at full size, with random weights, as a checkpoint folder in the published form.

    python3 bundles/full_size.py FOLDER [--layers 2]

Nothing sensible comes out of such a model. It is there to load and run real shapes without the real checkpoint:
`kdtree decode FOLDER --layers 0..2 --prompt-ids 1,2,3`. Two layers take 15.5 GB.
"""
import argparse
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

HIDDEN, VOCABULARY, EXPERTS, LAYERS = 7168, 163840, 384, 61
PREFIX = "language_model.model."
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}
TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.827, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 262144, "rope_theta": 50000.0, "rope_scaling": YARN,
    "num_nextn_predict_layers": 0, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                        "dynamic": False, "actorder": None}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    },
}
SIZES = {"BF16": 2, "I32": 4, "F32": 4}


def layer(index):
    """Tensors of one layer: (name, type, shape)."""
    pre = f"{PREFIX}layers.{index}."
    out = [(pre + n + ".weight", "BF16", s) for n, s in (
        ("input_layernorm", (HIDDEN,)), ("post_attention_layernorm", (HIDDEN,)),
        ("self_attn.q_a_proj", (1536, HIDDEN)), ("self_attn.q_a_layernorm", (1536,)),
        ("self_attn.q_b_proj", (12288, 1536)), ("self_attn.kv_a_proj_with_mqa", (576, HIDDEN)),
        ("self_attn.kv_a_layernorm", (512,)), ("self_attn.kv_b_proj", (16384, 512)),
        ("self_attn.o_proj", (HIDDEN, 8192)))]

    def ffn(name, width):
        return [(f"{pre}{name}.{n}_proj.weight", "BF16", s) for n, s in (
            ("gate", (width, HIDDEN)), ("up", (width, HIDDEN)), ("down", (HIDDEN, width)))]

    if index < TEXT["first_k_dense_replace"]:
        return out + ffn("mlp", 18432)
    out += [(pre + "mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)),
            (pre + "mlp.gate.e_score_correction_bias", "F32", (EXPERTS,))] + ffn("mlp.shared_experts", 2048)
    for e in range(EXPERTS):
        for n, (rows, columns) in (("gate", (2048, HIDDEN)), ("up", (2048, HIDDEN)), ("down", (HIDDEN, 2048))):
            name = f"{pre}mlp.experts.{e}.{n}_proj.weight_"
            out += [(name + "packed", "I32", (rows, columns // 8)), (name + "scale", "BF16", (rows, columns // 32)),
                    (name + "shape", "I32", (rows, columns))]
    return out


def ends():
    return [(PREFIX + "embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN)), (PREFIX + "norm.weight", "BF16", (HIDDEN,)),
            ("language_model.lm_head.weight", "BF16", (VOCABULARY, HIDDEN))]


def stored(name, shape):
    """`weight_shape` is a tensor of two numbers, here given by them."""
    return (2,) if name.endswith("_shape") else shape


def pools(rng):
    """Random bytes of each kind of tensor, 32 MB each; what is written are pieces of them from different places.

    Codes are anything, matrices +-2^-7 to +-2^-6, scales 2^-10 to 2^-8, norms 0.5 to 2, the router's bias below 2^-4.
    The embedding is +-0.5 to +-1, about as large as what a layer then adds to it.
    """
    count = 16 << 20

    def bf16(sign, exponents):
        bits = (rng.integers(0, 1 << 16, count, np.uint16) & (0x807F if sign else 0x7F))
        return bits | (rng.choice(np.array(exponents, np.uint16), count) << np.uint16(7))

    bias = ((rng.random(1 << 20, np.float32) - 0.5) / 8).astype("<f4")
    every = {"I32": rng.integers(0, 256, 2 * count, np.uint8), "matrix": bf16(True, [120]),
             "embed": bf16(True, [126]), "scale": bf16(False, [117, 118]), "norm": bf16(False, [126, 127]), "F32": bias}
    return {kind: memoryview(values).cast("B") for kind, values in every.items()}


def content(name, dtype, shape, pool, rng):
    """Pieces of bytes that are a tensor."""
    if name.endswith("_shape"):
        return [np.array(shape, np.int32).tobytes()]
    left = int(np.prod(shape)) * SIZES[dtype]
    kinds = [kind for kind in ("norm", "scale", "embed") if kind in name] + ["matrix" if dtype == "BF16" else dtype]
    source, parts = pool[kinds[0]], []
    while left:
        at = int(rng.integers(0, len(source) // 2)) & ~15
        take = min(left, len(source) - at)
        parts.append(source[at:at + take])
        left -= take
    return parts


def write(path, tensors, pool, seed):
    rng = np.random.default_rng(seed)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in tensors:
        size = int(np.prod(stored(name, shape))) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": stored(name, shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            f.writelines(content(*tensor, pool, rng))
    return at


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2, help="how many of the 61 (default: 2, one of each kind)")
    args = parser.parse_args()
    pool = pools(np.random.default_rng(26))
    args.folder.mkdir(parents=True)
    shards, weight_map = [layer(i) for i in range(args.layers)] + [ends()], {}
    names = [f"model-{i + 1:05}-of-{len(shards):06}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor() as threads:
        written = threads.map(lambda i: write(args.folder / names[i], shards[i], pool, i), range(len(shards)))
        total = sum(written)
    for name, tensors in zip(names, shards):
        weight_map |= {tensor[0]: name for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (args.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": TEXT}
    (args.folder / "config.json").write_text(json.dumps(outer, indent=1))
    print(f"{args.folder}: {args.layers} layers, {total:,} bytes of tensors")


if __name__ == "__main__":
    main()
