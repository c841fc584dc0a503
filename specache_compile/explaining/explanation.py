"""`Explanation`: what `explain` found, to print, query and compare."""

from __future__ import annotations

from dataclasses import dataclass

from .figures import Figures
from .tables import text


@dataclass(frozen=True)
class Explanation(Figures):
    """The result of `explain`: print it, query its figures, or compare passes.

    Example:
        import specache_compile as sc

        explanation = sc.explain("examples/needle-llama", prompt_length=8192)
        print(explanation.bytes_by_tier)
        print(explanation.layer(0))  # one layer's graph, before and after
    """

    def __str__(self) -> str:
        return text(self)
