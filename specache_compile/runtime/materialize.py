"""`materialize(cache)`: a held cache as a plain one, for whoever must read keys and values."""

from __future__ import annotations

import copy
from typing import Any

from transformers import DynamicCache

from specache_compile.errors import SpecacheError

from .held import HeldTensor
from .step import agreed_session


def materialize(cache: DynamicCache) -> DynamicCache:
    """A DynamicCache with real keys and values [B, H, n, d], bit for bit those that were cached.

    `cache` stays usable; SpecacheError where it is plain already.
    """
    every: list[Any] = list(cache.layers)
    layers = [layer for layer in every if isinstance(layer.keys, HeldTensor)]
    if not layers:
        raise SpecacheError("this cache holds plain tensors already: the specache backend does not hold it")
    session = agreed_session([(i, t.handle) for i, layer in enumerate(layers) for t in (layer.keys, layer.values)])
    plain = DynamicCache()
    plain.layers = []
    held = iter(range(len(layers)))
    for layer in every:
        twin = copy.copy(layer)
        if isinstance(layer.keys, HeldTensor):
            number = next(held)
            twin.keys, twin.values = session.plain(number, "keys"), session.plain(number, "values")
            layer.keys, layer.values = session.held(number, "keys"), session.held(number, "values")
        plain.layers.append(twin)
    return plain
