"""The declaration of an op (schema, implementations, properties), and the registry of ops.

Every schema marks exactly the state tensors that its op mutates; data flow orders the ops.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Op:
    """One op, with its properties for passes and lowering.

    schema: torch schema that marks every mutated argument.
    run: the PyTorch code that defines the op.
    fake: computes the shapes of results under FakeTensorMode and on the meta device.
    cuda: "module:function" of the CUDA implementation, imported on first use (triton exists on Linux only).
        ".folder.module" is relative to kernels/. None for an op that runs on CPUs only.
    fused: the CPU implementation, in C++ or by a torch kernel. Lowering replaces the op by the op `NAME_fused`.
    library: compiles the C++ of `fused` for its first operand's fake value, or None if a pass recorded none.
    lanes: the vmap rule, in which a mapped axis becomes the lanes.
    copies: the op runs on the copy stream.
    is_work: the op takes long enough to hide a copy.
    early: the op starts as soon as possible, in the order of these numbers.
    is_wait: the op blocks until copies have ended, and starts as late as possible.
    reads_host: the op reads the host tier; `cuda` starts after the offloads.
    capturable: a CUDA graph may contain the op, which reads no length on the host.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    cuda: str | None = None
    fused: Callable[..., Any] | None = None
    library: Callable[[Any], object] | None = None
    lanes: Callable[..., Any] | None = None
    copies: bool = False
    is_work: bool = False
    early: int | None = None
    is_wait: bool = False
    reads_host: bool = False
    capturable: bool = True

    @property
    def name(self) -> str:
        return self.schema.split("(")[0]


def fake_nothing(*args: object) -> None:
    """Fake of an op that only mutates its arguments."""


def fake_of_query(q: Tensor, *rest: Any) -> Tensor:
    """Fake of an attention: [B, Hq, T, d], like the query."""
    return q.new_empty(q.shape)


def loaded_on_first_use(place: str) -> Callable[..., Any]:
    """Return a function that imports `place` (`Op.cuda`) on its first call, and runs it on its first tensor's device.

    Triton alone launches on the current device, wherever its arguments are.
    """
    module, name = place.split(":")

    def call(*arguments: Any) -> Any:
        run = getattr(importlib.import_module(module, __package__), name)
        device = arguments[0].device
        if device.index == torch.cuda.current_device():
            return run(*arguments)
        with torch.cuda.device(device):
            return run(*arguments)

    return call


_library = torch.library.Library("specache", "DEF")
_registry: dict[str, Op] = {}


def register(op: Op) -> None:
    """Register an op, and the op `NAME_fused` of its fused implementation, with torch and the passes."""
    _library.define(op.schema)
    _library.impl(op.name, op.run, "CPU")
    if op.cuda is not None:
        _library.impl(op.name, loaded_on_first_use(op.cuda), "CUDA")
    torch.library.register_fake(f"specache::{op.name}", op.fake, lib=_library)
    if op.lanes is not None:
        torch.library.register_vmap(f"specache::{op.name}", op.lanes, lib=_library)
    _registry[op.name] = op
    if op.fused is not None:
        schema = op.schema.replace("(", "_fused(", 1)
        register(replace(op, schema=schema, run=op.fused, fused=None, library=None, cuda=None, lanes=None))


def registered() -> tuple[Op, ...]:
    """Return every registered op."""
    return tuple(_registry.values())


def op_of(target: Any) -> Op | None:
    """Return the registered op of a graph node's target, or None."""
    is_ours = isinstance(target, torch._ops.OpOverload) and target.namespace == "specache"
    return _registry[target.name().removeprefix("specache::")] if is_ours else None
