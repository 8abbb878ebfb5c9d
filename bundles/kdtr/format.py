"""The .kdtr file: a safetensors file with string metadata. README.md in bundles/ describes the contract.

In memory a bf16 tensor is a numpy u16 array of bit patterns; no other tensor is u16.
"""
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import numpy as np

from . import numerics

FORMAT, VERSION = "kdtr", "1"
DTYPES = {"F32": np.float32, "I32": np.int32, "U32": np.uint32, "U8": np.uint8, "BF16": np.uint16}
NAMES = {np.dtype(v): k for k, v in DTYPES.items()}


class FormatError(Exception):
    """A file that breaks the contract; the text names the file and the tensor."""


def save_tensors(path, tensors, metadata):
    """Write a safetensors file. Wide types come first, so every tensor is aligned; equal input gives equal bytes."""
    names = sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n))
    header, at = {"__metadata__": dict(sorted(metadata.items()))}, 0
    for name in names:
        t = tensors[name]
        if t.dtype not in NAMES:
            raise FormatError(f"{path}: tensor {name} has type {t.dtype}, which the format does not hold")
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            f.write(np.ascontiguousarray(tensors[name]).tobytes())


def load_tensors(path):
    """Read a safetensors file -> ({name: array}, metadata)."""
    blob = Path(path).read_bytes()
    if len(blob) < 8:
        raise FormatError(f"{path}: shorter than a safetensors header")
    size = struct.unpack("<Q", blob[:8])[0]
    if size > len(blob) - 8:
        raise FormatError(f"{path}: header of {size} bytes in a file of {len(blob)}")
    try:
        header = json.loads(blob[8:8 + size])
    except ValueError as err:
        raise FormatError(f"{path}: header is not JSON: {err}") from None
    metadata, out = header.pop("__metadata__", {}), {}
    for name, info in header.items():
        if info["dtype"] not in DTYPES:
            raise FormatError(f"{path}: tensor {name} has type {info['dtype']}, expected one of {sorted(DTYPES)}")
        dtype = np.dtype(DTYPES[info["dtype"]])
        lo, hi = info["data_offsets"]
        count = int(np.prod(info["shape"], dtype=np.int64))
        if not 0 <= lo <= hi <= len(blob) - 8 - size or hi - lo != count * dtype.itemsize:
            raise FormatError(f"{path}: tensor {name} {info['shape']} {info['dtype']} has bytes {lo}..{hi}")
        out[name] = np.frombuffer(blob, dtype, count, 8 + size + lo).reshape(info["shape"])
    return out, metadata


@dataclass(frozen=True)
class Weight:
    """One weight as stored: `data` is float32, bf16 bits, or packed codes u8 [N, K/2] with `scale` [N, K/group]."""

    format: str  # f32 | bf16 | w4a16
    data: np.ndarray
    scale: np.ndarray | None = None

    @classmethod
    def encode(cls, values, fmt, scale_format="bf16", group=32):
        """float32 values -> the weight in format `fmt`."""
        values = np.asarray(values, dtype=np.float32)
        if fmt == "f32":
            return cls(fmt, values)
        if fmt == "bf16":
            return cls(fmt, numerics.bf16_bits(values))
        if fmt != "w4a16":
            raise ValueError(f"weight format {fmt!r}: expected f32, bf16 or w4a16")
        q, s = numerics.quantize_w4a16(values, group, scale_format)
        return cls(fmt, numerics.pack(q), numerics.bf16_bits(s) if scale_format == "bf16" else s)

    @property
    def shape(self):
        """Shape of the matrix, not of the packed codes."""
        shape = self.data.shape
        return (shape[0], shape[1] * 2) if self.format == "w4a16" else shape

    @property
    def group(self):
        return self.shape[1] // self.scale.shape[1] if self.format == "w4a16" else None

    def dense(self):
        """The exact float32 values."""
        if self.format == "f32":
            return self.data
        if self.format == "bf16":
            return numerics.bf16_values(self.data)
        scale = numerics.bf16_values(self.scale) if self.scale.dtype == np.uint16 else self.scale
        return numerics.dequantize_w4a16(numerics.unpack(self.data), scale)

    def entry(self):
        """The weight's line of the manifest."""
        out = {"shape": list(self.shape), "format": self.format}
        return out | {"group": self.group} if self.format == "w4a16" else out


@dataclass
class Golden:
    """A prompt and its greedy continuation, with the marginals a drafter gave at each position where recorded."""

    prompt: np.ndarray  # i32 [prompt length]
    tokens: np.ndarray  # i32 [P]
    gap: np.ndarray  # f32 [P], best minus second logit
    draft_ids: np.ndarray | None = None  # i32 [P, L, K]
    draft_logp: np.ndarray | None = None  # f32 [P, L, K], descending along K

    def tensors(self, i):
        out = {f"golden.{i}.prompt": self.prompt, f"golden.{i}.tokens": self.tokens, f"golden.{i}.gap": self.gap}
        if self.draft_ids is not None:
            out |= {f"golden.{i}.draft.ids": self.draft_ids, f"golden.{i}.draft.logp": self.draft_logp}
        return out


@dataclass
class Bundle:
    """Everything a .kdtr file holds. Drafter weights sit in `weights` under `drafter.` + their published names."""

    config: dict
    settings: dict
    weights: dict
    goldens: list = field(default_factory=list)
    drafter_config: dict | None = None
    tokenizer: dict | None = None
    vocabulary: bytes | None = None  # the raw tiktoken.model file
    golden_texts: list | None = None

    def tensors(self):
        """All stored tensors by their names in the file."""
        out = {}
        for name, w in self.weights.items():
            if w.format == "w4a16":
                out[name + ".qw"], out[name + ".sc"] = w.data, w.scale
            else:
                out[name] = w.data
        for i, golden in enumerate(self.goldens):
            out |= golden.tensors(i)
        if self.vocabulary is not None:
            out["tokenizer.tiktoken"] = np.frombuffer(self.vocabulary, np.uint8)
        return out

    def write(self, path):
        tensors = self.tensors()
        sums = {n: blake3.blake3(np.ascontiguousarray(tensors[n]).tobytes()).hexdigest() for n in sorted(tensors)}
        meta = {"format": FORMAT, "version": VERSION}
        parts = {"config": self.config, "settings": self.settings, "blake3": sums,
                 "manifest": {n: self.weights[n].entry() for n in sorted(self.weights)},
                 "drafter_config": self.drafter_config, "tokenizer": self.tokenizer, "golden_texts": self.golden_texts}
        meta |= {k: json.dumps(v, separators=(",", ":"), ensure_ascii=False) for k, v in parts.items() if v is not None}
        save_tensors(path, tensors, meta)

    @classmethod
    def read(cls, path):
        """Read and check: sums of all tensors, manifest against what is stored, nothing left over."""
        tensors, meta = load_tensors(path)
        if (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
            raise FormatError(f"{path}: format {meta.get('format')!r} version {meta.get('version')!r}, "
                              f"expected {FORMAT!r} {VERSION!r}")
        parts = {k: json.loads(v) for k, v in meta.items() if k not in ("format", "version")}
        for name, t in tensors.items():
            found = blake3.blake3(t.tobytes()).hexdigest()
            if parts["blake3"].get(name) != found:
                raise FormatError(f"{path}: tensor {name}: blake3 {found}, expected {parts['blake3'].get(name)}")
        missing = sorted(set(parts["blake3"]) - set(tensors))
        if missing:
            raise FormatError(f"{path}: tensor {missing[0]} is listed and not stored")
        left = dict(tensors)
        weights = {name: take_weight(path, left, name, want) for name, want in parts["manifest"].items()}
        goldens = []
        while f"golden.{len(goldens)}.prompt" in left:
            pre = f"golden.{len(goldens)}."
            goldens.append(Golden(left.pop(pre + "prompt"), left.pop(pre + "tokens"), left.pop(pre + "gap"),
                                  left.pop(pre + "draft.ids", None), left.pop(pre + "draft.logp", None)))
        words = left.pop("tokenizer.tiktoken", None)
        if left:
            raise FormatError(f"{path}: tensor {sorted(left)[0]} is neither in the manifest nor a golden")
        return cls(parts["config"], parts["settings"], weights, goldens, parts.get("drafter_config"),
                   parts.get("tokenizer"), None if words is None else words.tobytes(), parts.get("golden_texts"))


def take_weight(path, tensors, name, want):
    """Remove the weight `name` from `tensors` and check it against its manifest entry."""
    stored = (name + ".qw", name + ".sc") if want["format"] == "w4a16" else (name,)
    absent = [n for n in stored if n not in tensors]
    if absent:
        raise FormatError(f"{path}: {name} is declared {want['format']} and {absent[0]} is not stored")
    weight = Weight(want["format"], *(tensors.pop(n) for n in stored))
    types = {"f32": [np.float32], "bf16": [np.uint16], "w4a16": [np.uint8]}[want["format"]]
    if weight.data.dtype not in types or weight.entry() != want:
        raise FormatError(f"{path}: {name}: expected {want}, found {weight.entry()} in {weight.data.dtype}")
    return weight
