"""Make `torch.compile(model, backend="specache").generate(...)` run the compiled model.

`OptimizedModule` hands `.generate` to the module it wraps, whose forward is not compiled, so that the backend would
never be called. For modules compiled with this backend, and only for them, `.generate` runs with the wrapped module's
calls compiled; afterwards the wrapped module is as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch._dynamo.eval_frame import OptimizedModule

from .compiled_options import options_given
from .runtime.ranks import check_heads


def is_ours(module: OptimizedModule) -> bool:
    """Whether this module was compiled with the backend "specache"."""
    return options_given(module.dynamo_ctx) is not None


@contextlib.contextmanager
def compiled_calls(module: OptimizedModule) -> Iterator[None]:
    """Within it, calls of the wrapped module run compiled, as after `model.compile(...)`."""
    wrapped = module._orig_mod
    before = wrapped._compiled_call_impl
    compiled = module.__dict__.get("_specache_call")
    if compiled is None:
        compiled = module.__dict__["_specache_call"] = module.dynamo_ctx(wrapped._call_impl)
    wrapped._compiled_call_impl = compiled
    try:
        yield
    finally:
        wrapped._compiled_call_impl = before


def route_generate() -> None:
    """Extend `OptimizedModule.__getattr__` by the one name `generate`, once for the process."""
    original = OptimizedModule.__getattr__
    if getattr(original, "routes_generate", False):
        return

    @functools.wraps(original)
    def getattr_with_generate(self: OptimizedModule, name: str) -> Any:
        value = original(self, name)
        if name != "generate" or not is_ours(self):
            return value

        @functools.wraps(value)
        def generate(*args: Any, **kwargs: Any) -> Any:
            check_heads(self._orig_mod)
            with compiled_calls(self):
                return value(*args, **kwargs)

        return generate

    getattr_with_generate.routes_generate = True  # type: ignore[attr-defined]
    OptimizedModule.__getattr__ = getattr_with_generate  # type: ignore[method-assign]
