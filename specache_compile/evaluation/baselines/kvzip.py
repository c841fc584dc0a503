"""KVzip (arXiv 2505.23416, as in kvpress 0.5.5): the model reads a prompt once more, as if to repeat it, and the pairs
stay that the repetition attends to. All KV heads of all layers share one budget.

The second reading is the uncompiled model's, behind an exact prefill (`chosen`); the compiled model continues what is
left (`held`). A compiled model that reads a prompt beyond the budget by itself is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.holding import twin
from specache_compile.compat import with_cache
from specache_compile.errors import SpecacheError
from specache_compile.kernels.attention.attention_ops import BLOCK
from specache_compile.kernels.state.layout import EMPTY
from specache_compile.options import whole

from .prompt_eviction import PromptOptions, hold_chosen, method_of
from .sdpa_calls import Watched

REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with"
# Tokens of the chunk before that REPEAT_PART names.
NAMED = 8

Encode = Callable[[str], list[int]]


def refuse(*given: object) -> NoReturn:
    raise SpecacheError(
        "method='kvzip': its choice takes a second reading of the prompt, which only `specache eval --share-prefills` "
        "makes, of models whose layers all keep every pair; take method='snapkv' or 'expected_attention'"
    )


def chosen(
    model: Any, cache: DynamicCache, ids: Tensor, options: KVzipOptions, start: int, encode: Encode,
    behind: Sequence[int],
) -> Tensor:  # fmt: skip
    """The tokens that stay of a prompt ids [B, n] in the layers that drop any, as `kept` gives them.

    model: not compiled.
    cache: a plain one that has read the prompt; unchanged.
    start: so many tokens before the context's own are not repeated.
    behind: tokens between a request and its answer.
    """
    length, budget = ids.shape[1], options.budget_in_tokens(ids.shape[1])
    readings = repetitions(ids, start, options.chunk, encode, behind) if length > budget else ()
    score = scores(model, cache, readings, length, options.first)
    sites = [number for number in range(len(score)) if number not in options.exact_layers]
    return kept(score[sites], min(budget, length), options.first)


def repetitions(
    ids: Tensor, start: int, chunk: int, encode: Encode, behind: Sequence[int]
) -> Iterator[tuple[slice, Tensor]]:
    """The chunks of a context ids [B, n] from `start` on, and what the model reads behind the context to repeat each,
    [B, t]."""
    for first in range(start, ids.shape[1], chunk):
        places = slice(first, min(first + chunk, ids.shape[1]))
        repeat = encode(REPEAT if first == start else REPEAT_PART)
        request, answer = (torch.tensor([part] * len(ids), dtype=ids.dtype, device=ids.device)
                           for part in (repeat, list(behind)))  # fmt: skip
        yield places, torch.cat([request, ids[:, max(start, first - NAMED) : first], answer, ids[:, places]], 1)


@torch.inference_mode()
def scores(
    model: Any, cache: Any, readings: Iterable[tuple[slice, Tensor]], length: int, first: int
) -> Tensor:  # fmt: skip
    """The most that a query of the repetitions gives to each pair of a prompt of n tokens, float32 [layers, B, H, n]; 0
    where nothing is repeated. The `first` first pairs have a part in every softmax."""
    keys = cache.layers[0].keys
    found = torch.zeros(len(cache.layers), *keys.shape[:2], length, device=keys.device)
    for places, ids in readings:
        see = partial(received, heads=keys.shape[1], places=places, length=length, first=min(first, places.start))
        with Watched(see) as watched:
            model(ids, **with_cache(twin(cache)), use_cache=True, logits_to_keep=1)
        if len(watched.seen) != len(cache.layers):
            raise SpecacheError(
                f"method='kvzip': {len(watched.seen)} calls of scaled_dot_product_attention in {len(cache.layers)} "
                "layers; load the model with attn_implementation='sdpa'"
            )
        found[..., places] = torch.stack(watched.seen)
    return found


def received(q: Tensor, k: Tensor, scale: float, heads: int, places: slice, length: int, first: int) -> Tensor:
    """The largest attention, float32 [B, H, c], that the queries q [B, Hq, t, d] of a repetition and of the query group
    give to the c pairs at `places`.

    k [B, H or Hq, length + t, d]: the prompt's keys, and the repetition's, among which it is causal. The softmax is
    over the `first` first pairs, those at `places`, and the repetition's.
    """
    k = k[:, :: k.shape[1] // heads]
    near = torch.cat([k[:, :, :first], k[:, :, places], k[:, :, length:]], 2).float()
    column, before = torch.arange(near.shape[2], device=q.device), near.shape[2] - q.shape[2]
    most = torch.zeros(*near.shape[:2], places.stop - places.start, device=q.device)
    for start in range(0, q.shape[2], BLOCK):
        query = q[:, :, start : start + BLOCK].float().unflatten(1, (heads, -1)) * scale
        place = before + start + torch.arange(query.shape[3], device=q.device)
        logits = (query @ near.unsqueeze(2).mT).masked_fill_(column > place[:, None], -torch.inf)
        most = most.maximum(logits.softmax(-1)[..., first : first + most.shape[2]].amax((2, 3)))
    return most


def kept(score: Tensor, budget: int, first: int) -> Tensor:
    """The kept tokens, int32 [layers, B, H, m] in ascending order, padded with EMPTY; m is the largest count of a head.

    Each row keeps the first `first` tokens of every head and the tokens with the largest scores, on average `budget`
    per head.

    score: [layers, B, H, n].
    """
    layers, _, heads, _ = score.shape
    score = score.clone()
    score[..., :first] = torch.inf
    flat = score.transpose(0, 1).flatten(1)
    best = flat.topk(layers * heads * budget, dim=-1).indices
    stays = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, best, True)
    stays = stays.view_as(score.transpose(0, 1)).transpose(0, 1)
    count = stays.sum(-1, keepdim=True)
    place = (~stays).to(torch.int8).argsort(dim=-1, stable=True)[..., : int(count.max())]
    return place.masked_fill(torch.arange(place.shape[-1], device=place.device) >= count, EMPTY).int()


def held(cache: Any, model: torch.nn.Module, options: KVzipOptions, chosen: Tensor) -> DynamicCache:
    """As `hold_chosen`, with room for the KV head that keeps most."""
    most = rounded(chosen.shape[3], cache.layers[0].keys.shape[2])
    return hold_chosen(cache, model, replace(options, most=most), chosen)


def rounded(most: int, length: int) -> int:
    """To eighths of a prompt, so that prompts of one length share graphs."""
    step = -(-length // 8)
    return min(length, -(-most // step) * step)


@dataclass(frozen=True)
class KVzipOptions(PromptOptions):
    """The defaults are kvpress'."""

    method: str = "kvzip"
    first: int = whole(4, 0, "first tokens of a prompt, which stay")
    chunk: int = whole(2048, 1, "tokens of a prompt that are repeated at once", metavar="TOKENS")


METHOD = method_of("kvzip", KVzipOptions, refuse)
