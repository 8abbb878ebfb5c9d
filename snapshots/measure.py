#!/usr/bin/env python3
"""Writes the records of snapshots/: times of our operators and, in the same run, of PyTorch's.

    python3 snapshots/measure.py KDTREE OUT [RECORD ...]

KDTREE is the program (or `dist/kdtree`), OUT a folder; all records where none is named. Beside each of `dense` the
peers run right before and right after: `F.linear` in bf16 (cuBLAS) and `_weight_int4pack_mm` (groups of 32), by the
rules of docs/bench.md: weights in several copies beyond four times the L2, one graph of at least 32 runs, median of 15
replays. Without PyTorch the peers are left out, and said to be.
"""

import json
import pathlib
import statistics
import subprocess
import sys

RECORDS = {
    "experts": "experts",
    "experts-same": "experts --routing same --m 8,64,512",
    "experts-recorded": "experts --routing recorded --m 1,8,64",
    "experts-shared": "experts --shared beside --m 1,2,8,16,64",
    "experts-shared-after": "experts --shared after --m 1,2,8,16,64",
    "dense": "w4a16 bf16 --m 1,8,16,32,64,512",
    "prompts": "bf16 w4a16 --shape 7168x8192,12288x1536,1536x7168 --m 128,512,2048 --variant wgmma",
    "mla-attention": "mla",
    "mla-attention-f8": "mla --kv f8",
    "absorb": "absorb",
    "tree-builder": "tree topk pick accept commit",
    "commit-f8": "commit --kv f8",
    "rest": "gate norm swiglu combine embed moves rope block route sort repack f32 w4a16-f32",
}
SHAPES = [(7168, 8192), (12288, 1536), (1536, 7168), (576, 7168), (4096, 7168), (7168, 2048), (163840, 7168)]
ROWS = [1, 8, 16, 32, 64, 512]
REPLAYS, RUNS, GROUP = 15, 32, 32


def main():
    kdtree, out, *names = sys.argv[1:]
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    unknown = [name for name in names if name not in RECORDS]
    if unknown:
        sys.exit(f"no record {unknown[0]!r}; there are {', '.join(RECORDS)}")
    for name in names or RECORDS:
        command = f"bench kernel {RECORDS[name]} --json"
        print(f"{name}: kdtree {command}", flush=True)
        before = peers() if name == "dense" else None
        found = subprocess.run([kdtree, *command.split()], stdout=subprocess.PIPE, text=True)
        if found.returncode:
            sys.exit(f"{name}: `kdtree {command}` ended with {found.returncode}")
        record = json.loads(found.stdout)
        if before is not None:
            after = peers()
            record["peers"] = [{**a, "us_before": a["us"], "us": b["us"]} for a, b in zip(before, after)]
        write(out / f"{name}.json", f"kdtree {command}", record)


def write(path, command, record):
    """One case a line."""
    head = {"device": f"one {record['device']['name'].removeprefix('NVIDIA ')}", "ptx": record["device"]["ptx"]}
    head |= {"command": command, "memory_gb_s": record["memory_gb_s"], "replays": record["replays"]}
    lists = {key: record[key] for key in ("cases", "peers") if key in record}
    fields = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, cases in lists.items():
        lines = ",\n".join("  " + json.dumps(rounded(case), sort_keys=True) for case in cases)
        fields.append(f" {json.dumps(key)}: [\n{lines}\n ]")
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def rounded(case):
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in case.items()}


def peers():
    try:
        import torch
    except ImportError:
        print("no PyTorch: no peers", flush=True)
        return None
    torch.manual_seed(26)
    cases = []
    for n, k in SHAPES:
        for operator, weights in (("bf16", cublas(torch, n, k)), ("w4a16", int4pack(torch, n, k))):
            for m in ROWS if operator == "bf16" else ROWS[:-1]:
                x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                us = timed(torch, [lambda multiply=multiply: multiply(x) for multiply in weights])
                cases.append({"operator": operator, "shape": f"{n} x {k}", "rows": m, "us": us})
            del weights
            torch.cuda.empty_cache()
    return cases


def copies(torch, weight_bytes):
    """As many as are beyond four times the L2 together; at most 64."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return min(64, 4 * l2 // weight_bytes + 1)


def cublas(torch, n, k):
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    all_ = [weight.clone() for _ in range(copies(torch, 2 * n * k))]
    return [lambda x, w=w: torch.nn.functional.linear(x, w) for w in all_]


def int4pack(torch, n, k):
    codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8 if k % 128 == 0 else 4)
    scales = torch.randn(k // GROUP, n, 2, device="cuda").to(torch.bfloat16)
    all_ = [(packed.clone(), scales.clone()) for _ in range(copies(torch, n * k * 9 // 16))]
    return [lambda x, w=w, s=s: torch.ops.aten._weight_int4pack_mm(x, w, GROUP, s) for w, s in all_]


def timed(torch, runs):
    """Microseconds of a run, as `kdtree bench kernel` times them."""
    count = -(-RUNS // len(runs)) * len(runs)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        runs[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                runs[i % len(runs)]()
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


if __name__ == "__main__":
    main()
