"""SpeCache as a torch.compile backend: `torch.compile(model, backend="specache")`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import HeldTensorError as HeldTensorError
from .errors import OptionError as OptionError
from .errors import SpecacheError as SpecacheError
from .errors import SpecacheWarning as SpecacheWarning

if TYPE_CHECKING:
    from .batching.batch import Batch as Batch
    from .caches.holding import hold as hold
    from .caches.holding import materialize as materialize
    from .caches.joining import join as join
    from .caches.joining import lengths as lengths
    from .caches.joining import split as split
    from .caches.saving import load as load
    from .caches.saving import save as save
    from .checkpoints.loaded import load_model as load_model
    from .compat import cache_of as cache_of
    from .compat import with_cache as with_cache
    from .explaining.explain import Explanation as Explanation
    from .explaining.explain import explain as explain
    from .kernels.memory.host_memory import release_host_memory as release_host_memory
    from .runtime.stats import Stats as Stats
    from .runtime.stats import stats as stats

# Names are loaded at first use, so `import specache_compile` does not import torch.
_PLACES = {
    "Batch": "batching.batch:Batch",
    "Explanation": "explaining.explain:Explanation",
    "Stats": "runtime.stats:Stats",
    "cache_of": "compat:cache_of",
    "explain": "explaining.explain:explain",
    "hold": "caches.holding:hold",
    "join": "caches.joining:join",
    "lengths": "caches.joining:lengths",
    "load": "caches.saving:load",
    "load_model": "checkpoints.loaded:load_model",
    "materialize": "caches.holding:materialize",
    "release_host_memory": "kernels.memory.host_memory:release_host_memory",
    "save": "caches.saving:save",
    "split": "caches.joining:split",
    "stats": "runtime.stats:stats",
    "with_cache": "compat:with_cache",
}
__all__ = sorted(
    [*_PLACES, *(error.__name__ for error in (HeldTensorError, OptionError, SpecacheError, SpecacheWarning))]
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("specache-compile")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name].split(":")
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return list(__all__)
