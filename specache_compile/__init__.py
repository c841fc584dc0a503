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
_MODULES = {
    "batching.batch": ["Batch"],
    "caches.holding": ["hold", "materialize"],
    "caches.joining": ["join", "lengths", "split"],
    "caches.saving": ["load", "save"],
    "checkpoints.loaded": ["load_model"],
    "compat": ["cache_of", "with_cache"],
    "explaining.explain": ["Explanation", "explain"],
    "kernels.memory.host_memory": ["release_host_memory"],
    "runtime.stats": ["Stats", "stats"],
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(
    [*_PLACES, *(error.__name__ for error in (HeldTensorError, OptionError, SpecacheError, SpecacheWarning))]
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("specache-compile")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
