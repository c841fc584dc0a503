"""Symbolic sizes: their hints while Dynamo compiles, and their values when the graph is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor


class SymbolReader:
    """Knows in which argument, and which dimension of it, each symbol of a captured graph can be read."""

    def __init__(self, fakes: Sequence[Any]) -> None:
        self.places: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for position, fake in enumerate(fakes):
            if isinstance(fake, torch.SymInt):
                self.learn(fake, position, None)
            elif isinstance(fake, Tensor):
                for dim, size in enumerate(fake.shape):
                    self.learn(size, position, dim)

    def learn(self, size: Any, position: int, dim: int | None) -> None:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self.places.setdefault(size.node.expr, (position, dim))

    def hint(self, size: int | torch.SymInt) -> int:
        """The value that the size had when Dynamo traced it; makes no guard."""
        return size if isinstance(size, int) else int(size.node.hint)

    def value(self, size: int | torch.SymInt, arguments: Sequence[Any]) -> int:
        """The size in a call with these arguments."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if isinstance(expression, sympy.Symbol):
            return self.read(expression, arguments)
        return int(expression.subs({symbol: self.read(symbol, arguments) for symbol in expression.free_symbols}))

    def read(self, symbol: sympy.Symbol, arguments: Sequence[Any]) -> int:
        position, dim = self.places[symbol]
        argument = arguments[position]
        return int(argument if dim is None else argument.shape[dim])
