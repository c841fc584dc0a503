"""A kept form in a frame's place, until a call needs of it what no process has kept."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from .graph import NotKept

Guard = Callable[[Any], bool]


class Standing:
    """What the code that Dynamo runs for a frame calls: a kept form or, from the call on that this cannot serve, the
    function as it was, which Dynamo then traces.

    alive: the form's guards let calls pass.
    """

    def __init__(self, made: CodeType, code: CodeType, global_scope: dict[str, Any]) -> None:
        self.made, self.code, self.global_scope = made, code, global_scope
        self.alive = True

    @torch._dynamo.decorators.skip  # so that Dynamo looks at the frames below
    def __call__(self, cells: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(self.made, cells)(*args, **kwargs)
        except NotKept:  # nothing has run yet: the graph is called first, and changes nothing where it is not kept
            self.alive = False
        return self.function(self.code, cells)(*args, **kwargs)

    def function(self, code: CodeType, cells: tuple[Any, ...]) -> Any:
        closure = tuple(types.CellType(value) for value in cells)
        return types.FunctionType(code, self.global_scope, code.co_name, None, closure)


def stub(code: CodeType, name: str) -> CodeType:
    """Code with the arguments and free variables of `code`, which hands them to the global `name`.

    def forward(self, a, *args, b, **kwargs): return name((free, ...), self, a, *args, b=b, **kwargs)
    """
    positional = code.co_varnames[: code.co_argcount]
    rest = list(code.co_varnames[code.co_argcount :])
    by_name = [rest.pop(0) for _ in range(code.co_kwonlyargcount)]
    several = f"*{rest.pop(0)}" if code.co_flags & inspect.CO_VARARGS else None
    named = f"**{rest.pop(0)}" if code.co_flags & inspect.CO_VARKEYWORDS else None
    taken = [*positional]
    if code.co_posonlyargcount:
        taken.insert(code.co_posonlyargcount, "/")
    taken += [several] if several else ["*"] if by_name else []
    taken += [*by_name, *([named] if named else [])]
    given = [*positional, *([several] if several else []), *(f"{n}={n}" for n in by_name), *([named] if named else [])]
    free = "".join(f"{each}, " for each in code.co_freevars)
    source = (
        f"def outer({', '.join(code.co_freevars)}):\n"
        f"  def {code.co_name}({', '.join(taken)}):\n"
        f"    return {name}(({free}), {', '.join(given)})\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<specache: {code.co_name}>", "exec"), namespace)
    (made,) = (value for value in namespace["outer"].__code__.co_consts if isinstance(value, CodeType))
    if made.co_freevars != code.co_freevars:
        raise ValueError(f"free variables {code.co_freevars}")
    return made
