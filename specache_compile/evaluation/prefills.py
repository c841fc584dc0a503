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
from specache_compile.holding import reason_not_to_hold
from specache_compile.methods import parse_options

# A plain cache that has read prompts, and the logits behind them.
Prefill = tuple[Any, Tensor]


class Prefills:
    """The prefills of one cell's prompts, in memory until the next cell begins."""

    def __init__(self) -> None:
        self.cell = ""
        # Of each prompt: the batch that it was read in, and its row there.
        self.made: dict[tuple[int, ...], tuple[Prefill, int]] = {}

    def begin(self, cell: str) -> None:
        if cell != self.cell:
            self.cell = cell
            self.made.clear()

    def serve(self, model: Any) -> bool:
        """Whether the model, as it is compiled now, reads a prompt exactly; so does the uncompiled one."""
        given = options_of(model)
        return given is None or reason_not_to_hold(parse_options(given), model) is None

    def of(self, ids: Tensor, make: Callable[[], Prefill]) -> Prefill:
        """A prefill of `ids` [rows, tokens] to go on from; `make` makes it where there is none yet, of these prompts
        or of more."""
        prompts = [tuple(prompt) for prompt in ids.tolist()]
        batches = {id(self.made[prompt][0]) for prompt in prompts if prompt in self.made}
        if len(batches) != 1 or any(prompt not in self.made for prompt in prompts):
            made = make()
            self.made.update({prompt: (made, row) for row, prompt in enumerate(prompts)})
        cache, logits = self.made[prompts[0]][0]
        rows = torch.tensor([self.made[prompt][1] for prompt in prompts])
        return with_rows(cache, rows), logits[rows]


@torch.inference_mode()
def with_rows(cache: Any, rows: Tensor) -> Any:
    """A cache with copies of these rows of a plain one, which stays as it is."""
    chosen = copy.copy(cache)
    chosen.layers = [copy.copy(layer) for layer in cache.layers]
    chosen.batch_select_indices(rows)
    return chosen
