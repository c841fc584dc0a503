"""`join(caches)`, `split(cache)` and `lengths(cache)`: held caches whose rows have different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.errors import SpecacheError
from specache_compile.methods import METHODS
from specache_compile.options import differences
from specache_compile.paging.pool import PagePool
from specache_compile.passes.reading.sites import PARTS
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.session import Session, SessionRow, progress_of, required_session, session_of, sessions_of
from specache_compile.runtime.step import compress
from specache_compile.runtime.tiers import joined

from .holding import twin
from .saving import KINDS


def join(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Join the rows of several held caches of one model into one cache.

    Each row keeps its length (`lengths`), its tiers bit for bit, and the pairs that were selected for its next step.
    Hugging Face sees a left-padded batch: the length of the longest row. Call the model without attention_mask, and
    pass `position_ids=lengths(cache)[:, None]`. Rows of one cache share its pages. Those of several caches are copied;
    drop these caches to free their memory. A cache that is still in 16 bits (option min_context) is compressed.

    Args:
        caches: held caches of one model, compiled with the same options; at least one.

    Returns:
        A held cache with all rows, in the order of `caches`.

    Raises:
        SpecacheError: a cache is plain, or models, options or rows do not fit together. Also for padding that is not in
            front, and for sliding windows, which require rows of one length. Nothing has changed then.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = [tokenizer(text, return_tensors="pt").to(model.device) for text in ("Hello", "A longer prompt")]
        outputs = [model.generate(**each, max_new_tokens=4, return_dict_in_generate=True) for each in inputs]
        cache = sc.join([sc.cache_of(output) for output in outputs])
        print(sc.lengths(cache))
    """
    caches = list(caches)
    if not caches:
        raise SpecacheError("join: the list of caches is empty. Pass at least one held cache")
    rows = [(session, row) for session in drained(caches) for row in range(session.tiers.batch)]
    return cache_over(session_of_rows(rows), caches)


def split(cache: DynamicCache) -> list[DynamicCache]:
    """Split a held cache into one cache for each row: the inverse of `join`.

    Args:
        cache: a held cache with B rows; it stays usable, and its rows share their pages with the result.

    Returns:
        B held caches of one row, each as long as its row.

    Raises:
        SpecacheError: as for `join`.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer(["Hello", "World"], return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        first, second = sc.split(sc.cache_of(output))
    """
    return [row_of(cache, row) for row in range(drained([cache])[0].tiers.batch)]


def row_of(cache: DynamicCache, row: int) -> DynamicCache:
    """A held cache of one row of `cache`."""
    return cache_over(session_of_rows([(drained([cache])[0], row)]), [cache], slice(row, row + 1))


def lengths(cache: DynamicCache) -> Tensor:
    """Return the number of cached tokens of each row.

    Args:
        cache: a held cache with B rows.

    Returns:
        int64 [B], on the cache's device.

    Raises:
        SpecacheError: the cache is plain.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        print(sc.lengths(sc.cache_of(output)))
    """
    session = required_session(cache)
    return torch.tensor(session.progress.lengths, device=session.layers[0].device)


def reason_against(caches: Sequence[Any], apart: bool = False) -> str | None:
    """Why the rows of these caches cannot be joined; None if they can. apart: their lengths will differ."""
    if any(type(cache) is not DynamicCache for cache in caches):
        return "only a DynamicCache is supported, since other classes may have state outside of their layers"
    if any(session_of(cache) is None for cache in caches):
        return "one of the caches has plain tensors already, which the specache backend does not hold"
    sessions = [required_session(cache) for cache in caches]
    first, method = sessions[0], sessions[0].options.method
    if not METHODS[method].rows_differ:
        return f"method {method!r} requires rows of one length"
    for session in sessions:
        if session.tiers.ranks is not None:
            return "the model is split over ranks"
        if session.progress.padded:
            return "one of the caches has padding that is not in front of its rows"
        if session.layers != first.layers or {id(w()) for w in session.weights} != {id(w()) for w in first.weights}:
            return "they belong to different models"
        if found := differences(session.requested, first.requested):
            return f"their options differ: {found}"
    lengths = [length for session in sessions for length in session.progress.lengths]
    if first.rope_switch.misfit([length + 1 for length in lengths]):
        return first.rope_switch.reason()
    apart = apart or len(set(lengths)) > 1
    if apart and (reason := next(filter(None, (session.one_length for session in sessions)), None)):
        return reason
    for number, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        if reason := reason_of_layer(layers[0], apart):
            return f"layer {number}, {type(layers[0]).__name__}, {reason}"
    return None


def reason_of_layer(layer: Any, apart: bool) -> str | None:
    """Why one layer of a cache cannot be joined with others; None if it can. apart: the rows' lengths differ."""
    if type(layer) not in KINDS:
        return "has other contents than keys, values and a recurrent state"
    if getattr(layer, "is_sliding", False):
        return "is a sliding window, which requires rows of one length"
    if isinstance(getattr(layer, "keys", None), Tensor) and not isinstance(layer.keys, HeldTensor) and apart:
        return "is not held, and its rows differ in length"
    return None


def drained(caches: Sequence[DynamicCache]) -> list[Session]:
    """The sessions of caches that can be joined, after their copies; SpecacheError if they cannot be joined."""
    if reason := reason_against(caches):
        raise refused(reason)
    sessions = [required_session(cache) for cache in caches]
    for session in sessions:
        session.tiers.drain()
    return sessions


@torch.inference_mode(False)
@torch.no_grad()
def session_of_rows(rows: Sequence[SessionRow], pool: PagePool | None = None) -> Session:
    """A session of these rows, whose counts start at zero.

    pool: for its pages. None: that of the rows, which share its pages; of several pools they get copies in a new one.
    """
    sessions = list(dict.fromkeys(session for session, _ in rows))
    first, *others = (session.final_options for session in sessions)
    if found := next(filter(None, (differences(other, first) for other in others)), None):
        raise refused(f"their options differ: {found}")
    for session in sessions:
        if session.tiers.pending is not None:
            compress(session)
    if pool is None and len({id(session.tiers.pool) for session in sessions}) > 1:
        pool = PagePool(first, sessions[0].layers, 0)
    return sessions[0].derived(joined([(session.tiers, row) for session, row in rows], pool), progress_of(rows))


@torch.inference_mode(False)
@torch.no_grad()
def in_pages(cache: DynamicCache, pool: PagePool) -> DynamicCache:
    """The cache in pages of `pool`, which has its final options. A cache in other pages is freed.

    SpecacheError as for `join`, and if the pool has too few pages.
    """
    (session,) = drained([cache])
    if session.tiers.pool is pool:
        return cache
    made = cache_over(session_of_rows([(session, row) for row in range(session.tiers.batch)], pool), [cache])
    drop(cache)
    return made


@torch.inference_mode(False)
@torch.no_grad()
def reserve_cache_rows(cache: DynamicCache, rows: int) -> DynamicCache:
    """Reserve buffers for so many rows; `append_rows` adds the others."""
    (session,) = drained([cache])
    session.tiers.reserve_rows(rows)
    session.refresh()
    return cache


@torch.inference_mode(False)
@torch.no_grad()
def append_rows(cache: DynamicCache, newcomer: DynamicCache) -> DynamicCache:
    """Join two caches of one pool, which become stale, without copying the rows of `cache`."""
    session, other = drained([cache, newcomer])
    tiers, new = session.tiers, other.tiers
    progress = progress_of([(source, row) for source in (session, other) for row in range(source.tiers.batch)])
    caches = [cache, newcomer] if tiers.batch else [newcomer]
    tiers.append_rows([(new, row) for row in range(new.batch)])
    session.progress, session.view = progress, None
    session.version += 1
    session.refresh()
    made = cache_over(session, caches)
    drop(newcomer)
    return made


def keep_rows(cache: DynamicCache, rows: Sequence[int]) -> None:
    """Keep only these rows, in this order, and free the pages of the others."""
    indices: Any = torch.tensor(rows, dtype=torch.int64)
    cache.reorder_cache(indices)
    required_session(cache)  # applies the order, which frees the pages


def drop(cache: DynamicCache) -> None:
    """Free a cache's memory now, before Python's garbage collection. The cache is stale afterwards."""
    for session in sessions_of(cache):
        session.tiers.drain()
        session.tiers.reset(session.tiers.batch)
        session.version += 1
        session.view = None


def cache_over(session: Session, caches: Sequence[Any], rows: slice = slice(None)) -> DynamicCache:
    """A cache like `caches`, with a session's held tensors; plain layers get these rows of all caches."""
    made = twin(caches[0])
    site = 0
    for number, layer in enumerate(made.layers):
        sources = [cache.layers[number] for cache in caches]
        for name, states in vars(layer).items():
            for place, state in states.items() if isinstance(states, dict) else ():
                if isinstance(state, Tensor):
                    states[place] = torch.cat([getattr(each, name)[place][rows] for each in sources])
        if isinstance(getattr(layer, "keys", None), HeldTensor):
            layer.keys, layer.values = (session.held(site, part) for part in PARTS)
            site += 1
        elif isinstance(getattr(layer, "keys", None), Tensor):
            layer.keys, layer.values = (torch.cat([getattr(each, part)[rows] for each in sources]) for part in PARTS)
    return made


def refused(why: str) -> SpecacheError:
    return SpecacheError(f"these rows cannot be joined or split: {why}. Use each cache alone")
