"""What an op is: schema, implementations, and all that passes, lowering and explain know of it; and their registry.

Every op names exactly the state tensors that it mutates; order between ops is their data flow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import costs
from .costs import CostOf


@dataclass(frozen=True)
class Op:
    """One op, and all that the passes, the lowering and explain know of it.

    schema: every mutated argument marked.
    run: the PyTorch code that defines the op.
    fake: the op's shapes under FakeTensorMode and on the meta device.
    cuda: "module:function" of the CUDA implementation, loaded on first use (triton is on Linux only);
        ".room.module" is one of kernels/. None: the op is for CPUs.
    fused: the same for CPUs, in C++ or by a kernel of torch: an op `NAME_fused` of its own, which lowering puts in the
        op's place.
    library: has that C++ compiled, for arguments like these.
    cost: see `costs.py`.
    lanes: the op's vmap rule, where a mapped axis becomes lanes.
    copies: the op runs on the copy stream.
    is_work: the op takes long enough to hide a copy behind.
    early: the op starts as soon as possible; of several that could, the one of the lowest number first.
    is_wait: the op blocks until copies have ended, and starts as late as possible.
    reads_host: the op waits for the offloads by itself.
    capturable: a CUDA graph may hold the op, which reads no length on the host.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    cuda: str | None = None
    fused: Callable[..., Any] | None = None
    library: Callable[..., object] | None = None
    cost: CostOf = costs.nothing
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


def with_fused(op: Op) -> Iterator[Op]:
    """The op, and what its C++ is declared as."""
    yield op
    if op.fused is not None:
        schema = op.schema.replace("(", "_fused(", 1)
        yield replace(op, schema=schema, run=op.fused, fused=None, library=None, cuda=None, lanes=None)


def fake_nothing(*args: object) -> None:
    """The fake of an op that only mutates its arguments."""


def fake_of_query(q: Tensor, *rest: Any) -> Tensor:
    """The fake of an attention: [B, Hq, T, d], as the query."""
    return q.new_empty(q.shape)


def loaded_on_first_use(place: str) -> Callable[..., Any]:
    """A function that imports `place` (`Op.cuda`) when it is first called, and runs it on its first tensor's device.

    Triton by itself launches on the current device, whichever its arguments are on.
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
    """Make an op known to torch and to the passes, and its fused twin."""
    for one in with_fused(op):
        register_alone(one)


def register_alone(op: Op) -> None:
    _library.define(op.schema)
    _library.impl(op.name, op.run, "CPU")
    if op.cuda is not None:
        _library.impl(op.name, loaded_on_first_use(op.cuda), "CUDA")
    torch.library.register_fake(f"specache::{op.name}", op.fake, lib=_library)
    if op.lanes is not None:
        torch.library.register_vmap(f"specache::{op.name}", op.lanes, lib=_library)
    _registry[op.name] = op


def registered() -> tuple[Op, ...]:
    """Every op so far."""
    return tuple(_registry.values())


def op_of(target: Any) -> Op | None:
    """The op that a graph node's target is; None where it is none of these."""
    is_ours = isinstance(target, torch._ops.OpOverload) and target.namespace == "specache"
    return _registry[target.name().removeprefix("specache::")] if is_ours else None
