"""What a method is: the state it keeps, the ops at its sites, and the options that mean something to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from specache_compile.passes.recipe import Recipe

if TYPE_CHECKING:
    from specache_compile.options import Options
    from specache_compile.tiers import LayerShape

# Shape and dtype of each state tensor, by field.
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# Those of every method.
COMMON = ("method", "lowering", "disable_passes", "exact_layers", "mode", "inductor")


@dataclass(frozen=True)
class Method:
    """A method of the papers, as a recipe over the same passes and tiers.

    takes: its own options, beside COMMON. shapes: (options, layer, batch, capacity in
    tokens) → state tensors, [B, H, ...] each but for the measures. recipe: (options, site) → the ops there. defaults:
    options that differ from `Options`; those that it does not take are thereby fixed.
    """

    name: str
    takes: tuple[str, ...]
    shapes: Callable[[Options, LayerShape, int, int], Shapes]
    recipe: Callable[[Options, int], Recipe]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> tuple[str, ...]:
        return (*COMMON, *self.takes)


# What fixes a method that neither selects pairs nor runs a second lane.
UNSELECTED = {"top_k": 0, "speculate": False, "min_context": 0}
