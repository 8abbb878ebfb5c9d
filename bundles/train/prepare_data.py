#!/usr/bin/env python3
"""Build the corpus, the tokenizer and the token files.

Source: the Rust library, compiler and tool sources as packaged by Debian (rust-web-src), MIT OR Apache-2.0, with the
crates vendored in that package whose own Cargo.toml says the same licence (training only).
Files are split by FILE: about 97 % train, 3 % held out, decided by a hash of the path.

    python3 prepare_data.py --src PATH_TO_RUSTC_SOURCES --out work
"""
import argparse
import base64
import hashlib
import json
import lzma
import os
import random
import re

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
# The special tokens follow the last BPE token, as in the published vocabulary.
SPECIALS = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
            "<think>", "</think>", "<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>",
            "<|mask|>", "[UNK]", "[PAD]"]
# The published pre-tokeniser without its Han branch: words with at most one leading symbol, numbers of up to three
# digits, runs of symbols, line ends, spaces.
PATTERN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
           r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
           r"|\p{N}{1,3}"
           r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+"
           r"|\s+(?!\S)"
           r"|\s+")
ROOTS = ["library", "compiler", "src/librustdoc", "src/bootstrap", "src/tools/cargo", "src/tools/clippy",
         "src/tools/rustfmt", "src/tools/rust-analyzer", "src/tools/compiletest", "src/tools/tidy"]
# Crates inside the package: taken only if their Cargo.toml names both licences, and for training only. Left out: copies
# of sources above (cargo) and machine-made tables.
VENDORED = ["library/vendor", "src/tools/rustc-perf/collector/compile-benchmarks"]
VENDORED_SKIP = ("cargo", "stm32f4", "libc", "typenum")
DUAL = {"MIT OR Apache-2.0", "Apache-2.0 OR MIT", "MIT/Apache-2.0", "Apache-2.0/MIT", "MIT / Apache-2.0"}
SKIP_PARTS = {"vendor", "target", "gcc", "testdata", "test_data", "test-data", "generated"}
MAX_FILE = 300_000


def table_like(text):
    """True for files that are mostly numbers, hexadecimal or machine-made repetition."""
    digits = sum(c.isdigit() for c in text)
    lines = text.split("\n")
    if digits > 0.20 * len(text):
        return True
    if len(lines) > 200 and len(set(lines)) < 0.35 * len(lines):
        return True
    return max(map(len, lines)) > 2000


def licence(folder, top):
    """The licence named by the nearest Cargo.toml at or above folder, not above top."""
    while folder.startswith(top):
        manifest = os.path.join(folder, "Cargo.toml")
        if os.path.exists(manifest):
            found = re.search(r'^license\s*=\s*"([^"]*)"', open(manifest, errors="replace").read(), re.M)
            if found:
                return found.group(1)
        folder = os.path.dirname(folder)
    return None


def collect(src, roots, seen, vendored=False):
    files = []
    for root in roots:
        top = os.path.join(src, root)
        for base, dirs, names in os.walk(top):
            dirs[:] = sorted(d for d in dirs if d not in SKIP_PARTS)
            if vendored and base == top:
                dirs[:] = [d for d in dirs if not d.startswith(VENDORED_SKIP)]
            if vendored and licence(base, top) not in DUAL:
                continue
            for name in sorted(names):
                path = os.path.join(base, name)
                if not name.endswith(".rs") or not os.path.isfile(path) or os.path.islink(path):
                    continue
                if not 200 <= os.path.getsize(path) <= MAX_FILE:
                    continue
                raw = open(path, "rb").read()
                digest = hashlib.sha256(raw).hexdigest()
                if digest in seen:
                    continue
                seen.add(digest)
                try:
                    text = raw.decode("utf-8").replace("\r\n", "\n")
                except UnicodeDecodeError:
                    continue
                if "\0" in text or table_like(text):
                    continue
                files.append((os.path.relpath(path, src), text))
    return files


def build_tokenizer(texts):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - len(SPECIALS), special_tokens=[], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens(SPECIALS)
    assert tok.get_vocab_size() == VOCAB, tok.get_vocab_size()
    assert tok.token_to_id("[PAD]") == VOCAB - 1
    return tok


def write_tiktoken(tok, out):
    """The same vocabulary as tiktoken.model (base64 of the bytes, space, rank), with tokenizer_config.json."""
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    rest = [b for b in range(256) if b not in plain]
    byte = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}
    first = VOCAB - len(SPECIALS)
    with open(os.path.join(out, "tiktoken.model"), "w") as f:
        for i in range(first):
            raw = bytes(byte[c] for c in tok.id_to_token(i))
            f.write(f"{base64.b64encode(raw).decode()} {i}\n")
    added = {str(first + i): {"content": s, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                              "special": True} for i, s in enumerate(SPECIALS)}
    with open(os.path.join(out, "tokenizer_config.json"), "w") as f:
        json.dump({"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
                   "unk_token": "[UNK]", "model_max_length": 4096, "clean_up_tokenization_spaces": False}, f, indent=1)
        f.write("\n")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--src", required=True)
    ap.add_argument("--out", default="work")
    ap.add_argument("--held-out", type=float, default=0.03)
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    seen = set()
    files = collect(args.src, ROOTS, seen)
    extra = collect(args.src, VENDORED, seen, vendored=True)
    held = [f for f in files if int(hashlib.sha256(f[0].encode()).hexdigest()[:8], 16) / 2**32 < args.held_out]
    held_names = {n for n, _ in held}
    train = [f for f in files if f[0] not in held_names] + extra
    random.Random(1).shuffle(train)
    random.Random(2).shuffle(held)
    # The tokenizer sees training files only.
    tok = build_tokenizer(t for _, t in train)
    tok.save(os.path.join(args.out, "tokenizer.json"))
    write_tiktoken(tok, args.out)
    bos, eos = tok.token_to_id("[BOS]"), tok.token_to_id("[EOS]")
    info = {"source": "Rust library, compiler and tool sources as packaged by Debian (rust-web-src), MIT OR Apache-2.0",
            "roots": ROOTS, "vendored_roots": VENDORED, "vendored_files": len(extra),
            "files_train": len(train), "files_held_out": len(held)}
    for name, part in (("train", train), ("heldout", held)):
        ids = []
        for k in range(0, len(part), 64):
            for enc in tok.encode_batch([t for _, t in part[k:k + 64]], add_special_tokens=False):
                ids.append(np.array([bos] + enc.ids + [eos], dtype=np.uint16))
        flat = np.concatenate(ids)
        # [BOS] text [EOS] per file; u16, little endian; low and high bytes apart (packs better)
        planes = np.concatenate([(flat & 255).astype(np.uint8), (flat >> 8).astype(np.uint8)])
        with lzma.open(os.path.join(args.out, f"{name}.u16.xz"), "wb", preset=4) as f:
            f.write(planes.tobytes())
        nbytes = sum(len(t.encode()) for _, t in part)
        info[f"bytes_{name}"] = nbytes
        info[f"tokens_{name}"] = int(flat.size)
        info[f"bytes_per_token_{name}"] = nbytes / (flat.size - 2 * len(part))
    info["held_out_files"] = sorted(held_names)
    json.dump(info, open(os.path.join(args.out, "split.json"), "w"), indent=1)
    print({k: v for k, v in info.items() if k != "held_out_files"})


if __name__ == "__main__":
    main()
