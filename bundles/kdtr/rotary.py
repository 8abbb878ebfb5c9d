"""Rotary positions with YaRN, and the softmax scale that belongs to them."""
import math

import numpy as np


def yarn_frequencies(dim, theta, scaling):
    """Inverse frequencies [dim / 2] in float64; `scaling` is the checkpoint's rope_scaling or None."""
    i = np.arange(dim // 2, dtype=np.float64)
    base = theta ** (-2.0 * i / dim)
    if scaling is None:
        return base

    def corrected(turns):
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(corrected(scaling["beta_fast"])), 0)
    high = min(math.ceil(corrected(scaling["beta_slow"])), dim - 1)
    ramp = np.clip((i - low) / max(high - low, 1e-3), 0, 1)
    return base * ((1 - ramp) + ramp / scaling["factor"])


def yarn_magnitude(factor, mscale):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config):
    """1 / sqrt(192) for the real head, times the square of YaRN's magnitude."""
    scaling, m = config.get("rope_scaling"), 1.0
    if scaling is not None and scaling.get("mscale_all_dim"):
        m = yarn_magnitude(scaling["factor"], scaling["mscale_all_dim"])
    return m * m / math.sqrt(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])


def rope(frequencies, positions, dtype):
    """cos, sin [R, dim / 2]: angles in float64, values float32. With mscale = mscale_all_dim they are not scaled."""
    angle = np.asarray(positions, dtype=np.float64)[:, None] * frequencies[None]
    return np.cos(angle).astype(np.float32).astype(dtype), np.sin(angle).astype(np.float32).astype(dtype)


def rotate_pairs(x, cos, sin):
    """Rotate the pairs (2i, 2i + 1) of the last axis."""
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)
