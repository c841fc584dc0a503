"""Routes `torch.compile(model, backend="specache").generate(...)` to the compiled model.

`OptimizedModule` passes `.generate` to the wrapped module, whose forward is not compiled. For modules of this backend
only, `.generate` runs with the calls of the generating module compiled, on the calling thread. Afterwards the module is
as before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from transformers.generation.utils import GenerationMixin

from specache_compile.compile.compiled_options import options_given
from specache_compile.runtime.ranks import check_heads

# Held while a module's generations are counted, and while the process forks: a child has only the forking thread.
_counting = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_counting.acquire, after_in_parent=_counting.release, after_in_child=_counting.release)


class ThreadsCalls:
    """Replaces a module's `_compiled_call_impl` during its generations. Calls on a generation's thread run compiled;
    other threads' calls run as before."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.before: Callable[..., Any] | None = module._compiled_call_impl
        self.plain: Callable[..., Any] = module._call_impl
        self.generations = 0
        self.here = threading.local()

    @torch._dynamo.decorators.skip  # a thread's value must not be in a graph; the call below is captured
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.current()(*args, **kwargs)

    def current(self) -> Callable[..., Any]:
        """The callable for a call of the module on this thread."""
        return getattr(self.here, "compiled", None) or self.before or self.plain

    @property
    def get_compiler_config(self) -> Any:
        """The compilation of the current call, for `compiled_options.py`; AttributeError if it is not compiled."""
        return self.current().get_compiler_config  # type: ignore[attr-defined]


@contextlib.contextmanager
def compiled_calls(module: OptimizedModule) -> Iterator[None]:
    """Within it, this thread's calls of the generating module run compiled, as after `model.compile(...)`."""
    whole = module._orig_mod
    # The module whose `generate` runs may be inside wrappers such as PEFT's; each step calls it.
    wrapped = next((part for part in whole.modules() if isinstance(part, GenerationMixin)), whole)
    compiled = module.__dict__.get("_specache_call")
    if compiled is None:
        compiled = module.__dict__["_specache_call"] = module.dynamo_ctx(wrapped._call_impl)
    with _counting:
        calls = wrapped._compiled_call_impl
        if not isinstance(calls, ThreadsCalls):
            calls = wrapped._compiled_call_impl = ThreadsCalls(wrapped)
        calls.generations += 1
    outer = getattr(calls.here, "compiled", None)
    calls.here.compiled = compiled
    try:
        yield
    finally:
        calls.here.compiled = outer
        with _counting:
            calls.generations -= 1
            if not calls.generations and wrapped._compiled_call_impl is calls:
                wrapped._compiled_call_impl = calls.before


def route_generate() -> None:
    """Wrap `OptimizedModule.__getattr__` for the name `generate`, once in the process."""
    original = OptimizedModule.__getattr__
    if getattr(original, "routes_generate", False):
        return

    @functools.wraps(original)
    def getattr_with_generate(self: OptimizedModule, name: str) -> Any:
        value = original(self, name)
        if name != "generate" or options_given(self.dynamo_ctx) is None:  # another backend's
            return value

        @functools.wraps(value)
        def generate(*args: Any, **kwargs: Any) -> Any:
            check_heads(self._orig_mod)
            with compiled_calls(self):
                return value(*args, **kwargs)

        return generate

    getattr_with_generate.routes_generate = True  # type: ignore[attr-defined]
    OptimizedModule.__getattr__ = getattr_with_generate  # type: ignore[method-assign]
