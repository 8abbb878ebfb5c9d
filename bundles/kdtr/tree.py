"""Draft trees: the best-first builder, the greedy walk, and the decoding loop that uses them.

A tree of n nodes is two arrays: token and parent of nodes 1..n (node i at index i - 1). Node 0 is the root, the bonus
token that is already certain. Parents come before children.

Builder. The score of a node is, in float32, the score of its parent plus the log-probability of its token at its depth
(0 for the root). Starting from the best token of depth 1, the frontier's candidate with the largest score is taken;
equal scores go to the smaller parent node, then to the smaller rank. Taking (parent, depth, rank) puts its next sibling
(parent, depth, rank + 1) and its best child (itself, depth + 1, 0) into the frontier. A candidate whose score is -inf
is never taken. Only the first min(K, budget) columns matter; a NaN in one of them is an error.
"""
import heapq

import numpy as np

from .reference import best_and_gap


def best_first(ids, logp, budget):
    """ids i32 [L, K], logp f32 [L, K], descending along K -> tokens, parents, depths i32 [n] and scores f32 [n]."""
    depths, columns = logp.shape
    columns = min(columns, budget)
    if np.isnan(logp[:, :columns]).any():
        depth, rank = np.argwhere(np.isnan(logp[:, :columns]))[0]
        raise ValueError(f"the log-probability at depth {depth + 1}, rank {rank} is NaN")
    out, frontier = [], []

    def push(score, parent, depth, rank):
        if score > -np.inf:
            heapq.heappush(frontier, (-score, parent, rank, depth))

    score_of = [np.float32(0)]
    if columns and depths:
        push(score_of[0] + logp[0, 0], 0, 1, 0)
    while frontier and len(out) < budget:
        negative, parent, rank, depth = heapq.heappop(frontier)
        out.append((ids[depth - 1, rank], parent, depth))
        score_of.append(-negative)
        if rank + 1 < columns:
            push(score_of[parent] + logp[depth - 1, rank + 1], parent, depth, rank + 1)
        if depth < depths:
            push(score_of[-1] + logp[depth, 0], len(out), depth + 1, 0)
    tokens, parents, depth = np.array(out, np.int32).reshape(-1, 3).T.copy()
    return tokens, parents, depth, np.array(score_of[1:], np.float32)


def chain(ids, logp):
    """The best token of each depth, one path."""
    length = len(ids)
    scores = np.add.accumulate(logp[:, 0], dtype=np.float32)
    return ids[:, 0].copy(), np.arange(length, dtype=np.int32), np.arange(1, length + 1, dtype=np.int32), scores


def visibility(parents):
    """[n] -> bool [n + 1, n + 1]: row i sees the root, its ancestors and itself."""
    see = np.eye(len(parents) + 1, dtype=bool)
    for i, parent in enumerate(parents, 1):
        see[i] |= see[parent]
    return see


def accept(tokens, parents, picks):
    """Walk from the root by the target's pick [n + 1] at each node -> node numbers of the path, the root included.

    Of several equal siblings the one with the smallest number is taken.
    """
    children = {}
    for i, (parent, token) in enumerate(zip(parents, tokens), 1):
        children.setdefault((int(parent), int(token)), i)
    path = [0]
    while (path[-1], int(picks[path[-1]])) in children:
        path.append(children[path[-1], int(picks[path[-1]])])
    return np.array(path, np.int32)


class RecordedDrafter:
    """Marginals recorded in a golden: entry p is used when the bonus token is the golden's token p."""

    taps, block = (), 0

    def __init__(self, golden):
        self.ids, self.logp, self.prompt = golden.draft_ids, golden.draft_logp, len(golden.prompt)
        self.block = self.ids.shape[1] + 1

    def ingest(self, features, start):
        pass

    def propose(self, bonus, committed):
        """Marginals ids, logp [L, K] for the positions after the bonus, which sits at position `committed`."""
        return self.ids[committed - self.prompt], self.logp[committed - self.prompt]


def decode(model, drafter, prompt, count, budget):
    """Greedy decoding with a draft tree each round; budget None is the plain chain.

    Returns tokens [count], and the number of committed tokens of each round (the bonus included).
    """
    width = max(budget or 0, drafter.block) + 1
    cache = model.cache(len(prompt) + count + drafter.block + width)
    logits, features = model.causal(prompt, cache, 0, drafter.taps)
    drafter.ingest(features, 0)
    committed, out, lengths = len(prompt), [int(logits[-1].argmax())], []
    while len(out) < count:
        ids, logp = drafter.propose(out[-1], committed)
        tokens, parents, depths, _ = chain(ids, logp) if budget is None else best_first(ids, logp, budget)
        rows = np.concatenate((out[-1:], tokens)).astype(np.int32)
        positions = committed + np.concatenate(([0], depths))
        logits, features = model.forward(rows, positions, visibility(parents), cache, committed, drafter.taps)
        picks = best_and_gap(logits)[0]
        path = accept(tokens, parents, picks)
        for layer in cache:  # fancy indexing copies before it writes; in place only ascending order is safe
            layer[committed:committed + len(path)] = layer[committed + path]
        drafter.ingest(None if features is None else features[path], committed)
        committed += len(path)
        out += [int(t) for t in rows[path[1:]]] + [int(picks[path[-1]])]
        lengths.append(len(path))
    return np.array(out[:count], np.int32), lengths
