"""Routes `torch.compile(model, backend="specache").generate(...)` to the compiled model.

`OptimizedModule` passes `.generate` to the wrapped module, whose forward is not compiled. For modules of this backend
only, `.generate` runs on a shallow copy of the wrapped module, whose calls are compiled.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from transformers.generation.utils import GenerationMixin

from specache_compile.compile.compiled_options import options_given
from specache_compile.runtime.ranks import check_heads


def with_compiled_calls(module: torch.nn.Module, dynamo_ctx: Any) -> Any:
    """A copy with the weights and submodules of `module`; each call of the copy is compiled by `dynamo_ctx`.

    If the module that generates is inside wrappers such as PEFT's, these are copied too: each step calls the inner one.
    """
    copied: Any = copy.copy(module)
    if isinstance(module, GenerationMixin):
        copied._compiled_call_impl = dynamo_ctx(copied._call_impl)
    else:
        generating = {
            name: with_compiled_calls(child, dynamo_ctx) for name, child in module.named_children()
            if any(isinstance(part, GenerationMixin) for part in child.modules())
        }  # fmt: skip
        copied._modules = {**module._modules, **generating}
    return copied


@functools.cache
def route_generate() -> None:
    """Wrap `OptimizedModule.__getattr__` for the name `generate`, once in the process."""
    original = OptimizedModule.__getattr__

    @functools.wraps(original)
    def getattr_with_generate(self: OptimizedModule, name: str) -> Any:
        value = original(self, name)
        if name != "generate" or options_given(self.dynamo_ctx) is None:  # another backend's
            return value

        @functools.wraps(value)
        def generate(*args: Any, **kwargs: Any) -> Any:
            check_heads(self._orig_mod)
            return with_compiled_calls(self._orig_mod, self.dynamo_ctx).generate(*args, **kwargs)

        return generate

    OptimizedModule.__getattr__ = getattr_with_generate  # type: ignore[method-assign]
