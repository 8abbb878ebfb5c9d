"""The DFlash block drafter in numpy, with the engine's rounding: a few Qwen3-style layers over the target's features.

The outputs of some target layers, fused by `fc` and `hidden_norm`, give keys and values of every committed position; a
block of the bonus token and mask tokens reads them, and itself, in both directions. Slot k of the block predicts the
token at its own position. In a sliding layer a block row sees `sliding_window` positions only, the last of them its
own. Embedding and head are the target's. Keys are normed per head and rotated by halves; keys,
values, queries and softmax weights are bf16.
"""
import math

import numpy as np

from .reference import FeedForward, Linear, attend, rms_norm
from .rotary import rope, yarn_frequencies
from .numerics import round_bf16

PREFIX = "drafter."


def rotate_halves(x, cos, sin):
    """Rotate the pairs (i, i + dim / 2) of the last axis."""
    a, b = np.split(x, 2, -1)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class DraftLayer:
    """One layer; `heads` query heads share `kv_heads` keys and values."""

    def __init__(self, config, get, linear, arith, window=None):
        self.window = window
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size, self.eps, self.arith = config["head_dim"], config["rms_norm_eps"], arith
        self.q, self.k, self.v, self.o = (linear(f"self_attn.{n}_proj.weight") for n in "qkvo")
        self.q_norm, self.k_norm = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        self.norm_in, self.norm_mlp = get("input_layernorm.weight"), get("post_attention_layernorm.weight")
        self.mlp = FeedForward(lambda n: linear(f"mlp.{n}"))

    def split(self, x, heads):
        return x.reshape(len(x), heads, self.size).transpose(1, 0, 2)

    def keys_values(self, x, cos, sin):
        """x [R, D] -> keys (normed, rotated) and values [kv_heads, R, size], rounded as cached."""
        k = rms_norm(self.split(self.k(x), self.kv_heads), self.k_norm, self.eps)
        return round_bf16(rotate_halves(k, cos, sin)), round_bf16(self.split(self.v(x), self.kv_heads))

    def mask(self, rows, slots):
        """0 where a block row sees a slot, minus infinity elsewhere; the block's rows are the last slots."""
        if self.window is None:
            return 0
        own, slot = np.arange(slots - rows, slots)[:, None], np.arange(slots)
        return np.where((slot <= own) & (slot > own - self.window), 0, -np.inf).astype(self.arith.dtype)

    def __call__(self, h, keys, values, cos, sin):
        """h [block, D]; keys, values [kv_heads, S, size] of the context."""
        a = rms_norm(h, self.norm_in, self.eps)
        q = rms_norm(self.split(self.q(a), self.heads), self.q_norm, self.eps)
        q = round_bf16(rotate_halves(q, cos, sin))
        k, v = self.keys_values(a, cos, sin)
        share = self.heads // self.kv_heads
        k = np.repeat(np.concatenate((keys, k), 1), share, 0)
        v = np.repeat(np.concatenate((values, v), 1), share, 0)
        o = attend(self.arith, q, k, v, 1 / math.sqrt(self.size), self.mask(len(h), k.shape[1]))
        h = h + self.o(o.transpose(1, 0, 2).reshape(len(h), -1))
        return h + self.mlp(rms_norm(h, self.norm_mlp, self.eps))


class Drafter:
    """`config` is the drafter's published config.json; `weights` are the bundle's, names with the prefix `drafter.`."""

    def __init__(self, config, weights, target, width=64):
        self.config, self.target, self.width, arith = config, target, width, target.arith

        def get(name):
            return weights[PREFIX + name].dense().astype(arith.dtype, copy=False)

        def linear(name):
            return Linear(weights[PREFIX + name], arith)

        if not set(config["layer_types"]) <= {"full_attention", "sliding_attention"}:
            raise ValueError(f"drafter layer types {config['layer_types']}: full and sliding attention are known here")
        self.block, self.eps = config["block_size"], config["rms_norm_eps"]
        self.taps, self.mask = config["dflash_config"]["target_layer_ids"], config["dflash_config"]["mask_token_id"]
        self.fc, self.hidden_norm, self.norm = linear("fc.weight"), get("hidden_norm.weight"), get("norm.weight")
        self.frequencies = yarn_frequencies(config["head_dim"], config["rope_theta"], config["rope_scaling"])
        self.layers = [DraftLayer(config, lambda n, i=i: get(f"layers.{i}.{n}"),
                                  lambda n, i=i: linear(f"layers.{i}.{n}"), arith,
                                  config["sliding_window"] if config["layer_types"][i] == "sliding_attention" else None)
                       for i in range(config["num_hidden_layers"])]
        empty = np.zeros((config["num_key_value_heads"], 0, config["head_dim"]), arith.dtype)
        self.cache = [(empty, empty) for _ in self.layers]

    def fuse(self, features):
        """Features [R, taps * D] of the target -> context [R, D]."""
        return round_bf16(rms_norm(self.fc(features), self.hidden_norm, self.eps))

    def ingest(self, features, start):
        """Keys and values of the committed positions start..start+R; what lay behind `start` is forgotten."""
        context = self.fuse(features)
        cos, sin = rope(self.frequencies, np.arange(start, start + len(features)), context.dtype)
        for i, layer in enumerate(self.layers):
            new = layer.keys_values(context, cos, sin)
            self.cache[i] = tuple(np.concatenate((old[:, :start], add), 1) for old, add in zip(self.cache[i], new))

    def logits(self, bonus, committed):
        """[block - 1, V] for the positions after the bonus token, which sits at position `committed`."""
        h = self.target.embedding[np.array([bonus] + [self.mask] * (self.block - 1))]
        cos, sin = rope(self.frequencies, np.arange(committed, committed + self.block), h.dtype)
        for layer, (keys, values) in zip(self.layers, self.cache):
            h = layer(h, keys[:, :committed], values[:, :committed], cos, sin)
        return self.target.head(rms_norm(h[1:], self.norm, self.eps))

    def propose(self, bonus, committed):
        """The `width` most probable tokens of each depth: ids i32, log-probabilities f32, both [block - 1, width]."""
        logp = log_softmax(self.logits(bonus, committed))
        ids = np.argsort(-logp, axis=-1, kind="stable")[:, :self.width]
        return ids.astype(np.int32), np.take_along_axis(logp, ids, -1).astype(np.float32)
