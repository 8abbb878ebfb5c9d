"""Kernel cases: inputs and numpy results, so that kernels are checked against another language.

Every array is stored; README.md in bundles/ lists names and shapes. Products are summed in float64, so an answer is
within float32's own error of the exact one.
"""
import heapq

import numpy as np

from .numerics import bf16_bits, bf16_values, dequantize_w4a16, pack, round_bf16
from .reference import LOG2_E, softmax_scale, softmax_weights
from .tiny import CONFIG
from .tree import accept, best_first, visibility

SEED = 77
# (M, N, K, scale format, kind of scales)
W4A16 = [
    (1, 1, 32, "bf16", "plain"), (3, 63, 96, "f32", "plain"), (8, 65, 192, "bf16", "plain"),
    (17, 130, 96, "bf16", "edge"), (3, 65, 96, "f32", "edge"), (1, 63, 2880, "bf16", "plain"),
    (17, 65, 2880, "f32", "powers"), (8, 130, 192, "bf16", "powers"),
]
EDGE_SCALES = [0.0, -0.0, 2.0 ** -24, 2.0 ** -130, 1.0e5, -0.25]  # zero, minus zero, epsilon, subnormal, above 65504
HEADS, QUERY, LATENT = 2, 576, 512
# (context rows, parents of nodes 1..): a root alone, chains, bushes, and the 65 rows of a full tree
MLA = [
    (0, []), (1, [0, 1, 2]), (63, [0, 0, 1, 1, 2]), (64, list(range(7))), (65, [0, 0, 0, 0, 0, 0]),
    (300, [0, 0, 1, 1, 2, 3, 3, 3, 6]), (33, [(i * 7919) % (i + 1) for i in range(64)]), (0, [0, 1, 1, 0, 4, 4, 2]),
]


def scales(rng, shape, fmt, kind):
    """Scales [N, K / 32] f32, representable in `fmt`."""
    s = 0.02 * rng.uniform(0.5, 2.0, shape)
    if kind == "edge":
        flat = s.reshape(-1)
        flat[:len(EDGE_SCALES)] = EDGE_SCALES
        flat[-len(EDGE_SCALES):] = EDGE_SCALES
    elif kind == "powers":  # neighbours differ by factors: a scale taken from the next group shows
        s = 2.0 ** ((np.arange(s.size) % 9) - 6).reshape(shape)
    s = s.astype(np.float32)
    return round_bf16(s) if fmt == "bf16" else s


def w4a16_cases(rng):
    """x f32 [M, K] of bf16 values, qw u8 [N, K/2], sc [N, K/32] bf16 or f32, y f32 [M, N]."""
    out = {}
    for i, (m, n, k, fmt, kind) in enumerate(W4A16):
        x = round_bf16(rng.standard_normal((m, k)).astype(np.float32))
        q = rng.integers(-8, 8, (n, k))
        q[0, :16] = np.arange(-8, 8)
        s = scales(rng, (n, k // 32), fmt, kind)
        y = x.astype(np.float64) @ dequantize_w4a16(q, s).astype(np.float64).T
        if not np.isfinite(y.astype(np.float32)).all():
            raise SystemExit(f"w4a16 case {i}: a result is not finite")
        out |= {f"w4a16.{i}.x": x, f"w4a16.{i}.qw": pack(q), f"w4a16.{i}.sc": bf16_bits(s) if fmt == "bf16" else s,
                f"w4a16.{i}.y": y.astype(np.float32)}
    return out


def ancestor_bits(parents):
    """u32 [M, ceil(M / 32)]: bit j of row i is set where row i sees row j (itself, its ancestors, the root)."""
    see = visibility(parents)
    rows = len(see)
    padded = np.zeros((rows, -(-rows // 32) * 32), np.uint64)
    padded[:, :rows] = see
    words = (padded.reshape(rows, -1, 32) << np.arange(32, dtype=np.uint64)).sum(-1)
    return words.astype(np.uint32)


def mla_cases(rng):
    """q [M, H, 576] and cache [S + M, 576] f32 of bf16 values, ancestors u32, scale f32 [1], z f32 [M, H, 512]."""
    out, scale = {}, np.float32(softmax_scale(CONFIG))
    for i, (context, parents) in enumerate(MLA):
        rows = len(parents) + 1
        q = round_bf16(0.6 * rng.standard_normal((rows, HEADS, QUERY)).astype(np.float32))
        cache = round_bf16(rng.standard_normal((context + rows, QUERY)).astype(np.float32))
        if context == 300:
            cache[7] *= 4  # one key far above the rest
        see = np.concatenate((np.ones((rows, context), bool), visibility(parents)), 1)
        s = np.einsum("mhd,td->mht", q.astype(np.float64), cache.astype(np.float64)) * float(scale) * LOG2_E
        s = np.where(see[:, None], s, -np.inf)
        p = softmax_weights(s)
        z = p @ cache[:, :LATENT].astype(np.float64) / p.sum(-1, keepdims=True)
        out |= {f"mla.{i}.q": q, f"mla.{i}.cache": bf16_bits(cache), f"mla.{i}.ancestors": ancestor_bits(parents),
                f"mla.{i}.scale": np.array([scale], np.float32), f"mla.{i}.z": z.astype(np.float32)}
    return out


def marginals(rng, depths, width, step=None):
    """ids i32 and log-probabilities f32 [L, K]; with `step` they are multiples of it, so sums are exact and tie."""
    ids = np.stack([rng.choice(5000, width, replace=False) for _ in range(depths)]).astype(np.int32)
    logits = np.sort(rng.standard_normal((depths, width)) * 2, -1)[:, ::-1]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True)) - 0.02
    return ids, (np.floor(logp / step) * step if step else logp).astype(np.float32)


def tree_inputs(rng):
    """(ids, logp, budget) of every builder case."""
    out = [(*marginals(rng, 7, 64), b) for b in (0, 1, 5, 16, 64)]
    out += [(*marginals(rng, 7, 16, step=0.5), b) for b in (5, 16, 64)]  # many ties across parents and depths
    out += [(*marginals(rng, 7, 16), 64), (*marginals(rng, 1, 8), 16), (*marginals(rng, 3, 2), 64)]
    ids, logp = marginals(rng, 7, 16)
    logp[:, 3:] = -np.inf  # three tokens a depth, and an impossible depth 5
    logp[4] = -np.inf
    out.append((ids, logp, 64))
    ids, logp = marginals(rng, 7, 16)
    logp[:] = np.float32(-2.0)  # all siblings equal
    out.append((ids, logp, 16))
    ids, logp = marginals(rng, 7, 16)
    ids[0, 0], ids[1, 0], ids[3, 2] = 0, 0, 0  # token 0 is a token
    ids[2, 0], ids[2, 1], ids[4, 0] = 65535, 65536, 163839
    out.append((ids, logp, 16))
    out.append((ids, np.full_like(logp, -np.inf), 5))
    return out


def tree_cases(rng):
    """ids i32, logp f32 [L, K], budget i32 [1] -> tokens, parents, depths i32 [n], scores f32 [n]."""
    out = {}
    for i, (ids, logp, budget) in enumerate(tree_inputs(rng)):
        tree = best_first(ids, logp, budget)
        out |= {f"tree.{i}.ids": ids, f"tree.{i}.logp": logp, f"tree.{i}.budget": np.array([budget], np.int32)}
        out |= {f"tree.{i}.{n}": v for n, v in zip(("tokens", "parents", "depths", "scores"), tree)}
    return out


def accept_cases(rng):
    """tokens, parents i32 [n], picks i32 [n + 1] -> path i32, node numbers that begin with the root."""
    trees = [([], []), ([5], [0]), ([0, 0, 0], [0, 1, 2]), ([7, 8, 9, 1], [0, 0, 1, 2]),
             ([4, 4, 6], [0, 0, 2]), ([1, 2, 3, 4, 5, 6], [0, 0, 0, 2, 2, 4])]
    picks = [[3], [5, 1], [0, 0, 0, 0], [8, 1, 1, 5, 5], [4, 6, 6, 6], [2, 9, 5, 9, 9, 9, 9]]
    cases = list(zip(trees, picks))
    for budget in (16, 64):
        ids, logp = marginals(rng, 7, 16)
        tokens, parents, _, _ = best_first(ids, logp, budget)
        follow = rng.integers(0, 5000, budget + 1)
        for node in range(len(parents), 0, -1):  # each node picks its lowest child with a child, else any child
            follow[parents[node - 1]] = tokens[node - 1]
        cases += [((tokens, parents), follow), ((tokens, parents), np.full(budget + 1, -1))]
    out = {}
    for i, ((tokens, parents), pick) in enumerate(cases):
        arrays = {"tokens": tokens, "parents": parents, "picks": pick, "path": accept(tokens, parents, pick)}
        out |= {f"accept.{i}.{n}": np.array(v, np.int32) for n, v in arrays.items()}
    return out


def brute_force(ids, logp, budget):
    """The builder's rule over explicit frontiers, with no heap and no successor trick: for tests."""
    columns = min(logp.shape[1], budget)
    nodes = [(np.float32(0), -1, 0, 0)]  # score, parent, rank, depth
    taken = set()
    while len(nodes) <= budget:
        best = None
        for parent, (score, _, _, depth) in enumerate(nodes):
            for rank in range(columns if depth < len(ids) else 0):
                key = (-(score + logp[depth, rank]), parent, rank)
                if (parent, rank) not in taken and key[0] < np.inf and (best is None or key < best):
                    best = key
        if best is None:
            break
        taken.add(best[1:])
        nodes.append((-best[0], best[1], best[2], nodes[best[1]][3] + 1))
    return ([int(ids[d - 1, r]) for _, _, r, d in nodes[1:]], [p for _, p, _, _ in nodes[1:]],
            [d for *_, d in nodes[1:]], [s for s, *_ in nodes[1:]])


def generate():
    """All arrays of kernel-cases.safetensors."""
    return {name: array for k, make in enumerate((w4a16_cases, mla_cases, tree_cases, accept_cases))
            for name, array in make(np.random.default_rng([SEED, k])).items()}
