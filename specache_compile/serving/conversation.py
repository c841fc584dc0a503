"""A conversation: a cache and its tokens. A prompt with this prefix continues the cache."""

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
    """A cached conversation.

    ids: int64 [n], the cache's tokens.
    request_length: how many of them belong to the last request, without the template's opening of the answer.
    crops: whether the cache can drop its last tokens.
    nbytes: bytes on the host and on the device, at the last `note`.
    changes: number of changes of the model when the conversation was taken.
    """

    ids: Tensor
    cache: DynamicCache
    request_length: int = 0
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


def new_conversation(model: Any, changes: int = 0) -> Conversation:
    """An empty conversation. changes: number of changes of the model so far."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return Conversation(torch.empty(0, dtype=torch.int64, device="cpu"), cache, changes=changes)


def shared(ids: Tensor, prompt: Tensor) -> int:
    """The length of the common prefix."""
    n = min(len(ids), len(prompt))
    different = (ids[:n] != prompt[:n]).nonzero()
    return int(different[0]) if len(different) else n


def can_crop(cache: DynamicCache) -> bool:
    """Whether all layers can drop their last tokens: no sliding window and no eviction has dropped others."""
    session = session_of(cache)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    if session is None:
        return True
    return any(item.has_all_pairs for item in fields_of(session.options, session.layers[0]))


def bytes_of(cache: DynamicCache) -> dict[str, int]:
    """Bytes of a cache on the host and on the device. On a CPU all are on the host."""
    session = session_of(cache)
    plain = [x for layer in cache.layers for x in tensors_of(layer) if getattr(x, "handle", None) is None]
    host, device = 0, sum(x.nbytes for x in plain)
    if session is not None:
        tiers = session.statistics.bytes_by_tier
        host, device = tiers.get("host", 0), device + device_total(tiers)
    on_cpu = (plain[0] if session is None else session.cursor).device.type == "cpu"
    return {"host": host + device, "device": 0} if on_cpu else {"host": host, "device": device}


def tensors_of(layer: Any) -> Iterator[Tensor]:
    """A layer's keys and values, and the states of linear attention, which are in dicts."""
    for value in vars(layer).values():
        yield from (x for x in (value.values() if isinstance(value, dict) else [value]) if isinstance(x, Tensor))
