#!/usr/bin/env python3
"""Compare the engine's hidden states, layer by layer, with PyTorch in float32.

    kdtree states FOLDER --prompt-ids 1,2,3,4 --single 2 --out states.safetensors
    python3 bundles/compare_layers.py FOLDER states.safetensors [--limit 3e-3]

Nothing is shared with the engine: shards are read here, every weight and activation is float32 (an INT4 weight is its
code times its scale), keys and values are expanded from the latent, nothing is rounded on the way. Each layer gets what
the engine had before it ("alone"), and the whole runs once from the token ids ("from ids"). Experts are the engine's,
after a check that they are the best of this router up to near-ties. The error is |found - expected| / |expected| over
all rows, of each layer's output and of what the layer adds to its input ("added"). "rounded" is the error against the
same in float32 but with inputs of products, cache and softmax weights rounded to bf16, which is what the engine does:
what is left there comes from the order of sums. Exits 1 if an output of a layer alone, or the logits, are above the
limits. Runs on a GPU where PyTorch finds one; with --numpy on the CPU without PyTorch.
"""
import argparse
import json
import math
import mmap
import struct
import sys
from pathlib import Path

import numpy as np

PREFIX = "language_model."
# Router keys (sigmoid + bias) this close count as equal.
NEAR = 2e-3
LN2 = math.log(2)


class NumPy:
    """The operations that differ between the two libraries."""

    name = "numpy, float32"

    def array(self, values):
        return values

    def bf16(self, raw):
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def codes(self, stored):
        return stored.astype(np.float32) - np.float32(8)

    def largest(self, values):
        return values.max(-1, keepdims=True)

    def stack(self, parts):
        return np.stack(parts, -1)

    def numpy(self, values):
        return values

    def rounded(self, values):
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)

    exp, sqrt, ceil = staticmethod(np.exp), staticmethod(np.sqrt), staticmethod(np.ceil)


class Torch:
    def __init__(self):
        import torch
        self.torch = torch
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        name = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
        self.name = f"PyTorch {torch.__version__} on {name}, float32 without TF32"
        self.exp, self.sqrt, self.ceil = torch.exp, torch.sqrt, torch.ceil

    def array(self, values):
        values = values.view(np.int16) if values.dtype == np.uint16 else values
        return self.torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def bf16(self, raw):
        return raw.view(self.torch.bfloat16).float()

    def codes(self, stored):
        return stored.float() - 8

    def largest(self, values):
        return values.amax(-1, keepdim=True)

    def stack(self, parts):
        return self.torch.stack(parts, -1)

    def numpy(self, values):
        return values.cpu().numpy()

    def rounded(self, values):
        return values.bfloat16().float()


class Tensors:
    """The tensors of a folder's shards, or of one safetensors file, by name without prefix."""

    def __init__(self, files):
        self.all = {}
        for file in files:
            with open(file, "rb") as f:
                data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
            size = struct.unpack_from("<Q", data)[0]
            for name, about in json.loads(data[8:8 + size]).items():
                if name != "__metadata__":
                    begin, end = about["data_offsets"]
                    place = data, 8 + size + begin, end - begin
                    self.all[name.removeprefix(PREFIX)] = about["dtype"], about["shape"], place

    def raw(self, name, dtype):
        found, shape, (data, at, size) = self.all[name]
        assert found == dtype, (name, found, dtype)
        kind = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32}[dtype]
        return np.frombuffer(data, kind, size // np.dtype(kind).itemsize, at).reshape(shape)


class Model:
    """Kimi K2.6's layers over all tokens at once."""

    def __init__(self, folder, xp, rounds):
        config = json.loads((folder / "config.json").read_text())
        self.c = config.get("text_config", config)
        self.rounded = xp.rounded if rounds else lambda x: x
        self.rounds, self.xp, self.tensors = rounds, xp, Tensors(sorted(folder.glob("*.safetensors")))
        self.eps, self.low_eps = self.c["rms_norm_eps"], self.c.get("lora_norm_eps", self.c["rms_norm_eps"])

    def weight(self, name):
        xp, known = self.xp, self.tensors.all
        if name in known:
            raw = self.tensors.raw(name, known[name][0])
            return xp.bf16(xp.array(raw)) if known[name][0] == "BF16" else xp.array(raw)
        packed = xp.array(self.tensors.raw(name + "_packed", "I32").view(np.uint8))
        scale = xp.bf16(xp.array(self.tensors.raw(name + "_scale", "BF16")))
        rows, groups = scale.shape
        code = xp.codes(xp.stack([packed & 15, packed >> 4])).reshape(rows, groups, -1)
        return (code * scale[:, :, None]).reshape(rows, -1)

    def norm(self, x, name, eps):
        return x / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * self.weight(name)

    def product(self, x, name):
        return self.rounded(x) @ self.weight(name + ".weight").T

    def angles(self, tokens):
        """YaRN: cos and sin [tokens, pairs], and the scale of the scores."""
        c, d = self.c, self.c["qk_rope_head_dim"]
        theta, s = c["rope_theta"], c.get("rope_scaling")
        plain = theta ** (-2.0 * np.arange(d // 2) / d)
        scale = 1 / math.sqrt(c["qk_nope_head_dim"] + d)
        amplitude = 1.0
        if s:
            original, base = s["original_max_position_embeddings"], 2 * math.log(theta)
            turn = lambda r: d * math.log(original / (2 * math.pi * r)) / base
            low, high = max(math.floor(turn(s["beta_fast"])), 0), min(math.ceil(turn(s["beta_slow"])), d - 1)
            ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
            plain = plain * (1 - ramp + ramp / s["factor"])
            temperature = lambda m: 0.1 * m * math.log(s["factor"]) + 1
            amplitude = temperature(s["mscale"]) / temperature(s["mscale_all_dim"])
            scale *= temperature(s["mscale_all_dim"]) ** 2 if s["mscale_all_dim"] else 1
        angle = np.arange(tokens)[:, None] * plain
        table = lambda f: self.xp.array((f(angle) * amplitude).astype(np.float32))
        return table(np.cos), table(np.sin), scale

    def rotate(self, x, cos, sin):
        """Pairs are neighbours."""
        even, odd = x[..., 0::2], x[..., 1::2]
        return self.xp.stack([even * cos - odd * sin, odd * cos + even * sin]).reshape(x.shape)

    def attention(self, a, pre):
        c, xp, tokens = self.c, self.xp, len(a)
        heads, nope, v = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        cos, sin, scale = self.angles(tokens)
        low = self.norm(self.product(a, pre + "q_a_proj"), pre + "q_a_layernorm.weight", self.low_eps)
        q = self.product(low, pre + "q_b_proj").reshape(tokens, heads, -1)
        t = self.product(a, pre + "kv_a_proj_with_mqa")
        rank = c["kv_lora_rank"]
        latent = self.norm(t[:, :rank], pre + "kv_a_layernorm.weight", self.low_eps)
        key_pe = self.rotate(t[:, rank:], cos, sin)
        later = xp.array(np.triu(np.full((tokens, tokens), -1e30, np.float32), 1))
        up = self.weight(pre + "kv_b_proj.weight").reshape(heads, nope + v, rank)
        r, out = self.rounded, []
        for h in range(heads):
            key_up, value_up = up[h, :nope], up[h, nope:]
            query, query_pe = q[:, h, :nope], self.rotate(q[:, h, nope:], cos, sin)
            if self.rounds:
                s = r(r(query) @ key_up) @ r(latent).T + r(query_pe) @ r(key_pe).T
            else:
                s = query @ (latent @ key_up.T).T + query_pe @ key_pe.T
            s = s * scale + later
            if self.rounds:
                # Relative to a power of two: so weights round alike against any such base.
                s = s * (1 / LN2)
                p = r(xp.exp((s - xp.ceil(xp.largest(s))) * LN2))
            else:
                p = xp.exp(s - xp.largest(s))
            out.append(r(p @ r(latent) / p.sum(axis=-1, keepdims=True)) @ value_up.T)
        # [heads] of [tokens, v] -> [tokens, heads * v]
        by_value = xp.stack(out)
        flat = xp.stack([by_value[:, i] for i in range(v)])
        return self.product(flat.reshape(tokens, heads * v), pre + "o_proj")

    def swiglu(self, a, pre):
        g = self.product(a, pre + "gate_proj")
        return self.product(g / (1 + self.xp.exp(-g)) * self.product(a, pre + "up_proj"), pre + "down_proj")

    def experts(self, a, pre, chosen):
        """The sum over `chosen` [tokens, k], and how far its worst is below the best that was left out."""
        c, xp = self.c, self.xp
        score = 1 / (1 + xp.exp(-(self.rounded(a) @ self.weight(pre + "gate.weight").T)))
        keys = xp.numpy(score) + self.tensors.raw(pre + "gate.e_score_correction_bias", "F32")
        score = xp.numpy(score)
        taken = np.take_along_axis(keys, chosen, -1).min(-1)
        left = keys.copy()
        np.put_along_axis(left, chosen, -np.inf, -1)
        tie = float((left.max(-1) - taken).max())
        w = np.take_along_axis(score, chosen, -1)
        if c["norm_topk_prob"]:
            w = w / (w.sum(-1, keepdims=True) + 1e-20)
        w = (w * c["routed_scaling_factor"]).astype(np.float32)
        out = self.swiglu(a, pre + "shared_experts.") if c["n_shared_experts"] else a * 0
        for e in np.unique(chosen):
            rows, slot = np.nonzero(chosen == e)
            at = xp.array(rows.astype(np.int64))
            out[at] += xp.array(w[rows, slot][:, None]) * self.swiglu(a[at], f"{pre}experts.{e}.")
        return out, tie

    def layer(self, x, index, chosen):
        pre = f"model.layers.{index}."
        a = self.norm(x, pre + "input_layernorm.weight", self.eps)
        x = x + self.attention(a, pre + "self_attn.")
        a = self.norm(x, pre + "post_attention_layernorm.weight", self.eps)
        if chosen is None:
            return x + self.swiglu(a, pre + "mlp."), -np.inf
        out, tie = self.experts(a, pre + "mlp.", chosen)
        return x + out, tie

    def logits(self, x):
        return self.product(self.norm(x, "model.norm.weight", self.eps), "lm_head")


def error(found, expected):
    """Of all rows together, and of the worst row."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    off, size = np.linalg.norm(found - expected, axis=-1), np.linalg.norm(expected, axis=-1)
    return float(np.linalg.norm(off) / np.linalg.norm(size)), float((off / size).max())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("states", type=Path)
    parser.add_argument("--limit", type=float, default=3e-3, help="of \"alone\" (default: 3e-3)")
    parser.add_argument("--rounded-limit", type=float, default=2e-3, help="of \"rounded\" (default: 2e-3)")
    parser.add_argument("--numpy", action="store_true", help="without PyTorch: for small models")
    args = parser.parse_args()
    xp = NumPy() if args.numpy else Torch()
    model, rounding, states = Model(args.folder, xp, False), Model(args.folder, xp, True), Tensors([args.states])
    ids = states.raw("ids", "I32").reshape(-1)
    table = model.weight("model.embed_tokens.weight")
    x = own = table[xp.array(ids.astype(np.int64))]
    layers = sum(name.startswith("hidden.") for name in states.all)
    print(f"{args.folder}: {len(ids)} tokens, {layers} layers; {xp.name}")
    print(f"{'output':<12} {'alone':>9} {'worst row':>10} {'added':>9} {'from ids':>9} {'rounded':>9}  experts")
    bad = []

    def line(name, alone, added, whole, rounded, note=""):
        print(f"{name:<12} {alone[0]:9.2e} {alone[1]:10.2e} {added:>9} {whole[0]:9.2e} {rounded[0]:9.2e}  {note}")
        if not (alone[0] <= args.limit and rounded[0] <= args.rounded_limit):
            bad.append(name)

    for i in range(layers):
        key = f"experts.{i}"
        chosen = states.raw(key, "I32").astype(np.int64) if key in states.all else None
        found = states.raw(f"hidden.{i}", "F32")
        alone, tie = model.layer(x, i, chosen)
        own, _ = model.layer(own, i, chosen)
        same = xp.numpy(rounding.layer(x, i, chosen)[0])
        before, want = xp.numpy(x), xp.numpy(alone)
        added = f"{error(found - before, want - before)[0]:.2e}"
        note = "" if chosen is None else f"best left out is above the worst chosen by {tie:.1e} at most"
        line(f"layer {i}", error(found, want), added, error(found, xp.numpy(own)), error(found, same), note)
        if tie > NEAR:
            bad.append(f"experts of layer {i}")
        x = xp.array(found.copy())
    found = states.raw("logits", "F32")
    of = lambda m, x: error(found, xp.numpy(m.logits(x)))
    line("logits", of(model, x), "", of(model, own), of(rounding, x))
    print(f"at most {args.limit:g} and {args.rounded_limit:g} wanted: {'FAILED: ' + ', '.join(bad) if bad else 'ok'}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
