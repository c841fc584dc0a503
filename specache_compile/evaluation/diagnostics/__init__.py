"""Diagnostics by name: what the papers' figures show, measured on a model and a text. Each is one file.

A new one is a file with a function from `Inspected` to points, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import agreement, coverage, deviation, hits, jaccard, speculation
from .inspected import Inspected
from .point import Point


@dataclass(frozen=True)
class Diagnostic:
    """what: one line, with the paper's figure.
    x, y: the axes, with units.
    runs: about how many runs of the model it takes.
    log: the x axis is logarithmic.
    """

    what: str
    points: Callable[[Inspected], list[Point]]
    x: str
    y: str
    runs: int
    log: bool = False


DIAGNOSTICS = {
    "coverage": Diagnostic(
        "attention mass in each query's heaviest keys (SpeCache, Figure 2 left)",
        coverage.points, "heaviest keys, % of those seen", "share of the attention mass", runs=1, log=True,
    ),
    "hits": Diagnostic(
        "mass that k pairs hold: each query's own top k, and what policies keep (SpeCache, Figure 2 left)",
        hits.points, "pairs a head, % of the context", "share of the attention mass",
        runs=len(hits.SHARES) * len(hits.POLICIES), log=True,
    ),
    "speculation": Diagnostic(
        "hit rate of the pairs that the speculative token chose, and the output token (SpeCache, Table 4)",
        speculation.points, "pairs fetched a head (k)", "share covered",
        runs=2 * len(speculation.BITS) * len(speculation.COUNTS), log=True,
    ),
    "agreement": Diagnostic(
        "how often the speculative token is the token that the model then says",
        agreement.points, "pairs fetched a head (k)", "share of the steps",
        runs=len(speculation.BITS) * len(speculation.COUNTS), log=True,
    ),
    "jaccard": Diagnostic(
        "a policy's kept set against what it would keep had nothing gone (RoCo, Figure 2)",
        jaccard.points, "budget, share of the context", "Jaccard similarity",
        runs=len(jaccard.RATES) * len(jaccard.CHOSEN),
    ),
    "deviation": Diagnostic(
        "standard deviation of the attention that a token has received so far (RoCo, Figure 3)",
        deviation.points, "queries since the token came", "standard deviation, of its largest", runs=1,
    ),
}  # fmt: skip
