"""Caches for types that Triton's interpreter recomputes in each operation: block types by shape, numpy's by Triton's.

They change no number, and halve the time of an operation. Integer sums are not checked for overflow here;
tests/kernels interpret the same kernels with Triton's checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language.core as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterOptions

_shapes: dict[tuple[int, ...], tuple[tl.tuple, int]] = {}  # of blocks: as their type has it, and its elements
_of_tensors: dict[tuple[int, ...], tuple[tl.tuple, tl.constexpr]] = {}  # the same as a tensor has them
_numpys: dict[str, np.dtype] = {}


def block_type_init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """Replace `block_type.__init__`."""
    key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if key not in _shapes:
        if not key:
            raise TypeError("0d block_type is forbidden")
        _shapes[key] = tl.tuple(tl._unwrap_shape(shape)), validate_block_shape(key)
    self.element_ty = element_ty
    self.shape, self.numel = _shapes[key]
    self.name = f"<{key}, {element_ty}>"


def tensor_init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Replace `tensor.__init__`."""
    key = tuple(type.shape) if type.is_block() else ()
    if key not in _of_tensors:
        _of_tensors[key] = tl.tuple([tl.constexpr(size) for size in key]), tl.constexpr(int(np.prod(key)))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _of_tensors[key]


def kept(find: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """Cache `_get_np_dtype` by type."""

    def run(kind: tl.dtype) -> np.dtype:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if element.name not in _numpys:
            _numpys[element.name] = find(element)
        return _numpys[element.name]

    return run


def casting(cast: Callable[..., tl.tensor]) -> Callable[..., tl.tensor]:
    """Call `cast` only if the dtype changes."""

    def run(self: TritonSemantic, given: tl.tensor, kind: tl.dtype, *more: Any, **named: Any) -> tl.tensor:
        return given if kind is given.dtype else cast(self, given, kind, *more, **named)

    return run


def broadcasting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Call `broadcast_impl_value` only if shapes differ; types of one shape share it (see above)."""

    def run(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> Any:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        done = lhs.type.shape is rhs.type.shape if all(blocks) else not any(blocks)
        return (lhs, rhs) if done else broadcast(self, lhs, rhs)

    return run


def install() -> None:
    tl.block_type.__init__ = block_type_init
    tl.tensor.__init__ = tensor_init
    triton_interpreter._get_np_dtype = kept(triton_interpreter._get_np_dtype)
    triton_interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    TritonSemantic.cast = casting(TritonSemantic.cast)
    TritonSemantic.broadcast_impl_value = broadcasting(TritonSemantic.broadcast_impl_value)
