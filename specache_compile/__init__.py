"""SpeCache as a torch.compile backend: `torch.compile(model, backend="specache")`."""

import specache_compile.kernels  # noqa: F401  (registers the ops, which the passes know by name)
from specache_compile.kernels.host_memory import release_host_memory

from .bisect import Bisection, bisect
from .errors import HeldTensorError, OptionError, SpecacheError, SpecacheWarning
from .explain import Explanation, explain
from .materialize import materialize
from .options import Options
from .stats import Stats, stats

__all__ = [
    "Bisection",
    "Explanation",
    "HeldTensorError",
    "OptionError",
    "Options",
    "SpecacheError",
    "SpecacheWarning",
    "Stats",
    "bisect",
    "explain",
    "materialize",
    "release_host_memory",
    "stats",
]
