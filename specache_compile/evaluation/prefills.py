"""Exact prefills, made once by the uncompiled model, from which every method goes on that would read a prompt exactly.

A prefill is most of the work of a short answer behind a long prompt, and the same for all of these methods: what a
method's own would put into the tiers, `specache_compile.hold` puts there, bit for bit (tests/runtime/test_hold.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specache_compile.compiled_options import options_of
from specache_compile.holding import hold, reason_not_to_hold
from specache_compile.methods import parse_options

# A plain cache that has read a prompt, and the logits behind it.
Prefill = tuple[Any, Tensor]


class Prefills:
    """The prefills of one cell's prompts, in memory until the next cell begins."""

    def __init__(self) -> None:
        self.cell = ""
        self.made: dict[tuple[tuple[int, ...], ...], Prefill] = {}

    def begin(self, cell: str) -> None:
        if cell != self.cell:
            self.cell = cell
            self.made.clear()

    def serve(self, model: Any) -> bool:
        """Whether the model, as it is compiled now, reads a prompt exactly; so does the uncompiled one."""
        given = options_of(model)
        return given is None or reason_not_to_hold(parse_options(given), model) is None

    def of(self, ids: Tensor, make: Callable[[], Prefill]) -> Prefill:
        """The prefill of `ids` [rows, tokens]; `make` makes it where there is none yet."""
        key = tuple(map(tuple, ids.tolist()))
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    @torch.inference_mode()
    def handed(self, cache: Any, model: Any) -> Any:
        """A cache that the model may go on with; the prefill's own stays."""
        return copy.deepcopy(cache) if options_of(model) is None else hold(cache, model)
