"""Number formats: bf16 rounding, and INT4 weights with one scale per 32 inputs (W4A16).

bf16 values are kept as float32 (or float64) arrays whose values bf16 can represent; in files they are u16 bit patterns.
A W4A16 matrix [N, K] is codes q in -8..=7, packed two to a byte, and one scale per row and group of consecutive k; its
value is q * scale, with no zero point (the layout of compressed-tensors `pack-quantized`).
"""
import numpy as np

CODE_MIN, CODE_MAX = -8, 7


def bf16_bits(x):
    """float array -> u16 bf16 patterns, rounded to nearest, ties to even; NaN stays NaN."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    u = x.view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = ((u[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return rounded


def bf16_values(bits):
    """u16 bf16 patterns -> float32, exact."""
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(x):
    """Round to bf16 and keep the type of x (float32 or float64)."""
    x = np.asarray(x)
    return bf16_values(bf16_bits(x)).astype(x.dtype, copy=False)


def quantize_w4a16(w, group=32, scale_format="bf16"):
    """w [N, K] -> codes int8 [N, K] in -8..=7 and float32 scales [N, K / group], representable in `scale_format`.

    The scale is the extreme of the group over 7, or over 8 where the extreme is negative, so that all sixteen codes
    occur; a group of zeros gets scale 0 and codes 0.
    """
    w = np.asarray(w, dtype=np.float32)
    n, k = w.shape
    if k % group:
        raise ValueError(f"K = {k} is no multiple of the group size {group}")
    blocks = w.reshape(n, k // group, group)
    low, high = blocks.min(-1), blocks.max(-1)
    scale = np.where(-low > high, -low / np.float32(-CODE_MIN), high / np.float32(CODE_MAX)).astype(np.float32)
    if scale_format == "bf16":
        scale = round_bf16(scale)
    elif scale_format != "f32":
        raise ValueError(f"scale format {scale_format!r}: expected 'bf16' or 'f32'")
    safe = np.where(scale == 0, np.float32(1), scale)
    q = np.clip(np.rint(blocks / safe[..., None]), CODE_MIN, CODE_MAX)
    return np.where(scale[..., None] == 0, 0, q).astype(np.int8).reshape(n, k), scale


def dequantize_w4a16(q, scale):
    """Codes [N, K], scales [N, K / group] -> the float32 products q * scale [N, K]."""
    n, k = q.shape
    groups = scale.shape[1]
    if scale.shape[0] != n or groups == 0 or k % groups:
        raise ValueError(f"codes {q.shape} do not fit scales {scale.shape}")
    blocks = q.reshape(n, groups, k // groups).astype(np.float32)
    return (blocks * scale[..., None].astype(np.float32)).reshape(n, k)


def pack(q):
    """Codes [N, K] -> u8 [N, K / 2]: stored nibble q + 8, the low nibble holds the even k."""
    u = (np.asarray(q, dtype=np.int16) + 8).astype(np.uint8)
    if (u > 15).any():
        raise ValueError("a code is outside -8..=7")
    return u[:, 0::2] | (u[:, 1::2] << 4)


def unpack(packed):
    """u8 [N, K / 2] -> codes int8 [N, K]; inverse of `pack`."""
    packed = np.asarray(packed, dtype=np.uint8)
    out = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.int8)
    out[:, 0::2] = (packed & 15).astype(np.int8) - 8
    out[:, 1::2] = (packed >> 4).astype(np.int8) - 8
    return out
