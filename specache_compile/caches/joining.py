"""`join(caches)`, `split(cache)` and `lengths(cache)`: held caches whose rows have different lengths."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.errors import SpecacheError
from specache_compile.methods import METHODS
from specache_compile.options import differences
from specache_compile.paging.paged_tiers import PagedTiers, paged
from specache_compile.paging.pool import PagePool
from specache_compile.passes.reading.sites import PARTS
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.regroup import required_session
from specache_compile.runtime.session import Mode, Progress, Session, session_of
from specache_compile.runtime.state import bucket, bytes_in_16_bits, gathered, room
from specache_compile.runtime.tiers import Tiers

from .holding import twin
from .recurrent import STATES, own_states
from .saving import KINDS

# A row of one of the sessions that are joined: which, and its number there.
SessionRow = tuple[Session, int]


def join(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Join the rows of several held caches of one model into one cache.

    Each row keeps its length (`lengths`), its tiers bit for bit, and the pairs that were selected for its next step.
    Hugging Face sees a left-padded batch: the length of the longest row. Call the model without attention_mask, and
    pass `position_ids=lengths(cache)[:, None]`. The tiers are copied, one layer at a time; drop the joined caches to
    free their memory.

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
        outputs = [
            model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4, return_dict_in_generate=True)
            for text in ("Hello", "A longer prompt")
        ]
        cache = sc.join([sc.cache_of(output) for output in outputs])
        print(sc.lengths(cache))
    """
    caches = list(caches)
    if not caches:
        raise SpecacheError("join: there is no cache in the list")
    rows = [(session, row) for session in drained(caches) for row in range(session.tiers.batch)]
    return cache_of(session_of_rows(rows), caches, [None] * len(caches))


def split(cache: DynamicCache) -> list[DynamicCache]:
    """Split a held cache into one cache for each row: the inverse of `join`.

    Args:
        cache: a held cache with B rows; it stays usable. Its tiers are copied.

    Returns:
        B held caches of one row, each as long as its row.

    Raises:
        SpecacheError: as for `join`.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer(["Hello", "World"], return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        first, second = sc.split(sc.cache_of(output))
    """
    return [row_of(cache, row) for row in range(required_session(cache).tiers.batch)]


def row_of(cache: DynamicCache, row: int) -> DynamicCache:
    """One row of a held cache, as `split` gives it."""
    return cache_of(session_of_rows([(drained([cache])[0], row)]), [cache], [row])


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
        inputs = tokenizer("Hello", return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        print(sc.lengths(sc.cache_of(output)))
    """
    session = required_session(cache)
    return torch.tensor(session.progress.lengths, device=session.layers[0].device)


def reason_against(caches: Sequence[Any], apart: bool = False) -> str | None:
    """Why the rows of these caches cannot be those of one; None where they can. apart: they will differ in length."""
    if any(type(cache) is not DynamicCache for cache in caches):
        return "a cache of another class than DynamicCache may hold more than its layers do"
    if any(session_of(cache) is None for cache in caches):
        return "a cache of them holds plain tensors already: the specache backend does not hold it"
    sessions = [required_session(cache) for cache in caches]
    first, method = sessions[0], sessions[0].options.method
    if not METHODS[method].rows_differ:
        return f"method {method!r} keeps rows of one length alone"
    for session in sessions:
        if session.tiers.ranks is not None:
            return "the model is split over ranks"
        if session.progress.padded:
            return "a cache of them has padding that is not in front of its rows"
        if session.layers != first.layers or {id(w()) for w in session.weights} != {id(w()) for w in first.weights}:
            return "they are of different models"
        if told := differences(session.requested, first.requested):
            return f"their options differ: {told}"
        if session.options != first.options:
            return "one of them is still in 16 bits (option min_context): min_context=0 has none be"
    lengths = [length for session in sessions for length in session.progress.lengths]
    if first.rope_switch is not None and first.rope_switch.misfit([length + 1 for length in lengths]):
        return first.rope_switch.reason()
    apart = apart or len(set(lengths)) > 1
    if apart and (reason := next(filter(None, (session.one_length for session in sessions)), None)):
        return reason
    for number, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        if reason := reason_of_layer(layers[0], apart):
            return f"layer {number}, {type(layers[0]).__name__}, {reason}"
    return None


def reason_of_layer(layer: Any, apart: bool) -> str | None:
    """Why one layer of a cache cannot be joined with others; None where it can. apart: rows differ in length."""
    if type(layer) not in KINDS:
        return "is not keys, values and the state of a recurrence alone"
    if getattr(layer, "is_sliding", False):
        return "is a sliding window, which Hugging Face keeps for rows of one length"
    if isinstance(getattr(layer, "keys", None), Tensor) and not isinstance(layer.keys, HeldTensor) and apart:
        return "is not held, and its rows differ in length"
    return None


def drained(caches: Sequence[DynamicCache]) -> list[Session]:
    """The sessions of caches whose rows can be those of one, their copies done; SpecacheError where they cannot."""
    if reason := reason_against(caches):
        raise refused(reason)
    sessions = [required_session(cache) for cache in caches]
    for session in sessions:
        session.drain()
    return sessions


@torch.inference_mode(False)
@torch.no_grad()
def session_of_rows(rows: Sequence[SessionRow]) -> Session:
    """A session of these rows, copies of what they have, but for pages, which they share; what is counted of it begins
    anew."""
    progress = progress_of(rows)
    pools = {tiers.pool if isinstance(tiers := session.tiers, PagedTiers) else None for session, _ in rows}
    if len(pools) == 1 and None not in pools:
        return session_with(rows[0][0], paged_tiers_of(rows), progress)
    return session_with(rows[0][0], tiers_of(pieces_of(rows), progress.longest), progress)


def session_with(first: Session, tiers: Tiers, progress: Progress) -> Session:
    """A session as `first`, which has these tiers and has come so far."""
    made = copy.copy(first)
    made.tiers = tiers
    made.progress = progress
    made.weights = list(first.weights)
    made.moved, made.view = {}, None
    made.mode, made.draft_length = Mode.PLAIN, None
    made.reset_runtime()
    made.statistics.full_cache_bytes = bytes_in_16_bits(made.layers, tiers.batch, progress.length)
    made.update_memory()
    return made


def progress_of(rows: Sequence[SessionRow]) -> Progress:
    """How far each row has come; a row without a guess is not ready, whatever stands in its place."""
    lengths = tuple(session.progress.lengths[row] for session, row in rows)
    guesses = [None if s.progress.guess is None else s.progress.guess[row : row + 1] for s, row in rows]
    known = next((guess for guess in guesses if guess is not None), None)
    guess = None
    if known is not None:
        guess = torch.cat([torch.zeros_like(known) if one is None else one for one in guesses])
    ready = tuple(
        session.progress.ready[row] and (known is None or one is not None)
        for (session, row), one in zip(rows, guesses, strict=True)
    )
    keys = tuple(session.progress.keys[row] for session, row in rows)
    calls = tuple(session.progress.longest_calls[row] for session, row in rows)
    return Progress(lengths, ready, keys, calls, max(lengths), guess, joined=True)


def in_pages(cache: DynamicCache, pool: PagePool) -> DynamicCache:
    """A cache with the rows of a held one in pages of `pool`; itself where they are. SpecacheError as for `join`, and
    where the pool has no room, or other options."""
    (session,) = drained([cache])
    if isinstance(session.tiers, PagedTiers) and session.tiers.pool is pool:
        return cache
    out_of_16_bits(session)
    if session.options != pool.options:
        raise refused(f"their options differ: {differences(session.options, pool.options)}")
    rows = [(session, row) for row in range(session.tiers.batch)]
    return cache_of(session_in_pages(session, progress_of(rows), pool), [cache], [None])


@torch.inference_mode(False)
@torch.no_grad()
def out_of_16_bits(session: Session) -> None:
    """A session that is not yet long enough to gain by its tiers has them all the same, as its neighbours do."""
    if session.tiers.pending is not None:
        session.tiers.move_now(session.progress.lengths, session.progress.padding, session.drain)
        session.forget_selection()
        session.update_memory()


@torch.inference_mode(False)
@torch.no_grad()
def session_in_pages(session: Session, progress: Progress, pool: PagePool) -> Session:
    tiers = session.tiers.contiguous(progress.lengths)
    return session_with(session, paged(tiers, progress.lengths, pool), progress)


@torch.inference_mode(False)
@torch.no_grad()
def reserve_cache_rows(cache: DynamicCache, rows: int) -> DynamicCache:
    """A cache in pages as the first of so many `rows`, which there are places for; `append_rows` brings the others."""
    (session,) = drained([cache])
    assert isinstance(session.tiers, PagedTiers)
    session.tiers.reserve_rows(rows)
    session.new_cursor()
    session.update_memory()
    return cache


def remove_all_rows(cache: DynamicCache) -> bool:
    """Remove all rows; whether the empty buffers can be reused (`append_rows`). If a copy has failed, the cache is
    dropped."""
    select_rows(cache, [])
    try:
        required_session(cache)
    except SpecacheError:
        drop(cache)
        return False
    return True


def append_rows(cache: DynamicCache, newcomer: DynamicCache) -> DynamicCache:
    """`join` of two caches in pages of one pool, where nothing of the rows that are there is copied: `cache`, which has
    gone on, is stale behind it."""
    session, other = drained([cache, newcomer])
    others = [cache, newcomer] if session.tiers.batch else [newcomer]
    new_rows(session, other)
    return cache_of(session, others, [None] * len(others))


def keep_rows(cache: DynamicCache, rows: Sequence[int]) -> None:
    """Only these rows go on, in this order; what only others had in pages is free from here on."""
    select_rows(cache, rows)
    with contextlib.suppress(SpecacheError):  # a copy has failed: whoever uses the cache next is told
        required_session(cache)


def crop_rows(cache: DynamicCache, kept: Sequence[int]) -> None:
    """Keep of each row its first tokens, so many. SpecacheError where there are several rows, and a layer that is not
    held."""
    session = required_session(cache)
    gone = [length - keeps for length, keeps in zip(session.progress.lengths, kept, strict=True)]
    if not any(gone):
        return
    if not is_held_whole(cache):
        if len(gone) > 1:
            raise refused("a layer that is not held cannot lose another number of tokens in each row")
        cache.crop(-gone[0])
        return
    session.crop_rows(kept)
    layers: list[Any] = cache.layers
    for site, layer in enumerate(layers):
        layer.keys, layer.values = (session.held(site, part) for part in PARTS)


def is_held_whole(cache: DynamicCache) -> bool:
    """Whether every layer's keys and values are held."""
    return all(isinstance(getattr(layer, "keys", None), HeldTensor) for layer in cache.layers)


def select_rows(cache: DynamicCache, rows: Sequence[int]) -> None:
    """As `batch_select_indices`, which knows no recurrence's state."""
    indices: Any = torch.tensor(rows, dtype=torch.int64)
    cache.reorder_cache(indices)


def drop(cache: DynamicCache) -> None:
    """Nobody uses a cache any more, which is stale behind it: its memory is free now, and not when Python finds out."""
    session = session_of(cache)
    if session is not None:
        session.settle()
        session.tiers.release_state()
        session.version += 1
        session.view = None


@torch.inference_mode(False)
@torch.no_grad()
def new_rows(session: Session, other: Session) -> None:
    """The rows of another session come behind those of one, with copies of their places, and their pages."""
    tiers, others = session.tiers, other.tiers
    assert isinstance(tiers, PagedTiers)
    assert isinstance(others, PagedTiers)
    rows = [(source, row) for source in (session, other) for row in range(source.tiers.batch)]
    progress = progress_of(rows)
    tiers.append_rows(others, range(others.batch))
    session.progress = progress
    session.version += 1
    session.view = None
    session.new_cursor()
    session.update_memory()


def paged_tiers_of(rows: Sequence[SessionRow]) -> PagedTiers:
    """The tiers of these rows of one pool: their pages are shared, their places copied."""
    first = rows[0][0].tiers
    assert isinstance(first, PagedTiers)
    made = PagedTiers(first, first.pool, [], len(rows))
    for session, row in rows:
        assert isinstance(session.tiers, PagedTiers)
        made.append_rows(session.tiers, [row])
    return made


def pieces_of(rows: Sequence[SessionRow]) -> list[tuple[Tiers, int]]:
    """The same rows in tiers that are in one piece."""
    sessions = dict.fromkeys(session for session, _ in rows)
    pieces = {session: session.tiers.contiguous(session.progress.lengths) for session in sessions}
    return [(pieces[session], row) for session, row in rows]


def tiers_of(rows: Sequence[tuple[Tiers, int]], longest: int) -> Tiers:
    """The tiers of these rows, with room for the longest. SpecacheError, before anything is made, where the host tier
    has no room for all."""
    first = rows[0][0]
    made = copy.copy(first)
    made.batch, made.sinks_known, made.state = len(rows), None, []
    made.capacity, made.room = bucket(longest), room(longest)
    made.allocated = (0, 0)
    made.check_host_memory(longest)
    for number, layer in enumerate(made.layers):
        sources = [(tiers.state[number], row) for tiers, row in rows]
        made.state.append(gathered(sources, made.options, layer, made.capacity, made.room))
    made.allocated = (made.capacity, made.room)
    return made


def cache_of(session: Session, caches: Sequence[Any], rows: Sequence[int | None]) -> DynamicCache:
    """A cache of the kind of `caches` with a session's held tensors; what is not held is their rows'. None: all."""
    made = twin(caches[0])
    site = 0
    for number, layer in enumerate(made.layers):
        own_states(layer)
        sources = [cache.layers[number] for cache in caches]
        for name in STATES:
            for place, state in getattr(layer, name, {}).items():
                if state is not None:
                    getattr(layer, name)[place] = picked([getattr(source, name)[place] for source in sources], rows)
        if isinstance(getattr(layer, "keys", None), HeldTensor):
            layer.keys, layer.values = (session.held(site, part) for part in PARTS)
            site += 1
        elif isinstance(getattr(layer, "keys", None), Tensor):
            layer.keys, layer.values = (picked([getattr(s, part) for s in sources], rows) for part in PARTS)
    return made


def picked(tensors: Sequence[Tensor], rows: Sequence[int | None]) -> Tensor:
    """The rows of tensors [B, ...], one behind the other: of each one row, or all."""
    parts = (x if row is None else x[row : row + 1] for x, row in zip(tensors, rows, strict=True))
    return torch.cat(list(parts))


def refused(why: str) -> SpecacheError:
    return SpecacheError(f"these rows cannot be joined, or split: {why}")
