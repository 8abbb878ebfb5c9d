"""The whole target model in numpy: Kimi K2.6's architecture, absorbed attention with a latent cache, ancestor masks.

Every value is rounded where the engine rounds it. The input of a bf16 or W4A16 product is rounded once to bf16, that of
an f32 product is not; cache rows, the absorbed query and the softmax weights are bf16; the router's input always is.
Residual stream, logits, statistics and accumulators keep the type of `Arithmetic` (float32, or float64 to measure what
another order of sums does).
"""
from dataclasses import dataclass

import numpy as np

from .numerics import round_bf16
from .rotary import rope, rotate_pairs, softmax_scale, yarn_frequencies

LOG2_E = 1 / np.log(2)


@dataclass(frozen=True)
class Arithmetic:
    """Type of the accumulators, and the order of the sums over k (`reverse`: from the last k to the first).

    `published`: softmax as in the scripts that trained and measured the small model (`attend_as_published`).
    """

    dtype: type = np.float32
    reverse: bool = False
    published: bool = False

    def matmul(self, x, w):
        """x [..., M, K], w [..., K, N]."""
        return x[..., ::-1] @ w[..., ::-1, :] if self.reverse else x @ w


class Linear:
    """y = x W^T for one weight [N, K], with the input rounding that its format asks for."""

    def __init__(self, weight, arith):
        self.w = weight.dense().astype(arith.dtype, copy=False)
        self.rounds, self.arith = weight.format != "f32", arith

    def input(self, x):
        return round_bf16(x) if self.rounds else x

    def __call__(self, x):
        return self.arith.matmul(self.input(x), self.w.T)


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True, dtype=x.dtype) + x.dtype.type(eps)) * weight


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def softmax_weights(s):
    """Scores in base 2 -> weights up to 1, rounded to bf16.

    The base is a whole number: to weigh against another one is then to multiply by a power of two, which no rounding to
    bf16 notices. So a program may take any base, and change it underway, and has these very weights.
    """
    return round_bf16(np.exp2(s - np.ceil(s.max(-1, keepdims=True))))


def attend(arith, q, keys, values, scale, mask):
    """q [..., R, D] and keys [T, D], values [T, V], all bf16 values; mask [R, T] -> z [..., R, V] not rounded.

    The denominator is the sum of the rounded weights: rounding moves weight between keys and adds none.
    """
    if arith.published:
        return attend_as_published(arith, q, keys, values, scale, mask)
    p = softmax_weights(arith.matmul(q, np.swapaxes(keys, -1, -2)) * arith.dtype(scale * LOG2_E) + mask)
    return arith.matmul(p, values) / p.sum(-1, keepdims=True)


def attend_as_published(arith, q, keys, values, scale, mask):
    """The same with weights relative to the row's maximum and a denominator of unrounded weights."""
    s = arith.matmul(q, np.swapaxes(keys, -1, -2)) * arith.dtype(scale) + mask
    p = np.exp(s - s.max(-1, keepdims=True))
    return arith.matmul(round_bf16(p), values) / p.sum(-1, keepdims=True)


class Attention:
    """Multi-head latent attention in the absorbed form; a cache row is 512 latent and 64 rotated key values."""

    def __init__(self, config, settings, get, linear, arith):
        c = config
        self.heads, self.nope, self.rope_dim = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.latent, self.v_dim, self.arith = c["kv_lora_rank"], c["v_head_dim"], arith
        self.scale, self.eps = softmax_scale(c), settings["lora_norm_eps"]
        self.frequencies = yarn_frequencies(self.rope_dim, c["rope_theta"], c.get("rope_scaling"))
        self.q_a, self.q_b, self.kv_a, self.kv_b, self.o = (
            linear(f"{n}.weight") for n in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
        self.q_norm, self.kv_norm = get("q_a_layernorm.weight"), get("kv_a_layernorm.weight")
        up = self.kv_b.w.reshape(self.heads, self.nope + self.v_dim, self.latent)
        self.key_up, self.value_up = up[:, :self.nope], up[:, self.nope:].transpose(0, 2, 1)  # [H,128,512], [H,512,128]

    def __call__(self, x, positions, mask, cache, start):
        """x [R, D] normalised; writes cache rows start..start+R; mask [R, start + R] -> [R, D]."""
        rows, arith = len(x), self.arith
        cos, sin = rope(self.frequencies, positions, arith.dtype)
        kv = self.kv_a(x)
        slot = slice(start, start + rows)
        cache[slot, :self.latent] = round_bf16(rms_norm(kv[:, :self.latent], self.kv_norm, self.eps))
        cache[slot, self.latent:] = round_bf16(rotate_pairs(kv[:, self.latent:], cos, sin))
        q = self.q_b(rms_norm(self.q_a(x), self.q_norm, self.eps)).reshape(rows, self.heads, -1).transpose(1, 0, 2)
        q_latent = arith.matmul(self.kv_b.input(q[..., :self.nope]), self.key_up)
        q_rope = rotate_pairs(q[..., self.nope:], cos, sin)
        query = round_bf16(np.concatenate((q_latent, q_rope), -1))  # [H, R, 576]
        keys = cache[:start + rows]
        z = attend(arith, query, keys, keys[:, :self.latent], self.scale, mask)
        out = arith.matmul(self.kv_b.input(z), self.value_up)
        return self.o(out.transpose(1, 0, 2).reshape(rows, -1))


class FeedForward:
    """down( silu(gate x) * up x )."""

    def __init__(self, linear):
        self.gate, self.up, self.down = (linear(f"{n}_proj.weight") for n in ("gate", "up", "down"))

    def __call__(self, x):
        g = self.gate(x)
        return self.down(g * sigmoid(g) * self.up(x))


class Mixture:
    """Routed experts and the shared one. Chosen by sigmoid + bias, ties to the lower id; weights without the bias."""

    def __init__(self, config, get, linear, arith):
        self.top, self.factor, self.arith = config["num_experts_per_tok"], config["routed_scaling_factor"], arith
        self.gate, self.bias = get("gate.weight"), get("gate.e_score_correction_bias")
        self.experts = [FeedForward(lambda n, e=e: linear(f"experts.{e}.{n}"))
                        for e in range(config["n_routed_experts"])]
        self.shared = FeedForward(lambda n: linear(f"shared_experts.{n}"))

    def route(self, x):
        """x [R, D] -> expert ids [R, top] and weights [R, top]."""
        score = sigmoid(self.arith.matmul(round_bf16(x), self.gate.T))
        ids = self.choose(score + self.bias)
        w = np.take_along_axis(score, ids, -1)
        return ids, w / (w.sum(-1, keepdims=True) + w.dtype.type(1e-20)) * w.dtype.type(self.factor)

    def choose(self, keys):
        """keys [R, E] -> the ids [R, top] of the largest."""
        return np.argsort(-keys, axis=-1, kind="stable")[:, :self.top]

    def __call__(self, x):
        ids, w = self.route(x)
        out = np.zeros_like(x)
        for e in np.unique(ids):
            rows, slot = np.nonzero(ids == e)
            out[rows] += w[rows, slot, None] * self.experts[e](x[rows])
        return out + self.shared(x)


class Model:
    """The target of a bundle. `weights` maps names to `format.Weight`."""

    mixture = Mixture

    def __init__(self, config, settings, weights, arith=Arithmetic()):
        self.config, self.arith, self.eps = config, arith, config["rms_norm_eps"]

        def get(name):
            return weights[name].dense().astype(arith.dtype, copy=False)

        self.embedding, self.norm = get("model.embed_tokens.weight"), get("model.norm.weight")
        self.head = Linear(weights["lm_head.weight"], arith)
        self.layers = []
        for i in range(config["num_hidden_layers"]):
            pre = f"model.layers.{i}."
            attention = Attention(config, settings, lambda n: get(f"{pre}self_attn.{n}"),
                                  lambda n: Linear(weights[f"{pre}self_attn.{n}"], arith), arith)
            linear = lambda n: Linear(weights[f"{pre}mlp.{n}"], arith)  # noqa: E731
            dense = i < config["first_k_dense_replace"]
            mlp = FeedForward(linear) if dense else self.mixture(config, lambda n: get(f"{pre}mlp.{n}"), linear, arith)
            self.layers.append((get(pre + "input_layernorm.weight"), attention,
                                get(pre + "post_attention_layernorm.weight"), mlp))

    def cache(self, rows):
        """One array [rows, 576] a layer."""
        width = self.config["kv_lora_rank"] + self.config["qk_rope_head_dim"]
        return [np.zeros((rows, width), self.arith.dtype) for _ in self.layers]

    def forward(self, ids, positions, visible, cache, start, taps=()):
        """Rows ids [R] at positions [R] see all `start` cached rows and, of each other, what visible [R, R] says.

        Writes cache rows start..start+R. Returns logits [R, V] and the outputs of the layers in `taps`, side by side.
        """
        rows = len(ids)
        if start + rows > len(cache[0]):
            raise ValueError(f"{start} + {rows} rows do not fit a cache of {len(cache[0])}")
        mask = np.zeros((rows, start + rows), self.arith.dtype)
        mask[:, start:][~visible] = -np.inf
        x, tapped = self.embedding[np.asarray(ids)], {}
        for i, (layer, (norm_in, attention, norm_mlp, mlp)) in enumerate(zip(cache, self.layers)):
            x = x + attention(rms_norm(x, norm_in, self.eps), positions, mask, layer, start)
            x = x + mlp(rms_norm(x, norm_mlp, self.eps))
            if i in taps:
                tapped[i] = x
        logits = self.head(rms_norm(x, self.norm, self.eps))
        if not np.isfinite(logits).all():
            raise FloatingPointError("a logit is not finite")
        return logits, np.concatenate([tapped[t] for t in taps], -1) if taps else None

    def causal(self, ids, cache, start, taps=()):
        """Consecutive tokens at positions start..start+R."""
        rows = len(ids)
        return self.forward(ids, np.arange(start, start + rows), np.tri(rows, dtype=bool), cache, start, taps)


def best_and_gap(logits):
    """[R, V] -> the largest logit's lowest id [R] and its distance to the second largest [R]."""
    two = np.partition(logits, -2, -1)[:, -2:]
    return logits.argmax(-1), (two[:, 1] - two[:, 0]).astype(np.float32)


def greedy(model, prompt, count, stop_below=None):
    """Plain decoding, one token a step -> tokens i32 [count], gaps f32 [count]; None once a gap is below the limit."""
    cache, at = model.cache(len(prompt) + count), len(prompt)
    logits = model.causal(prompt, cache, 0)[0]
    tokens, gaps = np.empty(count, np.int32), np.empty(count, np.float32)
    for k in range(count):
        best, gap = best_and_gap(logits[-1:])
        tokens[k], gaps[k] = best[0], gap[0]
        if stop_below is not None and gaps[k] < stop_below:
            return None
        if k + 1 < count:
            logits = model.causal(tokens[k:k + 1], cache, at + k)[0]
    return tokens, gaps


def replay(model, prompt, tokens, step=None):
    """The same decisions in blocks of `step` rows (all at once by default) -> best ids and gaps as `greedy` gives."""
    ids = np.concatenate((prompt, tokens[:-1]))
    cache, logits, step = model.cache(len(ids)), [], step or len(ids)
    for at in range(0, len(ids), step):
        logits.append(model.causal(ids[at:at + step], cache, at)[0])
    return best_and_gap(np.concatenate(logits)[len(prompt) - 1:])
