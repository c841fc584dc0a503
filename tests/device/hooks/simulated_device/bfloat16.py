"""Arithmetic in bfloat16 for Triton's interpreter, which stores such numbers as 16-bit integers and multiplies those.

Here an operation widens its operands to float32, and rounds its result to nearest, as a device does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def is_bfloat16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def widened(value: Any) -> Any:
    """Convert a bfloat16 handle to float32; other handles are unchanged."""
    if not is_bfloat16(value):
        return value
    return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def narrowed(numbers: np.ndarray) -> TensorHandle:
    """Round float32 to bfloat16: to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return TensorHandle(np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def in_float32(operation: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Wrap an operation on numbers of one type, whose result has this type, or bool."""

    def run(self: InterpreterBuilder, *given: Any) -> TensorHandle:
        if not any(map(is_bfloat16, given)):
            return operation(self, *given)
        result = operation(self, *map(widened, given))
        return narrowed(result.data) if result.data.dtype == np.float32 else result

    return run


def casting(cast: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def run(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype, *rounding: Any) -> TensorHandle:
        source = widened(source)
        if target.scalar == tl.bfloat16:
            return narrowed(source.data.astype(np.float32))
        return source if target.scalar == source.dtype.scalar else cast(self, source, target, *rounding)

    return run


def multiplying(dot: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Wrap a matrix product, which accumulates in float32."""

    def run(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *given: Any) -> TensorHandle:
        return dot(self, widened(a), widened(b), *given)

    return run


def install() -> None:
    builder = InterpreterBuilder
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma"):
        setattr(builder, name, in_float32(getattr(builder, name)))
    builder.cast_impl = casting(builder.cast_impl)
    builder.create_fp_to_fp = casting(builder.create_fp_to_fp)
    builder.create_dot = multiplying(builder.create_dot)
