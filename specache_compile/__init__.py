"""SpeCache as a torch.compile backend: `torch.compile(model, backend="specache")`."""

import specache_compile.kernels  # noqa: F401  (registers the ops, which the passes know by name)

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
    "stats",
]
