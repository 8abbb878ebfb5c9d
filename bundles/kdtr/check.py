"""Compare the files with what the code makes: weights bit for bit, tokens exactly, gaps within the stated tolerance."""
import json

import numpy as np

from . import acceptance, cases, drafts, formats, routing, small, tiny
from .dflash import Drafter
from .format import Bundle, load_tensors
from .numerics import bf16_values
from .reference import Model, greedy, replay

LOGP_TOLERANCE = 1e-5  # of made-up marginals: libm's last bits
CASE_TOLERANCE = 1e-6  # relative to the largest value, sums are float64
STAGE_TOLERANCE = 0.05  # relative to the largest value, bf16 roundings may fall the other way


class Mismatch(Exception):
    """The text says what differs, where, and by how much."""


def same_weights(found, want):
    """Two {name: Weight}: formats, shapes and bits."""
    for name in sorted(found.keys() | want.keys()):
        if name not in found or name not in want:
            raise Mismatch(f"weight {name} is only in the {'file' if name in found else 'generator'}")
        a, b = found[name], want[name]
        if a.entry() != b.entry():
            raise Mismatch(f"weight {name}: {a.entry()}, expected {b.entry()}")
        for part in ("data", "scale"):
            x, y = getattr(a, part), getattr(b, part)
            if (x is None) != (y is None) or x is not None and (x.dtype != y.dtype or x.tobytes() != y.tobytes()):
                raise Mismatch(f"weight {name}: the {part} differs")


def same_golden(i, golden, tokens, gap, tolerance):
    """The file's golden against a fresh greedy decoding."""
    if len(golden.tokens) != len(tokens) or (golden.tokens != tokens).any():
        at = int((golden.tokens != tokens).argmax())
        raise Mismatch(f"golden {i}: token {at} is {golden.tokens[at]}, the reference decodes {tokens[at]}")
    apart = np.abs(golden.gap - gap)
    if not apart.max() <= tolerance:
        raise Mismatch(f"golden {i}: gap {int(apart.argmax())} is off by {apart.max():.4f}, tolerance {tolerance}")


def decode_goldens(bundle):
    """Decode every golden with the bundle's own weights."""
    model, limits = Model(bundle.config, bundle.settings, bundle.weights), bundle.settings.get("gap_tolerances")
    for i, golden in enumerate(bundle.goldens):
        limit = limits[i] if limits else bundle.settings["gap_tolerance"]
        same_golden(i, golden, *greedy(model, golden.prompt, len(golden.tokens)), limit)
    return model


def check_tiny(path, kind, _):
    bundle = Bundle.read(path)
    if bundle.config != tiny.CONFIG:
        raise Mismatch("config differs from the generator's")
    same_weights(bundle.weights, tiny.weights(kind))
    if len(bundle.goldens) != len(tiny.PROMPT_LENGTHS):
        raise Mismatch(f"{len(bundle.goldens)} goldens, expected {len(tiny.PROMPT_LENGTHS)}")
    for i, (golden, seed) in enumerate(zip(bundle.goldens, bundle.settings["prompt_seeds"])):
        if golden.prompt.tolist() != tiny.prompt_of(seed, tiny.PROMPT_LENGTHS[i]).tolist():
            raise Mismatch(f"golden {i}: the prompt is not that of seed {seed}")
        ids, logp = drafts.record(golden.tokens, bundle.config["vocab_size"], i)
        if golden.draft_ids is None or (golden.draft_ids != ids).any():
            raise Mismatch(f"golden {i}: recorded draft ids differ")
        if not np.abs(golden.draft_logp - logp).max() <= LOGP_TOLERANCE:
            raise Mismatch(f"golden {i}: recorded log-probabilities differ by more than {LOGP_TOLERANCE}")
    decode_goldens(bundle)
    return "weights, goldens and drafts agree"


def check_small(path, _, models):
    bundle = Bundle.read(path)
    if not models.is_dir():
        decode_goldens(bundle)
        return f"goldens agree; weights checked by their sums only, since there is no folder {models}"
    config, drafter_config, weights = small.read_models(models)
    if (bundle.config, bundle.drafter_config) != (config, drafter_config):
        raise Mismatch("config differs from the checkpoint's")
    same_weights(bundle.weights, weights)
    if (bundle.tokenizer, bundle.vocabulary) != small.read_tokenizer(models / small.TARGET):
        raise Mismatch("tokenizer differs from the checkpoint's")
    decode_goldens(bundle)
    return "weights, tokenizer and goldens agree"


def same_arrays(found, want, tolerance):
    """Two {name: array}: integers and bit patterns exactly, floats relative to the largest finite value."""
    for name in sorted(found.keys() | want.keys()):
        if name not in found or name not in want:
            raise Mismatch(f"{name} is only in the {'file' if name in found else 'generator'}")
        a, b = found[name], want[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Mismatch(f"{name}: {a.dtype} {a.shape}, expected {b.dtype} {b.shape}")
        if a.dtype != np.float32:
            equal = (a == b).all()
        else:
            finite = np.isfinite(b)
            largest = np.abs(b[finite]).max(initial=0)
            equal = (a[~finite] == b[~finite]).all() and (np.abs(a[finite] - b[finite]) <= tolerance * largest).all()
        if not equal:
            raise Mismatch(f"{name}: values differ")


def check_cases(path, _, __):
    same_arrays(load_tensors(path)[0], cases.generate(), CASE_TOLERANCE)
    return "all cases agree"


def check_formats(path, _, __):
    """Prompt, codes and scales exactly, logits within the tolerance that the file states."""
    found, want = load_tensors(path)[0], formats.generate()
    split = lambda arrays, which: {n: a for n, a in arrays.items() if n.endswith("logits") == which}  # noqa: E731
    same_arrays(split(found, False), split(want, False), 0)
    same_arrays(split(found, True), split(want, True), 1)  # names and shapes
    for name, logits in split(want, True).items():
        apart = formats.apart(found[name], logits)
        if not apart <= formats.TOLERANCE:
            raise Mismatch(f"{name}: logits are off by {apart:.5f}, tolerance {formats.TOLERANCE}")
    return "all cases agree"


def check_dflash(path, _, __):
    """Every stage from the stored features on; needs the bundle beside the file."""
    found = load_tensors(path)[0]
    bundle = Bundle.read(path.parent / "k26-small-int4.kdtr")
    drafter = Drafter(bundle.drafter_config, bundle.weights, Model(bundle.config, bundle.settings, bundle.weights))
    want = small.dflash_stages(drafter, found["dflash.features"], *(int(found[f"dflash.{n}"][0])
                                                                    for n in ("bonus", "committed")))
    same_arrays(widen(found), widen(want), STAGE_TOLERANCE)
    return "all stages agree"


def check_acceptance(path, _, models):
    """The prompts, the published totals where they are at hand, and some prompts decoded anew."""
    found = load_tensors(path)[0]
    if (found["prompts"] != acceptance.read_prompts()).any():
        raise Mismatch(f"the prompts are not those of {acceptance.PROMPTS.name}")
    published = models / acceptance.PUBLISHED
    modes = json.loads(published.read_text())["modes"] if published.is_file() else {}
    for budget, rounds, committed in zip(found["budgets"].tolist(), found["rounds"], found["committed"]):
        totals = (int(rounds.sum()), int(committed.sum()))
        want = modes.get(acceptance.mode(budget))
        if want and totals != (want["rounds"], want["tokens_committed"]):
            raise Mismatch(f"budget {budget}: rounds and tokens {totals} are not the published ones")
    target, drafter = acceptance.twin(Bundle.read(path.parent / "k26-small-int4.kdtr"))
    for at, budget in enumerate(found["budgets"].tolist()):
        i = at * len(found["prompts"]) // len(found["budgets"])  # another prompt for each budget
        prompt, tokens = found["prompts"][i], found["tokens"][i]
        if (replay(target, prompt, tokens)[0] != tokens).any():
            raise Mismatch(f"prompt {i}: the reference decodes other tokens")
        have = (int(found["rounds"][at, i]), int(found["committed"][at, i]))
        again = acceptance.count(target, drafter, prompt, budget)
        if have != again:
            raise Mismatch(f"budget {budget}, prompt {i}: rounds and tokens {have}, the reference counts {again}")
    return "prompts agree, and the counts of one prompt a budget" + ("" if modes else f"; there is no {published}")


def check_routing(path, _, __):
    """Generated anew; no choice may differ."""
    found, again = load_tensors(path)[0], routing.generate(Bundle.read(path.parent / "k26-small-int4.kdtr"))
    for name, values in again.items():
        if found[name].shape != values.shape or (found[name] != values).any():
            raise Mismatch(f"{name} differs from what the reference's routers choose")
    return f"{again['ids'].size} choices agree"


def widen(arrays):
    """bf16 to f32, so that values compare. Ids of unlikely drafts may swap: only the best of each depth is kept."""
    wide = {n: bf16_values(a) if a.dtype == np.uint16 else a for n, a in arrays.items()}
    wide["dflash.ids"] = wide["dflash.ids"][:, :1]
    return wide

