"""A conversation: a cache and its tokens. A prompt that begins with these tokens goes on from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import device_total, fields_of


@dataclass(eq=False)
class Conversation:
    """ids: int64 [n], the cache's tokens.
    asked: how many of them are the last request's, without the template's opening of the answer.
    crops: whether the cache can drop its last tokens.
    nbytes: its bytes of the host's and of the device's memory, as of the last `note`.
    changes: how often the model had changed when it was taken.
    """

    ids: Tensor
    cache: DynamicCache
    asked: int = 0
    crops: bool = True
    nbytes: dict[str, int] = field(default_factory=dict)
    changes: int = 0

    def note(self) -> None:
        """Update the figures after the cache has grown."""
        self.crops, self.nbytes = can_crop(self.cache), bytes_of(self.cache)

    def cut(self, n: int) -> None:
        """Keep its first n tokens."""
        if n < len(self.ids):
            self.cache.crop(n - len(self.ids))
            self.ids = self.ids[:n]


def begun(model: Any, changes: int = 0) -> Conversation:
    """An empty conversation with a model that has changed so often."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return Conversation(torch.empty(0, dtype=torch.int64, device="cpu"), cache, changes=changes)


def shared(ids: Tensor, prompt: Tensor) -> int:
    """The number of tokens that both begin with."""
    n = min(len(ids), len(prompt))
    different = (ids[:n] != prompt[:n]).nonzero()
    return int(different[0]) if len(different) else n


def can_crop(cache: DynamicCache) -> bool:
    """Whether all layers can drop their last tokens: no sliding window has dropped others, and nothing was evicted."""
    session = session_of(cache)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    if session is None:
        return True
    return any(item.has_all_pairs for item in fields_of(session.options, session.layers[0]))


def bytes_of(cache: DynamicCache) -> dict[str, int]:
    """Bytes of a cache on the host and on the device. On a CPU all are the host's."""
    session = session_of(cache)
    plain = [x for layer in cache.layers for x in tensors_of(layer) if getattr(x, "handle", None) is None]
    host, device = 0, sum(x.nbytes for x in plain)
    if session is not None:
        tiers = session.statistics.bytes_by_tier
        host, device = tiers.get("host", 0), device + device_total(tiers)
    on_cpu = (plain[0] if session is None else session.cursor).device.type == "cpu"
    return {"host": host + device, "device": 0} if on_cpu else {"host": host, "device": device}


def tensors_of(layer: Any) -> Iterator[Tensor]:
    """A layer's keys and values, or the states of linear attention, which are in dicts."""
    for value in vars(layer).values():
        yield from (x for x in (value.values() if isinstance(value, dict) else [value]) if isinstance(x, Tensor))
