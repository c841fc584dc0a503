"""A method: its options, its state tensors, and the ops at its sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specache_compile.options import MethodOptions, own_options
from specache_compile.passes.recipe import Recipe

from .field import Field, LayerShape


@dataclass(frozen=True)
class Method:
    """A method, as a recipe over common passes and tiers.

    options: its class of options.
    fields: the state tensors of a layer; if layers differ, `fields_at` selects those of one.
    recipe: (options, site's number) → the ops there.
    rows_differ: whether the rows of a cache may have different lengths.
    defaults: a function from the user's options to overrides of the declared defaults.
    """

    name: str
    options: type[MethodOptions]
    fields: tuple[Field, ...]
    recipe: Callable[[Any, int], Recipe]
    fields_at: Callable[[Any, LayerShape], tuple[Field, ...]] | None = None
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: {}
    rows_differ: bool = False

    @property
    def accepted(self) -> tuple[str, ...]:
        """The names of its options; those of all methods come last."""
        common = own_options(MethodOptions)
        return ("method", *(name for name in own_options(self.options) if name not in common), *common)

    def fields_of(self, options: MethodOptions, layer: LayerShape) -> tuple[Field, ...]:
        """The state tensors of one layer."""
        return self.fields if self.fields_at is None else self.fields_at(options, layer)
