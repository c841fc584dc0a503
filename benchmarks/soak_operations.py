"""The operations of benchmarks/soak.py: calls of `generate`, and edits of the caches in its pool.

Each operation draws its parameters from the given `random.Random`, compares every answer with the uncompiled model,
and returns the number of compared tokens. A difference raises Difference.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from soak_faults import interrupted_step
from soak_state import CachePair, Difference, Soak, a_prompt, some_text
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, LogitsProcessor

from specache_compile.compat import cache_of, with_cache
from specache_compile.runtime.held import HeldTensor

# Logits of the two models are this near by far; where noise of this size changes the uncompiled model's own tokens,
# rounding decides them.
ROUNDING = 1e-4


# Calls of generate


class Noise(LogitsProcessor):
    """Moves logits by about ROUNDING, without a draw from torch's own generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + ROUNDING * torch.randn(scores.shape, generator=self.generator, device="cpu").to(scores.device)


def generate(soak: Soak, draw: random.Random, ids: Tensor, pair: CachePair | None = None, **how: Any) -> int:
    """Both models' tokens for one prompt, or on `pair`'s caches; a Difference where they are not equal and it is not
    rounding that decides them."""
    seed = draw.getrandbits(31)
    how |= {"max_new_tokens": draw.randint(1, soak.sizes.new), "eos_token_id": draw.choice((None, 7))}
    before = copy.deepcopy(pair.theirs) if pair else None

    def run(model: LlamaForCausalLM, **more: Any) -> Any:
        torch.manual_seed(seed)
        cache = pair.ours if pair and model is soak.twin else copy.deepcopy(before)
        return model.generate(ids, **with_cache(cache), return_dict_in_generate=True, **how, **more)

    ours, theirs = run(soak.twin), run(soak.model)
    if pair:
        pair.theirs, pair.text = cache_of(theirs), theirs.sequences[:, :-1]
    else:
        soak.note_dropped(cache_of(ours))
    soak.facts["calls that ended uncompiled"] += not isinstance(cache_of(ours).layers[0].keys, HeldTensor)
    rows = different_rows(ours.sequences, theirs.sequences)
    if rows:
        noisy = (run(soak.model, logits_processor=[Noise(trial)]) for trial in range(8))
        by_rounding = set().union(*(different_rows(tried.sequences, theirs.sequences) for tried in noisy))
        if not rows <= by_rounding:
            texts = (f"\n{name}: {made.sequences.tolist()}" for name, made in (("ours", ours), ("uncompiled", theirs)))
            raise Difference(f"the tokens of rows {sorted(rows)} differ" + "".join(texts))
        soak.facts["rows that rounding decides"] += len(rows)
        if pair:
            soak.remove(pair)
    return theirs.sequences[:, ids.shape[1] :].numel()


def different_rows(a: Tensor, b: Tensor) -> set[int]:
    width = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (a, b))
    return set((a != b).any(1).nonzero().flatten().tolist())


def greedy(soak: Soak, draw: random.Random) -> int:
    return generate(soak, draw, a_prompt(soak, draw), do_sample=False)


def sampled(soak: Soak, draw: random.Random) -> int:
    several = draw.choice((1, 1, 2, 3))
    ids = a_prompt(soak, draw, max(1, soak.sizes.rows // several))
    return generate(soak, draw, ids, do_sample=True, temperature=1.5, top_k=20, num_return_sequences=several)


def beams(soak: Soak, draw: random.Random) -> int:
    width = draw.randint(2, 4)
    how = {"num_beams": width, "num_return_sequences": draw.randint(1, width), "do_sample": draw.random() < 0.3}
    return generate(soak, draw, a_prompt(soak, draw, max(1, soak.sizes.rows // width)), **how)


def left_padded(soak: Soak, draw: random.Random) -> int:
    ids = a_prompt(soak, draw)
    mask = torch.ones_like(ids)
    for row in range(1, ids.shape[0]):
        mask[row, : draw.randrange(ids.shape[1])] = 0
    return generate(soak, draw, ids * mask, attention_mask=mask, do_sample=False)


def prompt_lookup(soak: Soak, draw: random.Random) -> int:
    ids = some_text(draw, 1, draw.randint(4, 60)).repeat(1, draw.randint(1, 5))
    return generate(soak, draw, ids, do_sample=False, prompt_lookup_num_tokens=draw.randint(2, 6))


def assisted(soak: Soak, draw: random.Random) -> int:
    return generate(soak, draw, a_prompt(soak, draw, 1), do_sample=False, assistant_model=soak.assistant)


# Caches of the pool


def decode(soak: Soak, draw: random.Random) -> int:
    pair = soak.pick(draw)
    return sum(soak.step(pair, some_text(draw, len(pair.text), 1)) for _ in range(draw.randint(1, 8)))


def extend(soak: Soak, draw: random.Random) -> int:
    pair = soak.pick(draw)
    return soak.step(pair, some_text(draw, len(pair.text), draw.randint(2, 70)))


def verification(soak: Soak, draw: random.Random) -> int:
    """A draft that ours alone makes and takes back; then what verifies it, some of whose tokens are rejected."""
    pair = soak.pick(draw)
    drafted = draw.randint(1, 40)
    for _ in range(drafted):
        soak.twin(some_text(draw, len(pair.text), 1), **with_cache(pair.ours), use_cache=True)
    pair.ours.crop(-drafted)
    tokens = soak.step(pair, some_text(draw, len(pair.text), drafted + 1))
    pair.crop(draw.randint(0, drafted))
    return tokens


def turn(soak: Soak, draw: random.Random) -> int:
    """A turn of a chat: generate goes on with a cache of the pool."""
    pair = soak.pick(draw)
    ids = torch.cat([pair.text, some_text(draw, len(pair.text), draw.randint(1, 40))], 1)
    # Not the mask that `generate` infers from padding tokens in the text: the other steps of the cache see them all.
    return generate(soak, draw, ids, pair, do_sample=False, attention_mask=torch.ones_like(ids))


def crop(soak: Soak, draw: random.Random) -> int:
    pair = soak.pick(draw)
    pair.crop(draw.randrange(min(pair.text.shape[1], draw.choice((8, 80, 600)))))
    return 0


def edit_rows(pair: CachePair, rows: list[int], way: Callable[[DynamicCache], object]) -> int:
    way(pair.ours)
    way(pair.theirs)
    pair.text = pair.text[rows]
    return 0


def some_rows(pair: CachePair, draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(len(pair.text)) for _ in range(count)]


def select(soak: Soak, draw: random.Random) -> int:
    pair = soak.pick(draw)
    rows = some_rows(pair, draw, draw.randint(1, 4))
    return edit_rows(pair, rows, lambda cache: cache.batch_select_indices(torch.tensor(rows)))


def repeat(soak: Soak, draw: random.Random) -> int:
    pair = soak.pick(draw)
    times = draw.randint(1, max(1, min(3, soak.sizes.rows // len(pair.text))))
    rows = [row for row in range(len(pair.text)) for _ in range(times)]
    return edit_rows(pair, rows, lambda cache: cache.batch_repeat_interleave(times))


def reorder(soak: Soak, draw: random.Random) -> int:
    pair = soak.pick(draw)
    rows = some_rows(pair, draw, len(pair.text))
    return edit_rows(pair, rows, lambda cache: cache.reorder_cache(torch.tensor(rows)))


def fork(soak: Soak, draw: random.Random) -> int:
    soak.add(copy.deepcopy(soak.pick(draw)), draw)
    return 0


def drop(soak: Soak, draw: random.Random) -> int:
    soak.remove(soak.pick(draw))
    soak.check_dropped()
    return 0


OPERATIONS: tuple[tuple[str, int, Callable[[Soak, random.Random], int]], ...] = (
    ("greedy", 4, greedy),
    ("sampled", 3, sampled),
    ("beams", 3, beams),
    ("left padded", 3, left_padded),
    ("prompt lookup", 2, prompt_lookup),
    ("assisted", 2, assisted),
    ("new cache", 4, Soak.start),
    ("decode steps", 20, decode),
    ("extend", 6, extend),
    ("verification", 3, verification),
    ("turn of a chat", 4, turn),
    ("crop", 5, crop),
    ("select rows", 4, select),
    ("repeat rows", 2, repeat),
    ("reorder rows", 4, reorder),
    ("fork", 4, fork),
    ("drop", 3, drop),
    ("interrupted step", 4, interrupted_step),
)
