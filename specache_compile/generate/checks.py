"""Checks in each generation of a compiled model: its cache can be held, and its graphs ran."""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo import eval_frame
from transformers.generation.utils import GenerationMixin

from specache_compile.compile.compiled_options import options_of
from specache_compile.compile.recompile_limit import was_reached
from specache_compile.errors import RECOMPILE_LIMIT, SpecacheError
from specache_compile.methods import parse_options
from specache_compile.runtime.records import ModelRecord, record_of

# Number of frames in which to look for a module around the model.
CALLERS = 8


@functools.cache
def route_checks() -> None:
    """Wrap `GenerationMixin.generate`, once in the process. Models of other backends are not affected."""
    original: Any = GenerationMixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = options_of(self)
        if options is None:
            if self._compiled_call_impl is None and (why := compiled_outside(self)) is not None:
                warn_unused(record_of([*self.parameters()]), why)
            return original(self, *args, **kwargs)
        check_cache(self, kwargs)
        if parse_options(options).drafts:
            from .verify import route_verification

            route_verification()
        record = record_of([*self.parameters()])
        record.latest, record.unused, record.exact = None, None, ""  # those of the last generation
        before = record.calls
        generated = original(self, *args, **kwargs)
        if record.calls == before:
            warn_unused(record, reason(self))
        return generated

    GenerationMixin.generate = generate  # type: ignore[method-assign]


def check_cache(model: Any, arguments: Mapping[str, Any]) -> None:
    """SpecacheError if a generation requests a cache that offloads its own pairs."""
    config = arguments.get("generation_config") or model.generation_config
    requested = arguments.get("cache_implementation") or getattr(config, "cache_implementation", None)
    if str(requested).startswith("offloaded"):
        raise SpecacheError(
            f"cache_implementation={requested!r}: the backend 'specache' cannot hold a cache that offloads its own "
            "pairs. Leave cache_implementation out: the backend offloads the cache itself"
        )


def warn_unused(record: ModelRecord, why: str) -> None:
    """Warn, once for a model and reason; `stats` reports the reason."""
    record.latest, record.unused = None, why
    record.warn_once(f"this generation ran no compiled graph, so nothing was compressed: {why}")


def compiled_outside(model: torch.nn.Module) -> str | None:
    """The reason, if a compiled module around `model`, such as a PeftModel, called `generate`."""
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), CALLERS):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and options_of(owner) is not None and model in list(owner.modules())[1:]:
            inner, outer = type(model).__name__, type(owner).__name__
            return (
                f"{outer} was compiled, but it generates with the {inner} inside, which was not. Compile that one "
                "(of a PeftModel: model.get_base_model().compile(backend='specache', ...))"
            )
    return None


def reason(model: torch.nn.Module) -> str:
    """Why Dynamo ran no graph of a compiled model."""
    stance = eval_frame._stance.stance
    if torch._dynamo.config.disable:
        return "Dynamo is disabled (TORCH_COMPILE_DISABLE or torch._dynamo.config.disable). Enable it"
    if stance != "default":
        return f'the stance is {stance!r}. Call torch.compiler.set_stance("default")'
    if was_reached(model):
        return f"{RECOMPILE_LIMIT}. torch._dynamo.reset() drops all graphs and starts again"
    return (
        "Dynamo did not compile the model's forward. TORCH_LOGS=dynamo,graph_breaks prints the cause; "
        "torch._dynamo.reset() makes Dynamo try again"
    )
