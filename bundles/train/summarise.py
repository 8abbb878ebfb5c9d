#!/usr/bin/env python3
"""Collect the results into metrics.json and the two model cards.

    python3 summarise.py --data work --results results --models models
"""
import argparse
import json
import math
import os

import numpy as np
from tokenizers import Tokenizer

from data import load_tokens


def load(folder, name):
    path = os.path.join(folder, name)
    return json.load(open(path)) if os.path.exists(path) else None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="work")
    ap.add_argument("--results", default="results")
    ap.add_argument("--models", default="models")
    a = ap.parse_args()
    t, d = load(a.results, "train_target.json"), load(a.results, "train_drafter.json")
    ref, tri = load(a.results, "loss_reference.json"), load(a.results, "trigram.json")
    split = load(a.data, "split.json")
    acc, gold = load(a.models, "acceptance.json"), load(a.models, "goldens.json")
    f32 = load(a.results, "acceptance_float32.json")
    if f32:
        acc["float32_accumulators"] = {
            "note": "the same prompts with float32 sums, whose order differs between one row and many: where the two "
                    "best logits nearly tie, bf16 rounding lets either win, so a few outputs part from plain greedy "
                    "decoding",
            "modes": {k: {"tau": v["tau"], "outputs_equal_to_plain_greedy": v["outputs_equal_to_plain_greedy"],
                          "first_differences": v.get("first_differences")} for k, v in f32["modes"].items()}}
        export_json(os.path.join(a.models, "acceptance.json"), acc)
    tok = Tokenizer.from_file(os.path.join(a.data, "tokenizer.json"))
    held = load_tokens(a.data, "heldout")
    first = tok.token_to_id("[BOS]")
    size = np.array([len(tok.id_to_token(i)) if i < first else 0 for i in range(tok.get_vocab_size())])

    def row(loss, n):
        return {"loss_per_token": round(loss, 5), "perplexity": round(math.exp(loss), 4),
                "bits_per_byte": round(loss * n / math.log(2) / int(size[held[1:n + 1]].sum()), 5), "tokens": n}
    n = (len(held) - 1) // 1024 * 1024
    held_out = {"window": "non-overlapping windows of 1024 tokens, each from an empty cache; special tokens counted",
                "bf16": row(t["held_out_bf16"], n), "int4": row(t["held_out_int4"], n),
                "trigram": dict(row(tri["loss_per_token"], tri["tokens"]), kind=tri["kind"]),
                "int4_reference_arithmetic": row(ref["loss_per_token"], ref["tokens"]),
                "training_text_bf16_sample_loss": round(t["train_bf16_sample"], 4)}
    drop = ("out", "data", "steps", "no_compile", "eval_windows", "target")
    metrics = {
        "target": {"parameters": t["parameters"], "tensor_bytes": t["tensor_bytes"], "steps": t["steps"],
                   "tokens_seen": t["tokens_seen"], "epochs": round(t["epochs"], 2),
                   "train_seconds": round(t["train_seconds"], 1), "hardware": "one H200",
                   "settings": {k: v for k, v in t["settings"].items() if k not in drop}},
        "held_out": held_out,
        "expert_load_held_out": {"max_over_mean": [round(v, 3) for v in t["max_over_mean_load_held_out"]],
                                 "min_over_mean": [round(v, 3) for v in t["min_over_mean_load_held_out"]],
                                 "shares_by_moe_layer": t["expert_share_held_out_int4"]},
        "drafter": {"parameters": d["parameters"], "tensor_bytes": d["tensor_bytes"], "steps": d["steps"],
                    "blocks_seen": d["blocks_seen"], "generated_sequences": d["generated_sequences"],
                    "generated_tokens": d["generated_tokens"], "train_seconds": round(d["train_seconds"], 1),
                    "settings": {k: v for k, v in d["settings"].items() if k not in drop}},
        "acceptance_tau": {k: v["tau"] for k, v in acc["modes"].items()},
        "goldens": {"smallest_gap": gold["smallest_gap"], "count": len(gold["goldens"])},
        "data": {k: v for k, v in split.items() if k != "held_out_files"},
        "target_log": [r for r in t["log"] if r["step"] % 250 == 0],
        "drafter_log": [r for r in d["log"] if r["step"] % 1000 == 0],
    }
    export_json(os.path.join(a.models, "k26-small", "metrics.json"), metrics)
    h, modes = held_out, acc["modes"]
    taus = "\n".join(f"| {k.replace('_', ' ')} | {v['tau']:.2f} | {v['nodes_verified_per_round']:.0f} | "
                     f"{v['rounds']} | {v['outputs_equal_to_plain_greedy']} of {acc['prompts']} |"
                     for k, v in modes.items())
    sample = max(gold["goldens"], key=lambda g: g["distinct"])
    card = CARD.format(
        params=f"{t['parameters'] / 1e6:.1f}", mb=f"{t['tensor_bytes'] / 1e6:.1f}",
        train_tokens=f"{split['tokens_train'] / 1e6:.1f}",
        seen=f"{t['tokens_seen'] / 1e6:.0f}", epochs=f"{t['epochs']:.1f}", secs=f"{t['train_seconds']:.0f}",
        bl=f"{h['bf16']['loss_per_token']:.4f}", bp=f"{h['bf16']['perplexity']:.3f}",
        bb=f"{h['bf16']['bits_per_byte']:.4f}",
        il=f"{h['int4']['loss_per_token']:.4f}", ip=f"{h['int4']['perplexity']:.3f}",
        ib=f"{h['int4']['bits_per_byte']:.4f}",
        tl=f"{h['trigram']['loss_per_token']:.4f}", tp=f"{h['trigram']['perplexity']:.3f}",
        tb=f"{h['trigram']['bits_per_byte']:.4f}",
        rl=f"{h['int4_reference_arithmetic']['loss_per_token']:.4f}", rn=ref["tokens"],
        tr=f"{t['train_bf16_sample']:.3f}", held=f"{n}", files=split["files_held_out"],
        maxl=", ".join(f"{v:.2f}" for v in t["max_over_mean_load_held_out"]),
        minl=", ".join(f"{v:.2f}" for v in t["min_over_mean_load_held_out"]),
        gap=f"{gold['smallest_gap']:.3f}", prompt=sample["prompt_text"][-220:], text=sample["text"])
    open(os.path.join(a.models, "k26-small", "README.md"), "w").write(card)
    equal = [v["outputs_equal_to_plain_greedy"] for v in (f32 or acc)["modes"].values()]
    lohi = {"f32lo": min(equal), "f32hi": max(equal),
            "gapmax": max([x["plain_gap"] for v in (f32 or acc)["modes"].values() for x in v["first_differences"]],
                          default=0.0)}
    dcard = DCARD.format(params=f"{d['parameters'] / 1e6:.2f}", mb=f"{d['tensor_bytes'] / 1e6:.2f}",
                         blocks=f"{d['blocks_seen'] / 1e6:.0f}", gen=f"{d['generated_tokens'] / 1e6:.1f}",
                         secs=f"{d['train_seconds']:.0f}", taus=taus, prompts=acc["prompts"], new=acc["new_tokens"],
                         acc=acc["accumulators"], **lohi)
    open(os.path.join(a.models, "k26-small-dflash", "README.md"), "w").write(dcard)
    print(json.dumps({k: metrics[k] for k in ("held_out", "acceptance_tau", "goldens")}, indent=1))


def export_json(path, obj):
    with open(path, "w") as f:
        json.dump(obj, f, indent=1)
        f.write("\n")


CARD = """# k26-small

A language model of Kimi K2.6's architecture, small enough to decode on a CPU, trained on Rust source. It exists so
that an engine for the large model can run, test and compare on real weights in the published formats. It is no
assistant.

{params} M parameters, {mb} MB: MLA attention with the large model's head geometry (latent 512, nope 128, rope 64,
value 128; 4 heads), 4 layers (layer 0 dense), 32 routed experts of width 128 (top 4, sigmoid scores, selection bias,
weights normalised, times 2.0) and one shared expert, YaRN (theta 50000, factor 4 over 1024), separate head,
vocabulary 4096. RMSNorm epsilon 1e-5, the low-rank norms (`q_a_layernorm`, `kv_a_layernorm`) included. Tensor names
are the checkpoint's without the `language_model.` prefix. Routed experts: compressed-tensors `pack-quantized`, INT4
symmetric, group 32, bf16 scales; the rest bf16, `e_score_correction_bias` f32. With these scales q = -8 (a zero
nibble) does not occur: test that value elsewhere.

Tokenizer: byte-level BPE of 4080 entries and 16 special tokens (`[BOS]` 4080, `[EOS]` 4081, `<|mask|>` 4093, `[PAD]`
4095). Files were joined as `[BOS] text [EOS]`; prompts need no `[BOS]`. `tiktoken.model` and `tokenizer_config.json`
hold the same vocabulary in the large model's own format; with the pattern in `tokenizer.json` both give the same ids
on all held-out files (the large model's pattern has one more branch, for Han text).

## Results

Held-out files ({files} files, {held} tokens, windows of 1024 tokens from an empty cache, bf16 activations):

| weights | loss per token | perplexity | bits per byte |
|---|---:|---:|---:|
| bf16 (same run, experts not quantised) | {bl} | {bp} | {bb} |
| **INT4 (this folder)** | **{il}** | **{ip}** | **{ib}** |
| Kneser-Ney trigram, same training tokens | {tl} | {tp} | {tb} |

In the engine's reference arithmetic (float32, bf16 at the stated places) {rn} of these tokens give {rl} per token.
Loss on a sample of the training text: {tr}. Held-out files are whole files, but files of one project resemble each
other.

Expert load on held-out text, largest over mean, layers 1 to 3: {maxl}; smallest over mean: {minl}.

`../goldens.json` holds eight held-out prompts with 96 greedy tokens each; the smallest gap between best and second
logit is {gap}. `../acceptance.json` holds drafting results. `metrics.json` holds all numbers, settings and the
training log.

Greedy sample (end of a held-out prompt, then the continuation):

```
{prompt}
-----
{text}
```

## Training

One H200, {secs} s: {seen} M tokens seen ({epochs} passes over {train_tokens} M), 131072 tokens a step, length 1024,
then 2048. Muon on matrices, AdamW on embedding, head, router, norms and layer 0's gate; warm-up, constant, linear to
zero; dropout 0.15 on the branches. Load balance by the selection bias alone. The last third is quantisation-aware for
the routed experts: scale bf16(max|w| / 7), straight-through, the same function as the export, so the exported INT4
loses almost nothing. A longer run (46 passes, dropout 0.08) fitted the training text better and held-out text worse
(1.404 per token); it was dropped.

Data: the Rust library, compiler and tool sources as packaged by Debian (rust-web-src), MIT OR Apache-2.0, and the
crates vendored in that package that name both licences (training only). Files over 300 KB, duplicates and tables left
out; split by file.

Limits: knows Rust source and little else; lengths above 2048 were never trained; greedy continuations repeat
themselves sooner or later.
"""

DCARD = """# k26-small-dflash

A DFlash block drafter for `k26-small`: {params} M parameters, {mb} MB bf16. Block size 8 (7 drafted positions), 2
layers, hidden 256, 4 query and 2 key-value heads of 64, q and k norm, rotate-half RoPE (theta 50000, the target's
YaRN fields; cos and sin are not scaled, since mscale = mscale_all_dim; softmax scale 1/sqrt(64)). It taps the outputs
of target layers 1, 2 and 3 (0-based; the last is the residual stream before the final norm). Embedding and head are
the target's. Mask token 4093.

Trained on one H200 for {secs} s with {blocks} M blocks at random anchors: {gen} M tokens generated by the INT4 target
(64 % of the sequences greedy, the rest at temperatures 0.5 to 1) and 30 % real text. Labels sit at the same position;
position k weighs exp(-(k-1)/4).

## Acceptance

{prompts} held-out prompts of 96 tokens, {new} new tokens each, greedy, {acc} accumulators with bf16 rounding at the
engine's places. tau = tokens committed per round, the round's known token included. DDTree is pure best-first, so
budget 4 cannot hold the whole chain of 7.

| mode | tau | rows verified | rounds | output equals plain greedy |
|---|---:|---:|---:|---:|
{taus}

`../acceptance.json` holds acceptance by depth, and the same run with float32 accumulators: there {f32lo} to {f32hi}
of {prompts} outputs equal plain greedy decoding, because the order of float32 sums differs between one row and many,
the bf16 rounding after them carries such differences on, and near ties then fall either way (largest gap at a first
difference: {gapmax:.3f}). With float64 sums nothing but the method is left, and all outputs are equal.
"""

if __name__ == "__main__":
    main()
