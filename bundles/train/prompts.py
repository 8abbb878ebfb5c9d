#!/usr/bin/env python3
"""The held-out prompts of `evaluate.py acceptance`, from the sources alone: without torch and without the training run.

Reads the held-out files of split.json, tokenizes them with the published tokenizer in the order of prepare_data.py and
draws the prompts as `evaluate.py` does (`torch.randperm` on a CPU is MT19937 and a Fisher-Yates shuffle). Fails unless
the number of tokens is that of split.json, the published example is among the prompts, and the same draw for the
goldens has every golden's prompt among its candidates.

    python3 prompts.py --src RUST_SOURCES --models MODELS [--out prompts.json]
"""
import argparse
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
LENGTH, COUNT, SEED = 96, 30, 21  # those of evaluate.py
GOLDENS, CANDIDATES = {64: 11, 96: 12, 128: 13}, 110  # length: seed
SHUFFLE_SEED = 2  # of prepare_data.py, for held-out files


def walk_order(roots, path):
    """Sort key of a file: os.walk's order with sorted folders, a folder's own files first."""
    root = next(i for i, r in enumerate(roots) if path.startswith(r + "/"))
    *folders, file = path[len(roots[root]) + 1:].split("/")
    return root, [(1, name) for name in folders] + [(0, file)]


def held_out(src, split, tok):
    """All held-out tokens, as prepare_data.py writes them."""
    files = sorted(split["held_out_files"], key=lambda path: walk_order(split["roots"], path))
    random.Random(SHUFFLE_SEED).shuffle(files)
    bos, eos, parts = tok.token_to_id("[BOS]"), tok.token_to_id("[EOS]"), []
    for path in files:
        text = (src / path).read_bytes().decode().replace("\r\n", "\n")
        parts.append(np.array([bos] + tok.encode(text, add_special_tokens=False).ids + [eos], np.int32))
    return np.concatenate(parts)


def randperm(n, seed):
    """torch.randperm(n) of a CPU generator with this seed."""
    raw = np.random.MT19937()
    _, key, at, *_ = np.random.RandomState(seed).get_state()
    raw.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": at}}
    order = list(range(n))
    for i, draw in enumerate(raw.random_raw(n - 1).tolist()):
        j = i + draw % (n - i)
        order[i], order[j] = order[j], order[i]
    return order


def pick_prompts(held, tok, length, count, seed):
    """`evaluate.pick_prompts`: begin at a line start, hold no special token, and are not too monotonous."""
    ends = np.array([tok.decode([i]).endswith("\n") for i in range(tok.get_vocab_size())])
    special = min(tok.token_to_id(t.content) for t in tok.get_added_tokens_decoder().values() if t.special)
    starts, out = np.nonzero(ends[held[:-1]])[0] + 1, []
    for at in randperm(len(starts), seed):
        window = held[starts[at]:starts[at] + length].tolist()
        if len(window) == length and max(window) < special and len(set(window)) > length // 3:
            out.append(window)
        if len(out) == count:
            return out
    raise SystemExit("not enough prompts")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--src", type=Path, required=True, help="Rust sources (rust-web-src 1.96.0)")
    parser.add_argument("--models", type=Path, required=True, help="folder of k26-small, goldens.json, acceptance.json")
    parser.add_argument("--out", type=Path, default=HERE / "prompts.json")
    args = parser.parse_args()
    split = json.loads((HERE / "split.json").read_text())
    tok = Tokenizer.from_file(str(args.models / "k26-small" / "tokenizer.json"))
    held = held_out(args.src, split, tok)
    if len(held) != split["tokens_heldout"]:
        raise SystemExit(f"{len(held)} held-out tokens, split.json says {split['tokens_heldout']}: not these sources")
    prompts = pick_prompts(held, tok, LENGTH, COUNT, SEED)
    example = json.loads((args.models / "acceptance.json").read_text())["example"]["prompt"]
    if example not in [tok.decode(p) for p in prompts]:
        raise SystemExit("the example of acceptance.json is not among the prompts")
    candidates = {length: pick_prompts(held, tok, length, CANDIDATES, seed) for length, seed in GOLDENS.items()}
    for i, golden in enumerate(json.loads((args.models / "goldens.json").read_text())["goldens"]):
        if golden["prompt"] not in candidates[len(golden["prompt"])]:
            raise SystemExit(f"the prompt of golden {i} is not among the candidates")
    rows = ",\n  ".join(json.dumps(p, separators=(",", ":")) for p in prompts)
    args.out.write_text(f'{{"length": {LENGTH}, "seed": {SEED}, "prompts": [\n  {rows}\n]}}\n')
    print(f"{args.out}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
