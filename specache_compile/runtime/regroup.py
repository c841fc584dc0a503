"""Joins and splits the sessions of one cache, where a graph break splits one phase of a model but not another."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.errors import SpecacheError
from specache_compile.methods.field import LayerState
from specache_compile.options import MethodOptions

from .held import Handle, HeldTensor
from .session import Session
from .tiers import Tiers

Place = tuple[Session, int]


def agreed_session(handles: Sequence[tuple[int, Handle | None]], weights: Sequence[Tensor] = ()) -> Session:
    """The session that all these keys and values belong to, in the same version and with the same edits.

    If they belong to several sessions, or to a part of one, a new session is built from those layers.

    weights: weights of the calling graph. Only the model that filled a session may get a part of it; another model's
        cache is rejected by its number of layers.
    """
    first = handles[0][1]
    places: dict[int, Place] = {}
    for site, handle in handles:
        if handle is None or first is None or (handle.version, handle.edits) != (first.version, first.edits):
            raise mixed_caches()
        now = handle.now
        if places.setdefault(site, (now.session, now.site)) != (now.session, now.site):
            raise mixed_caches()
    assert first is not None
    ordered = list(places.values())
    sources = check_neighbours(ordered)
    for session in sources:
        session.replay(first.version, first.edits)
    one = sources[0]
    whole = len(sources) == 1 and (len(ordered) == len(one.layers) or not belongs_to(one, weights))
    return one if whole else regrouped(sources, ordered)


def required_session(cache: DynamicCache) -> Session:
    """The session of a held cache, brought to the cache's view; SpecacheError if the cache is plain."""
    layers: list[Any] = list(cache.layers)
    held = [layer for layer in layers if isinstance(getattr(layer, "keys", None), HeldTensor)]
    if not held:
        raise plain_already()
    return agreed_session(
        [(site, part.handle) for site, layer in enumerate(held) for part in (layer.keys, layer.values)]
    )


def belongs_to(session: Session, weights: Sequence[Tensor]) -> bool:
    """Whether graphs of the model with these weights have filled a session. A graph without weights always matches."""
    known = {id(weight()) for weight in session.weights}
    mine = not weights or any(id(weight) in known for weight in weights)
    return mine and not session.from_elsewhere


def check_neighbours(places: Sequence[Place]) -> list[Session]:
    """The sessions of these layers; SpecacheError unless the layers are consecutive, also from one session to
    the next."""
    for (session, site), (other, following) in itertools.pairwise(places):
        stays = other is session and following == site + 1
        if not stays and not (other is not session and site == len(session.layers) - 1 and following == 0):
            raise mixed_caches()
    return list(dict.fromkeys(session for session, _ in places))


@torch.inference_mode(False)
def regrouped(sources: Sequence[Session], places: Sequence[Place]) -> Session:
    """A new session of the layers at `places`, and others of the rest of `sources`, which are empty afterwards."""
    check_alike(sources)
    for session in sources:
        session.drain()
    give_equal_pools(sources)
    before = [(sources[0], site) for site in range(places[0][1])]
    after = [(sources[-1], site) for site in range(places[-1][1] + 1, len(sources[-1].layers))]
    made = session_from(places)
    parts = [(made, places), *((session_from(rest), rest) for rest in (before, after) if rest)]
    # After everything that may fail or be interrupted: until here each layer belongs to its source.
    for part, taken in parts:
        for number, (session, site) in enumerate(taken):
            session.moved[site] = (part, number)
    for session in sources:
        session.tiers.set_rows([], 0)
        session.tiers.pool, session.tiers.layers, session.anchors = None, [], []
        session.recorded.clear()
        session.bindings.clear()
    return made


def check_alike(sources: Sequence[Session]) -> None:
    """SpecacheError if sessions are not parts of one cache in the same state."""
    first = sources[0]
    for other in sources[1:]:
        sizes = [(s.length, s.progress.lengths, s.version, s.tiers.batch, s.tiers.capacity) for s in (first, other)]
        if sizes[0] != sizes[1]:
            raise mixed_caches()
        every = zip(*((s.requested, s.tiers.options, s.tiers.pending) for s in (first, other)), strict=True)
        for ours, theirs in every:
            if ours != theirs:
                raise parts_differ(differing(ours, theirs))


def give_equal_pools(sources: Sequence[Session]) -> None:
    """Give each session its own pool in which equal pages are held, since a new pool will share their tensors."""
    for session in sources:
        session.tiers.trim(session.progress.lengths)
    pools = [session.tiers.pool for session in sources]
    sizes = [(pool.pages, len(pool.counts)) for pool in pools if pool is not None]
    alike = all(size == sizes[0] for size in sizes)
    alike = alike and all(session.tiers.pages == sources[0].tiers.pages for session in sources)
    if alike and all(session.tiers.is_alone for session in sources):
        return
    for session in sources:
        session.use(session.tiers.in_own_pool())


def differing(ours: MethodOptions | None, theirs: MethodOptions | None) -> str:
    """The options that differ between two parts."""
    values = [vars(options) if options is not None else {} for options in (ours, theirs)]
    names = sorted(name for name in {**values[0], **values[1]} if values[0].get(name) != values[1].get(name))
    return ", ".join(f"{name} {values[0].get(name)!r} and {values[1].get(name)!r}" for name in names)


def session_from(places: Sequence[Place]) -> Session:
    """A session of the layers at `places` of equal, idle sessions. It keeps the first one's step counts; it has no
    speculative token and no draft."""
    sources = list(dict.fromkeys(session for session, _ in places))
    first = sources[0]
    padding = next((s.progress.padding for s in sources if s.progress.padding is not None), None)
    keys = (functools.reduce(operator.or_, parts) for parts in zip(*(s.progress.keys for s in sources), strict=True))
    progress = replace(
        first.progress, ready=(False,) * first.tiers.batch, keys=tuple(keys), speculative=None, padding=padding,
        padded=any(s.progress.padded for s in sources),
    )  # fmt: skip
    made = first.derived(tiers_from(places), progress)
    made.anchors = [session.anchors[site] for session, site in places]
    made.weights = list({id(weight): weight for session in sources for weight in session.weights}.values())
    made.statistics.steps = dict(first.statistics.steps)
    for session in sources:
        share = sum(source is session for source, _ in places) / len(session.layers)
        made.statistics.seconds += session.statistics.seconds * share
        made.statistics.python_seconds += session.statistics.python_seconds * share
        made.statistics.bytes_to_host += round(session.statistics.bytes_to_host * share)
    return made


def tiers_from(places: Sequence[Place]) -> Tiers:
    """Tiers of the layers at `places`, renumbered; they share the sources' tensors."""
    first, states = places[0][0].tiers, list[LayerState]()
    for session, site in places:
        assert session.tiers.pool is not None
        states.append(session.tiers.pool.state[site])
    assert first.pool is not None
    layers = [replace(session.layers[site], number=number) for number, (session, site) in enumerate(places)]
    pool = first.pool.twin(first.options, layers, states)
    rows = [session.tiers.all_rows[site] for session, site in places]
    made = first.in_pool(pool, [list(row) for row in first.pages], first.most_rows, rows)
    made.frequencies = [session.tiers.frequencies[site] for session, site in places]
    made.rounded = list(first.rounded)
    return made


def plain_already() -> SpecacheError:
    return SpecacheError(
        "this cache has plain tensors already, which the specache backend does not hold. Call hold(cache, model) first"
    )


def mixed_caches() -> SpecacheError:
    return SpecacheError(
        "the keys and values in this cache come from different caches, or from different states of one. Edit a cache "
        "only by its methods crop, reorder_cache, batch_repeat_interleave and batch_select_indices"
    )


def parts_differ(differences: str) -> SpecacheError:
    return SpecacheError(
        "a graph break splits this model's prefill but not its decode steps, and the parts of its cache have different "
        f"options ({differences}). Remove the break (TORCH_LOGS=graph_breaks prints it)"
    )
