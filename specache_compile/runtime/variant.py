"""What a graph is rewritten for."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import MethodOptions
from specache_compile.passes.phase import Phase


@dataclass(frozen=True)
class Variant:
    """A phase, a session's options, and how many tokens its state has room for."""

    phase: Phase
    options: MethodOptions
    capacity: int
