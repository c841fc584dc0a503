"""Run Triton kernels in Triton's interpreter on the device's memory, and check every address.

Triton decides when it is imported whether it compiles or interprets. Here a process does both: the kernel is compiled
and launched as on a device, and its text is run as well. So a kernel's functions are rewritten into copies, whose
globals are copies too, and the language is patched only while a kernel runs.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import FunctionRewriter, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction, _normalize_ty

from simulated_device import bfloat16, driver, quicker

Function = Callable[..., Any]
_rewritten: dict[Function, Function] = {}
_running: list[str] = []  # the kernel that runs, by name
# The interpreter has one grid for all threads, and the language is patched for all: neither two kernels at once, nor a
# compilation beside one.
LANGUAGE = threading.RLock()


class CopyingRewriter(FunctionRewriter):
    """Triton's rewriter leaves internal names in the module's globals, where a compilation would find them."""

    def _compile_and_exec(self, transformed_ast: Any) -> Function:
        ours = {name: value for name, value in vars(triton_interpreter).items() if not name.startswith("__")}
        theirs = {
            name: Libdevice if value is triton_helpers.libdevice else value
            for name, value in self.fn.__globals__.items()
        }
        namespace = {**ours, **theirs, "COMPILED": False}  # the interpreter has no inline assembly
        exec(compile(transformed_ast, self.filename, "exec"), namespace)
        return namespace[self.fn.__name__]


def rewritten(function: Function) -> Function:
    if function not in _rewritten:
        _rewritten[function] = CopyingRewriter(function).rewrite_ast()
    return _rewritten[function]


def call_inside_a_kernel(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Replace JITFunction's call, which always raises, for helpers that an interpreted kernel calls."""
    if not _running:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")
    kwargs.pop("_semantic", None)
    return rewritten(self.fn)(*args, **kwargs)


# ---- CUDA's library of mathematics
def elementwise(function: Function) -> staticmethod:
    def applied(x: Any, **_: Any) -> tl.tensor:
        x = triton_interpreter.interpreter_semantic.to_tensor(x)
        if x.dtype.scalar not in (tl.float32, tl.float64):
            raise TypeError(f"a function of libdevice on {x.dtype}")
        data = x.handle.data
        return tl.tensor(TensorHandle(function(data).astype(data.dtype), x.handle.dtype), x.type)

    return staticmethod(applied)


class Libdevice:
    """The functions that Inductor's kernels call."""

    abs, floor, ceil, trunc, nearbyint = (elementwise(f) for f in (np.abs, np.floor, np.ceil, np.trunc, np.rint))
    exp, exp2, expm1, log, log2, log1p = (
        elementwise(f) for f in (np.exp, np.exp2, np.expm1, np.log, np.log2, np.log1p)
    )
    sqrt, sin, cos, tanh = (elementwise(f) for f in (np.sqrt, np.sin, np.cos, np.tanh))
    rsqrt = elementwise(lambda x: 1 / np.sqrt(x))


# ---- addresses
def check_addresses(pointers: TensorHandle, mask: np.ndarray | None, what: str) -> None:
    """Require that every accessed address is in one device allocation, or in registered host memory."""
    addresses = np.asarray(pointers.data, np.uint64).reshape(-1)
    if mask is not None:
        addresses = addresses[np.broadcast_to(mask, np.shape(pointers.data)).reshape(-1).astype(bool)]
    if addresses.size == 0:
        return
    size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
    starts, ends = driver.memory_ranges()
    places = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    inside = (places >= 0) & (addresses + size <= ends[np.maximum(places, 0)]) if len(starts) else places >= 0
    if not inside.all():
        wrong = int(addresses[~inside][0])
        raise RuntimeError(
            f"{_running[-1]}: a {what} of {size} bytes at {wrong:#x} is in no memory of the device's, nor pinned"
        )


def checked(access: Function, what: str, pointers_at: int, mask_at: int | None) -> Function:
    def run(self: InterpreterBuilder, *args: Any) -> Any:
        mask = None if mask_at is None else args[mask_at].data
        check_addresses(args[pointers_at], mask, what)
        return access(self, *args)

    return run


def install_checks() -> None:
    builder = InterpreterBuilder
    builder.create_masked_load = checked(builder.create_masked_load, "read", 0, 1)
    builder.create_masked_store = checked(builder.create_masked_store, "write", 0, 2)
    builder.create_atomic_rmw = checked(builder.create_atomic_rmw, "atomic", 1, 3)
    builder.create_atomic_cas = checked(builder.create_atomic_cas, "atomic", 0, None)


# ---- a launch
# Replaces a kernel: the interpreter finds the modules to patch by its globals.
_MODULES = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})


def annotations_of(function: Function) -> dict[str, Any]:
    given = getattr(function, "__annotations__", {})
    return {name: _normalize_ty(kind) for name, kind in given.items() if kind is not inspect.Parameter.empty}


def as_arguments(function: Function, bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kernel's arguments: addresses and numbers as the interpreter's tensors, constants unchanged."""
    annotations = annotations_of(function)

    def as_argument(name: str, value: Any) -> Any:
        if isinstance(value, tl.constexpr):
            value = value.value
        if annotations.get(name) == "constexpr" or isinstance(value, bool | str | None):
            return value
        return triton_interpreter._implicit_cvt(value)

    return {name: as_argument(name, value) for name, value in bound.items()}


def interpret(function: Function, bound: Mapping[str, Any], grid: tuple[int, ...], name: str) -> None:
    """Queue one launch on the current stream; its programs run sequentially."""
    arguments = as_arguments(function, bound)
    x, y, z = (*(int(size) for size in grid), 1, 1)[:3]

    def run_programs() -> None:
        program, builder = rewritten(function), triton_interpreter.interpreter_builder
        builder.set_grid_dim(x, y, z)
        for place in np.ndindex(x, y, z):
            builder.set_grid_idx(*place)
            program(**arguments)

    def run() -> None:
        with LANGUAGE, np.errstate(all="ignore"):
            patched = triton_interpreter._patch_lang(_MODULES)
            _running.append(name)
            try:
                run_programs()
            finally:
                _running.pop()
                patched.restore()

    driver.enqueue(name, run)


def as_tensor(x: Any) -> tl.tensor:
    return x if isinstance(x, tl.tensor) else triton_interpreter.interpreter_semantic.to_tensor(x)


def install() -> None:
    JITFunction.__call__ = call_inside_a_kernel
    install_checks()
    bfloat16.install()
    quicker.install()
    # Inductor writes reductions element by element; the interpreter has a built-in reduction.
    _rewritten[triton_helpers.max2.fn] = lambda a, dim: call_inside_a_kernel(tl.standard.max, a, dim)
    _rewritten[triton_helpers.min2.fn] = lambda a, dim: call_inside_a_kernel(tl.standard.min, a, dim)
    _rewritten[triton_helpers.promote_to_tensor.fn] = as_tensor
