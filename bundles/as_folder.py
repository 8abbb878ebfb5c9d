#!/usr/bin/env python3
"""Write a bundle as a checkpoint folder in the published form of Kimi K2.6, a miniature of the real thing.

    python3 bundles/as_folder.py bundles/k26-small-int4.kdtr FOLDER [--drafter FOLDER]

The folder has one shard a layer and one for the ends, an index, the names and the packing of the published checkpoint,
and where the bundle has a vocabulary `tiktoken.model` with the settings beside it and a chat template. The bundle's
drafter goes to a folder of its own.
"""
import argparse
import json
from pathlib import Path

import numpy as np

from full_size import TEXT
from kdtr import format as kdtr

PREFIX = "language_model."
TEMPLATE = Path(__file__).parent.parent / "tests" / "support" / "chat_template.jinja"


def stored(name, weight):
    """The tensors of a weight."""
    if weight.format != "w4a16":
        return {name: weight.data}
    words = np.ascontiguousarray(weight.data).view("<i4")
    return {name + "_packed": words, name + "_scale": weight.scale, name + "_shape": np.array(weight.shape, np.int32)}


def shard_of(name, layers):
    return int(name.split(".")[2]) if name.startswith("model.layers.") else layers


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def target(bundle, folder):
    folder.mkdir(parents=True)
    layers = bundle.config["num_hidden_layers"]
    shards, weight_map, total = [{} for _ in range(layers + 1)], {}, 0
    for name, weight in bundle.weights.items():
        if not name.startswith("drafter."):
            shards[shard_of(name, layers)] |= stored(PREFIX + name, weight)
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):06}.safetensors"
        kdtr.save_tensors(folder / file, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    text = dict(bundle.config)
    if any(weight.format == "w4a16" for weight in bundle.weights.values()):
        text["quantization_config"] = TEXT["quantization_config"]
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    write_json(folder / "config.json", outer)
    write_json(folder / "generation_config.json", {"eos_token_id": bundle.settings["stop_token_ids"]})
    if bundle.vocabulary is not None:
        (folder / "tiktoken.model").write_bytes(bundle.vocabulary)
        special = {str(i): {"content": t, "special": True} for t, i in bundle.tokenizer["special_tokens"].items()}
        write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": special})
        split = {"type": "Split", "pattern": {"Regex": bundle.tokenizer["pattern"]}, "behavior": "Isolated"}
        write_json(folder / "tokenizer.json", {"pre_tokenizer": split})
        (folder / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())


def drafter(bundle, folder):
    folder.mkdir(parents=True)
    own = {name.removeprefix("drafter."): w.data for name, w in bundle.weights.items() if name.startswith("drafter.")}
    kdtr.save_tensors(folder / "model.safetensors", own, {"format": "pt"})
    write_json(folder / "config.json", bundle.drafter_config)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path, help="must not exist")
    parser.add_argument("--drafter", type=Path, help="write the bundle's drafter here")
    args = parser.parse_args()
    bundle = kdtr.Bundle.read(args.bundle)
    if args.drafter and bundle.drafter_config is None:
        parser.error(f"{args.bundle} holds no drafter")
    target(bundle, args.folder)
    if args.drafter:
        drafter(bundle, args.drafter)


if __name__ == "__main__":
    main()
