"""`materialize(cache)`: a plain copy of a held cache."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from specache_compile.passes.reading.sites import PARTS
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.session import plain_already, sessions_of

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
    if not sessions_of(cache):
        raise plain_already()
    plain = twin(cache)
    for layer, copied in zip(list[Any](cache.layers), plain.layers, strict=True):
        if isinstance(getattr(layer, "keys", None), HeldTensor):
            for part in PARTS:
                handle: Any = getattr(layer, part).handle
                handle.session.replay(handle.version, handle.edits)
                setattr(copied, part, handle.session.plain(handle.site, part))
                setattr(layer, part, handle.session.held(handle.site, part))
    return plain
