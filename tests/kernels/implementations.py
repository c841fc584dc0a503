"""The ops by implementation: PyTorch's definitions, C++, and Triton (on a GPU if there is one, else interpreted).

The interpreter multiplies bfloat16 as integers and truncates conversions to it, so bfloat16 runs only on a GPU, or with
the simulated device's arithmetic. `compile_kernels.py` compiles every kernel for sm_80 and sm_90, in each dtype.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specache_compile.kernels.op import op_of
from specache_compile.methods import load_others

load_others()  # the baselines' ops too
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ("definition", "cpp", "triton")
# Copies on the current stream, instead of the copy stream; a gather with fewer programs than heads.
COPIES = {"prefetch": "triton_copy:gather", "offload": "triton_copy:write_through"}
PROGRAMS = 3


@dataclass(frozen=True)
class Ops:
    """The ops of one kind as attributes. An op without C++ is its definition; one without Triton does not exist."""

    kind: str

    def __str__(self) -> str:
        return self.kind

    @property
    def device(self) -> torch.device:
        return GPU if self.kind == "triton" else torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        defined = getattr(torch.ops.specache, name)
        op: Any = op_of(defined.default)
        if self.kind == "definition" or (self.kind == "cpp" and op.fused is None):
            return defined
        return getattr(torch.ops.specache, f"{name}_fused") if self.kind == "cpp" else triton_function(op)


@functools.cache
def triton_function(op: Any) -> Callable[..., Any]:
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    copies = op.name in COPIES
    module, name = (f".movement.{COPIES[op.name]}" if copies else op.cuda).split(":")
    function = getattr(importlib.import_module(module, "specache_compile.kernels"), name)
    if op.name == "prefetch":
        return functools.partial(function, programs=PROGRAMS)
    return (lambda k, v, padding, *rest: function(k, v, *rest)) if op.name == "offload" else function


@dataclass(frozen=True)
class Way:
    """How a decode's attention is computed: by one op, or by the two halves of a corrected attention."""

    ops: Ops
    in_halves: bool

    def __str__(self) -> str:
        return f"{self.ops} in halves" if self.in_halves else str(self.ops)


WAYS = tuple(Way(Ops(kind), in_halves) for kind in KINDS for in_halves in (False, True))
