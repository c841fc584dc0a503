"""`materialize(cache)`: a held cache as a plain one, to read its keys and values."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from transformers import DynamicCache

from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.regroup import session_behind

from .recurrent import own_states


def materialize(cache: DynamicCache) -> DynamicCache:
    """A DynamicCache with real keys and values [B, H, n, d]: bit for bit as cached, or rounded once to 8 bits where the
    host tier has 8 bits (option host_bits).

    `cache` stays usable. SpecacheError where it is plain already.
    """
    session = session_behind(cache)
    plain = copy.copy(cache)  # of its own class, which a model may insist on (MiniMax)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(plain, name, list(value))
    plain.layers = []
    held, layers = itertools.count(), list[Any](cache.layers)
    for layer in layers:
        twin = copy.copy(layer)
        own_states(twin)
        if isinstance(getattr(layer, "keys", None), HeldTensor):
            number = next(held)
            twin.keys, twin.values = session.plain(number, "keys"), session.plain(number, "values")
            layer.keys, layer.values = session.held(number, "keys"), session.held(number, "values")
        plain.layers.append(twin)
    return plain
