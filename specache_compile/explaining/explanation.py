"""`Explanation`: what `explain` found, to print, query, compare and save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_compile.errors import SpecacheError

from .figures import Figures
from .report import write_report
from .tables import as_dict, text
from .trace import write_trace


@dataclass(frozen=True)
class Explanation(Figures):
    """The result of `explain`: print it, query its figures, compare passes, or save a report.

    Example:
        import specache_compile as sc

        explanation = sc.explain("examples/needle-llama", prompt_length=8192)
        print(explanation.bytes_by_tier)
        print(explanation.layer(0))  # one layer's graph, before and after
    """

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings, ready for JSON."""
        return as_dict(self)

    def save(self, path: str | Path, profile: Any = None) -> None:
        """Write a report (.html) or a timeline as a Chrome/Perfetto trace (.json), and create its folder if needed.

        profile: a measured `torch.profiler.profile` to put beside the predicted timeline.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".html", ".htm"):
            write_report(self, path)
        elif path.suffix == ".json":
            write_trace(self, path, profile)
        else:
            raise SpecacheError(
                f"{path}: give a name in .html for the report or .json for the timeline; the schedule is a networkx "
                "graph, explain(...).schedule().dag, which networkx writes"
            )

    def __str__(self) -> str:
        return text(self)
