"""Symbolic sizes: their hints while Dynamo compiles, and their values in a call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor


class SymbolReader:
    """Finds the value of each symbol of a captured graph in its arguments: in a size, stride or offset."""

    def __init__(self, fakes: Sequence[Any]) -> None:
        self.places: dict[sympy.Symbol, tuple[Any, ...]] = {}
        tensors = [(position, fake) for position, fake in enumerate(fakes) if isinstance(fake, Tensor)]
        for position, fake in enumerate(fakes):
            self.add(fake, position, "__int__")
        for position, fake in tensors:
            for dim, size in enumerate(fake.shape):
                self.add(size, position, "size", dim)
        for position, fake in tensors:
            for dim, stride in enumerate(fake.stride()):
                self.add(stride, position, "stride", dim)
            self.add(fake.storage_offset(), position, "storage_offset")

    def add(self, size: Any, *place: Any) -> None:
        """Note the place of a symbol, under its traced name and under the symbol that Dynamo found it equal to.

        place: position of an argument, the name of its method that returns the size, and the dimension.
        """
        if isinstance(size, torch.SymInt):
            for symbol in (size.node._expr, size.node.expr):
                if isinstance(symbol, sympy.Symbol):
                    self.places.setdefault(symbol, place)

    def value(self, size: int | torch.SymInt | sympy.Expr, arguments: Sequence[Any]) -> int:
        """The size in a call with these arguments."""
        expression = as_traced(size)
        if isinstance(expression, int):
            return expression
        if isinstance(expression, sympy.Symbol):
            return self.read(expression, arguments)
        return int(expression.subs({symbol: self.read(symbol, arguments) for symbol in expression.free_symbols}))

    def holds(
        self, statement: sympy.Basic, arguments: Sequence[Any], instead: Mapping[sympy.Symbol, int] | None = None
    ) -> bool:
        """Whether a condition on sizes is true in a call with these arguments. instead: values that override the
        arguments'."""
        given = instead or {}
        symbols = statement.free_symbols
        return is_true(statement, tuple((s, given[s] if s in given else self.read(s, arguments)) for s in symbols))

    def can_read(self, statement: sympy.Basic) -> bool:
        return statement.free_symbols <= self.places.keys()

    def read(self, symbol: sympy.Symbol, arguments: Sequence[Any]) -> int:
        position, method, *dim = self.places[symbol]
        return int(getattr(arguments[position], method)(*dim))


def as_traced(size: int | torch.SymInt | sympy.Expr) -> int | sympy.Expr:
    """A size without the facts that Dynamo has derived: what a late graph assumes is valid for that graph only."""
    return size.node._expr if isinstance(size, torch.SymInt) else size


@functools.lru_cache(maxsize=1024)
def is_true(statement: sympy.Basic, values: tuple[tuple[sympy.Symbol, int], ...]) -> bool:
    """Whether a condition is true for these values; most steps repeat the values of the last one."""
    return bool(statement.xreplace({symbol: sympy.Integer(value) for symbol, value in values}) == sympy.true)
