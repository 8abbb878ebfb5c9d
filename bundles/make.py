#!/usr/bin/env python3
"""Write the shipped bundles and cases, or check that the files are what this code makes.

    python3 bundles/make.py [--only NAME]... [--check] [--models FOLDER] [--out FOLDER]
"""
import argparse
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small; threads only cost time

from kdtr import acceptance, cases, check, formats, routing, small, tiny  # noqa: E402
from kdtr.format import Bundle, FormatError, save_tensors  # noqa: E402

CASES = {"format": "kdtr-cases", "version": "1"}


def write_tiny(path, kind, _):
    tiny.generate(kind).write(path)


def write_small(path, _, models):
    if not models.is_dir():
        raise SystemExit(f"{path.name} is packed from a folder of models; {models} does not exist (see --models)")
    small.generate(models).write(path)


def write_cases(path, _, __):
    save_tensors(path, cases.generate(), CASES)


def write_formats(path, _, __):
    save_tensors(path, formats.generate(), CASES)


def write_dflash(path, _, __):
    save_tensors(path, small.dflash_cases(Bundle.read(path.parent / "k26-small-int4.kdtr")), CASES)


def write_acceptance(path, _, models):
    if not models.is_dir():
        raise SystemExit(f"{path.name} holds the published figures of {models}, which does not exist (see --models)")
    save_tensors(path, acceptance.generate(Bundle.read(path.parent / "k26-small-int4.kdtr"), models), CASES)


def write_routing(path, _, __):
    save_tensors(path, routing.generate(Bundle.read(path.parent / "k26-small-int4.kdtr")), CASES)


# name -> (file, write, check, argument of both)
PRODUCTS = {f"k26-tiny-{k}": (f"k26-tiny-{k}.kdtr", write_tiny, check.check_tiny, k) for k in tiny.KINDS} | {
    "k26-small-int4": ("k26-small-int4.kdtr", write_small, check.check_small, None),
    "kernel-cases": ("kernel-cases.safetensors", write_cases, check.check_cases, None),
    "format-cases": ("format-cases.safetensors", write_formats, check.check_formats, None),
    "dflash-cases": ("dflash-cases.safetensors", write_dflash, check.check_dflash, None),
    "acceptance-cases": ("acceptance-cases.safetensors", write_acceptance, check.check_acceptance, None),
    "routing-cases": ("routing-cases.safetensors", write_routing, check.check_routing, None),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", choices=PRODUCTS, metavar="NAME", help=", ".join(PRODUCTS))
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    parser.add_argument("--models", type=Path, default=HERE.parent.parent / "shared" / "models",
                        help="folder with k26-small, k26-small-dflash, goldens.json, acceptance.json (default: beside "
                        "the checkout)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the files (default: the one of this script)")
    args = parser.parse_args()
    failed = False
    for name in args.only or PRODUCTS:
        file, write, compare, argument = PRODUCTS[name]
        start, path = time.time(), args.out / file
        if args.check:
            try:
                said = compare(path, argument, args.models)
            except (check.Mismatch, FormatError, OSError) as err:
                failed, said = True, f"FAILED: {err}"
        else:
            write(path, argument, args.models)
            said = f"{path.stat().st_size:,} bytes"
        print(f"{file}: {said} ({time.time() - start:.0f} s)", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
