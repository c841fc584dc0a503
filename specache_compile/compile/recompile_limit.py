"""The number of graphs that Dynamo keeps for one function, raised for this backend.

Dynamo keeps 8 graphs for a code object, and in transformers 5 the forward methods of all model classes share one. A
chat, a batch, a padded batch and assisted generation need 12 graphs of one model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import convert_frame

from .compiled_options import own_compiler

# Graphs of one function. Forty kinds of calls of six model classes and settings need more than 64.
LEAST = 256
LIMITS = ("recompile_limit", "accumulated_recompile_limit")


@functools.cache
def raise_limit() -> None:
    """Wrap `ConvertFrameAssert.__call__`, once in the process, so that this backend's compilations have the higher
    limit."""
    convert = convert_frame.ConvertFrameAssert.__call__

    @functools.wraps(convert)
    def with_own_limit(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        limits = {} if own_compiler(self) is None else raised_limits()
        with torch._dynamo.config.patch(limits):
            return convert(self, frame, *args, **kwargs)

    convert_frame.ConvertFrameAssert.__call__ = with_own_limit  # type: ignore[method-assign]


def raised_limits() -> dict[str, int]:
    """Dynamo's limits, each at least `LEAST`."""
    return {name: max(getattr(torch._dynamo.config, name), LEAST) for name in LIMITS}


def was_reached(model: torch.nn.Module) -> bool:
    """Whether the model's forward has as many graphs as the limit allows."""
    graphs = _debug_get_cache_entry_list(type(model).forward.__code__)
    return len(graphs) >= raised_limits()["recompile_limit"]
