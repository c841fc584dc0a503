"""Launches of Triton kernels, the project's and Inductor's: compiled and launched as on a device, then interpreted.

The launch itself computes nothing. Triton's launcher passes it to the simulated driver, which refuses the same launches
as a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.runtime.jit import JITFunction

from simulated_device import interpreter


def interpreting_run(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Run JITFunction.run, then interpret its kernel."""

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with interpreter.LANGUAGE:
            kernel = launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        if warmup:
            return kernel
        given = {name: value for name, value in kwargs.items() if name in self.arg_names}
        bound = inspect.signature(self.fn).bind(*args, **given)
        bound.apply_defaults()
        blocks = grid(dict(bound.arguments)) if callable(grid) else grid
        interpreter.interpret(self.fn, bound.arguments, tuple(blocks), self.fn.__name__)
        return kernel

    return run


# Functions of Inductor's kernels, which Inductor drops after compilation, with their globals.
_functions: WeakKeyDictionary[CachingAutotuner, Callable[..., Any]] = WeakKeyDictionary()


def remembering_init(init: Callable[..., None]) -> Callable[..., None]:
    def run(self: CachingAutotuner, fn: JITFunction, *args: Any, **kwargs: Any) -> None:
        _functions[self] = fn.fn
        init(self, fn, *args, **kwargs)

    return run


def function_of(tuner: CachingAutotuner) -> Callable[..., Any]:
    if tuner not in _functions:  # it came out of Inductor's cache
        _functions[tuner] = tuner._reload_kernel().fn.fn
    return _functions[tuner]


def interpreting_tuner_run(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Run CachingAutotuner.run, then interpret its kernel with the selected configuration."""

    def run(self: CachingAutotuner, *args: Any, stream: int, **kwargs: Any) -> Any:
        with interpreter.LANGUAGE:
            result = launch(self, *args, stream=stream, **kwargs)
        if kwargs.get("benchmark_run"):
            return result
        function, (launcher,) = function_of(self), self.launchers
        _, grid = self._interpret_args_grid(args, launcher.config)
        if 0 in grid:
            return result
        names = list(inspect.signature(function).parameters)
        constants = {
            names[key[0]] if isinstance(key, tuple) else key: value
            for key, value in self.triton_meta.get("constants", {}).items()
        }
        passed = inspect.signature(launcher).bind(*args, stream=stream).arguments
        known = {**constants, **launcher.config.kwargs, **passed}
        bound = {name: known[name] for name in names}
        interpreter.interpret(function, bound, grid, function.__name__)
        return result

    return run


def install() -> None:
    interpreter.install()
    JITFunction.run = interpreting_run(JITFunction.run)
    CachingAutotuner.__init__ = remembering_init(CachingAutotuner.__init__)
    CachingAutotuner.run = interpreting_tuner_run(CachingAutotuner.run)
