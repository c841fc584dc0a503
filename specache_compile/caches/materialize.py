"""`materialize(cache)`: a plain copy of a held cache."""

from __future__ import annotations

import itertools
from typing import Any

from transformers import DynamicCache

from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.regroup import required_session

from .holding import twin


def materialize(cache: DynamicCache) -> DynamicCache:
    """Return a plain copy of a held cache, with real keys and values.

    The copy has the cached values bit for bit; with `host_bits=8` they have been rounded once to 8 bits.

    Args:
        cache: a cache that the backend holds; it stays usable.

    Returns:
        A DynamicCache with keys and values [B, H, n, d] in the model's dtype, on the model's device.

    Raises:
        SpecacheError: the cache is plain already, or its method does not keep all pairs.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        print(sc.materialize(sc.cache_of(output)).layers[0].keys.shape)
    """
    session = required_session(cache)
    plain = twin(cache)
    held = itertools.count()
    for layer, copied in zip(list[Any](cache.layers), plain.layers, strict=True):
        if isinstance(getattr(layer, "keys", None), HeldTensor):
            number = next(held)
            copied.keys, copied.values = session.plain(number, "keys"), session.plain(number, "values")
            layer.keys, layer.values = session.held(number, "keys"), session.held(number, "values")
    return plain
