"""A method: its options, its state tensors, and the ops at its sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specache_compile.options import MethodOptions, own_options
from specache_compile.passes.recipe import Recipe

from .field import MEASURE, Field, LayerShape


@dataclass(frozen=True, eq=False)
class Method:
    """A method, as a recipe over common passes and tiers.

    options: its class of options.
    fields: its state tensors; a layer has those that its recipe names, and the counts.
    recipe: (options, site's number) → the ops there.
    rows_differ: whether the rows of a cache may have different lengths.
    defaults: a function from the user's options to overrides of the declared defaults.
    """

    name: str
    options: type[MethodOptions]
    fields: tuple[Field, ...]
    recipe: Callable[[Any, int], Recipe]
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: {}
    rows_differ: bool = False

    @property
    def accepted(self) -> tuple[str, ...]:
        """The names of its options; those of all methods come last."""
        common = own_options(MethodOptions)
        return ("method", *(name for name in own_options(self.options) if name not in common), *common)

    def fields_of(self, options: MethodOptions, layer: LayerShape) -> tuple[Field, ...]:
        """The state tensors of one layer."""
        recipe = self.recipe(options, layer.number)
        calls: list[Any] = [*recipe.attend.values(), *recipe.stores, *filter(None, [recipe.selector])]
        named = {name for call in calls for name in call.state.values()}
        return tuple(field for field in self.fields if field.name in named or field.tier == MEASURE)
