"""Faults of one line, planted in the product."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], line: str, instead: str) -> None:
    """Replace `line` of a function's source by `instead`, for existing references to the function too."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__} has {line!r} {source.count(line)} times"
    made: dict[str, Any] = {}
    exec(compile(source.replace(line, instead), inspect.getfile(function), "exec"), function.__globals__, made)
    monkeypatch.setattr(function, "__code__", inspect.unwrap(made[function.__name__]).__code__)
