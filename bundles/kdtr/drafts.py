"""Recorded drafts: what a drafter might have proposed at each position of a golden, the right token at known ranks.

Entry p holds the marginals for the round whose bonus token is golden token p; depth d speaks about token p + d.
"""
import numpy as np

from .tree import RecordedDrafter, decode

DEPTH, WIDTH = 7, 16
MISS = -1
# Rank of the right token at depths 1..7; entry p of golden i uses row (3 p + p div 8 + i) mod 8.
RANKS = [
    [0, 0, 0, 0, 0, 0, 0],
    [0, 1, 0, 0, 1, 0, 0],
    [2, 0, 0, MISS, 0, 0, 0],
    [MISS, 0, 0, 0, 0, 0, 0],
    [0, 0, MISS, 0, 0, 1, 0],
    [1, 0, 0, 0, 2, 0, 0],
    [0, 0, 0, 1, 0, 0, MISS],
    [0, MISS, 1, 0, 3, 0, 0],
]
BUDGETS = (4, 8, 16, 64)


def record(tokens, vocabulary, golden):
    """tokens i32 [P] -> ids i32 [P, 7, 16] and log-probabilities f32 [P, 7, 16], descending."""
    rng, count = np.random.default_rng([golden, len(tokens)]), len(tokens)
    ids, logp = np.empty((count, DEPTH, WIDTH), np.int32), np.empty((count, DEPTH, WIDTH), np.float32)
    for p in range(count):
        for d in range(DEPTH):
            ids[p, d] = rng.choice(vocabulary, WIDTH, replace=False)
            at = p + d + 1
            if at < count:
                place(ids[p, d], tokens[at], RANKS[(3 * p + p // 8 + golden) % len(RANKS)][d], vocabulary)
            logp[p, d] = head(rng, tie=(p + d) % 11 == 0)
    return ids, logp


def place(row, token, rank, vocabulary):
    """Put `token` at `rank` of a row of different ids, or take it out for MISS."""
    there = np.nonzero(row == token)[0]
    if len(there) and rank == MISS:
        row[there[0]] = next(t for t in range(vocabulary) if t != token and t not in row)
    elif len(there):
        row[there[0]], row[rank] = row[rank], token
    elif rank != MISS:
        row[rank] = token


def head(rng, tie):
    """The 16 largest log-probabilities of a made-up distribution; with `tie` ranks 1 and 2 are equal."""
    decay, mass = rng.uniform(0.7, 1.4), rng.uniform(0.9, 0.99)
    p = np.exp(-decay * np.arange(WIDTH) ** 0.8) * rng.uniform(0.9, 1.0, WIDTH)
    p = np.sort(p)[::-1]
    out = np.log(mass * p / p.sum()).astype(np.float32)
    if tie:
        out[1] = out[2]
    return out


def check_rounds(model, goldens, log):
    """Decode with the recorded drafts: the plain output token for token, and rounds of every length from 1 to 8."""
    for budget in (None, *BUDGETS):
        seen = np.zeros(DEPTH + 2, int)
        for i, golden in enumerate(goldens):
            out, lengths = decode(model, RecordedDrafter(golden), golden.prompt, len(golden.tokens), budget)
            if (out != golden.tokens).any():
                at = int((out != golden.tokens).argmax())
                raise SystemExit(f"golden {i}: decoding with budget {budget} changes token {at}")
            np.add.at(seen, lengths, 1)
        name = "chain" if budget is None else f"budget {budget}"
        log(f"  {name}: {seen.sum()} rounds, by committed tokens 1..{DEPTH + 1}: {seen[1:].tolist()}")
        if budget == max(BUDGETS) and not seen[1:].all():
            raise SystemExit(f"recorded drafts with {name} leave a round length unused: {seen[1:].tolist()}")
