"""The runners of the benchmark: each is a model and a cache that already holds the context.

The uncompiled model prefills a context once. Every runner whose cache accepts them starts from these keys and values.
Weights are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache

import specache_compile as sc
from specache_compile.command_line.bench import BASELINES
from specache_compile.compat import with_cache
from specache_compile.errors import OptionError, SpecacheError
from specache_compile.evaluation.settings import UNCOMPILED, parse_setting
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import device_total, tier_bytes

COMPILED, STATIC = "compiled", "compiled-static"
CHUNK = 512


def can_extend(name: str) -> bool:
    """Whether the runner's cache accepts several tokens after the context, and can be copied."""
    return name != STATIC


def check_name(name: str) -> None:
    """OptionError if `name` is neither a baseline nor a setting of `specache eval`."""
    if name not in BASELINES:
        try:
            parse_setting(name)
        except OptionError as error:
            raise OptionError(f"{error}; baselines are {', '.join(BASELINES)}") from None


@dataclass
class Decoding:
    """A model and its cache.

    token: [B, 1], the next token to decode.
    position: its position.
    """

    model: Any
    cache: Cache
    token: Tensor
    position: int

    @torch.no_grad()
    def step(self) -> None:
        place = torch.full_like(self.token, self.position)
        out = self.model(self.token, **with_cache(self.cache), position_ids=place, use_cache=True)
        self.token = out.logits[:, -1:].argmax(-1)
        self.position += 1

    def extension(self, ids: Tensor) -> Callable[[], Any]:
        """A call to time, which appends `ids` [B, T] to a copy of the cache.

        Their positions are those of the newest cached tokens, because positions after the longest context do not exist.
        """
        cache = copy.deepcopy(self.cache)
        place = torch.arange(self.position - ids.shape[1], self.position, device=ids.device).expand_as(ids)
        given = {**with_cache(cache), "use_cache": True, "logits_to_keep": 1}
        return torch.no_grad()(lambda: self.model(ids, position_ids=place, **given))

    def bytes(self) -> tuple[int, int]:
        """The cache's bytes on the device and on the host."""
        session = session_of(self.cache)
        tiers = {} if session is None else session.statistics.bytes_by_tier
        return device_total(tiers) + self.plain_bytes(), tiers.get("host", 0)

    def plain_bytes(self) -> int:
        """The bytes of the layers without a session."""
        layers: list[Any] = self.cache.layers
        plain = [layer for layer in layers if not isinstance(getattr(layer, "keys", None), HeldTensor)]
        return sum(x.nbytes for layer in plain for x in tree_leaves(vars(layer)) if isinstance(x, Tensor))

    def bytes_in_16_bits(self) -> int:
        """The bytes on the device if the numbers of the model's dtype had 16 bits. The cache must be a DynamicCache."""
        plain = self.plain_bytes() * 2 // self.model.dtype.itemsize
        session = session_of(self.cache)
        if session is None:
            return plain
        tiers = session.tiers
        layers = [replace(layer, dtype=torch.bfloat16) for layer in tiers.layers]
        pages = tiers.batch * tiers.capacity // PAGE
        return plain + device_total(tier_bytes(tiers.options, layers, pages, pages, tiers.batch, tiers.capacity))


def twin_of(model: Any, name: str, lowering: str) -> Any:
    """A model with the same weights, compiled for this runner."""
    twin = copy.copy(model)
    twin.__dict__ = dict(model.__dict__)
    if name in (COMPILED, STATIC):
        twin.compile(dynamic=name == COMPILED)
    elif name not in BASELINES:
        twin.compile(backend="specache", options={"lowering": lowering, **parse_setting(name).measured})
    return twin


def empty_cache(name: str, config: PreTrainedConfig, room: int) -> Cache:
    """An empty cache for this runner; a static cache has room for `room` tokens."""
    return StaticCache(config=config, max_cache_len=room) if name == STATIC else DynamicCache(config=config)


@dataclass(frozen=True)
class Prefilled:
    """A context that the uncompiled model has prefilled.

    ids: [B, n], the context.
    cache: its pairs [B, H, n, d].
    token: [B, 1], the next token.
    """

    ids: Tensor
    cache: DynamicCache
    token: Tensor


@torch.no_grad()
def prefill(model: Any, ids: Tensor, report: Callable[[str], None] = lambda progress: None) -> Prefilled:
    """The uncompiled model's prefill of `ids` [B, n], in chunks. report: receives the progress."""
    cache, done = DynamicCache(config=model.config), 0
    for part in ids.split(CHUNK, 1):
        report(f"{done:,} of {ids.shape[1]:,} tokens")
        out = model(part, **with_cache(cache), use_cache=True, logits_to_keep=1)
        done += part.shape[1]
    return Prefilled(ids, cache, out.logits[:, -1:].argmax(-1))


def runner(name: str, twin: Any, context: Prefilled, room: int) -> Decoding:
    """A runner whose cache holds a prefilled context.

    twin: the model of this runner (`twin_of`).
    room: the number of tokens that will follow.
    """
    # A contiguous copy: otherwise Dynamo takes a row's stride for the cache's length, and traces again when it grows.
    token, length = context.token.clone(memory_format=torch.contiguous_format), context.ids.shape[1]
    if name in (UNCOMPILED, COMPILED):
        return Decoding(twin, copy.deepcopy(context.cache), token, length)
    if name == STATIC:
        cache, layers = empty_cache(name, twin.config, length + room), list[Any](context.cache.layers)
        for number, layer in enumerate(layers):
            cache.update(layer.keys, layer.values, number)
        return Decoding(twin, cache, token, length)
    try:
        held = sc.hold(context.cache, twin)
    except SpecacheError:  # the method's prefill does not keep all pairs
        held = DynamicCache(config=twin.config)
        with torch.no_grad():
            twin(context.ids, **with_cache(held), use_cache=True, logits_to_keep=1)
    session = session_of(held)
    if session is not None:
        session.reserve(room)  # no bucket grows, and no graph is compiled, in the timed steps
    return Decoding(twin, held, token, length)
