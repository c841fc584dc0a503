"""Held tensors: the keys and values in Hugging Face's cache, with shape and dtype but without storage.

Length, crop, row selection, repeat and deepcopy work on them; the session applies those edits to its tiers when the
cache is next used. In an uncompiled call Hugging Face's update makes them plain. Any other read raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.errors import HeldTensorError
from specache_compile.passes.reading.sites import Part

aten = torch.ops.aten


@dataclass(frozen=True)
class Crop:
    """Keep the first `length` tokens."""

    length: int


@dataclass(frozen=True, eq=False)
class SelectRows:
    """Keep the batch rows `indices`, in that order."""

    indices: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SelectRows) and (
            self.indices is other.indices or torch.equal(self.indices, other.indices)
        )


Edit = Crop | SelectRows


@dataclass(frozen=True)
class Handle:
    """The keys or values that a held tensor represents: those of one layer of a session.

    session: a `session.py: Session`.
    version: the session's version when the tensor was created.
    site: the layer's number.
    part: keys or values.
    edits: edits of this tensor since then.
    """

    session: Any
    version: int
    site: int
    part: Part
    edits: tuple[Edit, ...] = field(default=())


class HeldTensor(Tensor):
    """Keys or values [B, H, n, d] of one layer, without storage.

    anchor: carries dtype and device.
    handle: None while Dynamo traces.
    """

    anchor: Tensor
    handle: Handle | None

    @staticmethod
    def __new__(cls, anchor: Tensor, shape: Any, handle: Handle | None = None) -> HeldTensor:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=anchor.dtype, device=anchor.device)

    def __init__(self, anchor: Tensor, shape: Any, handle: Handle | None = None) -> None:
        self.anchor = anchor
        self.handle = handle
        self.__dict__.update(free_sizes())

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["anchor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> HeldTensor:
        return HeldTensor(inner["anchor"], size)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldTensor:
        if self.handle is None:
            raise held_read("copy.deepcopy")
        handle = self.handle
        key = id(handle.session), handle.version
        forks = memo.setdefault(id(HeldTensor), {})
        if key not in forks:
            forks[key] = handle.session.fork(handle)
        return HeldTensor(self.anchor, self.shape, replace(handle, session=forks[key]))

    def __copy__(self) -> HeldTensor:
        return HeldTensor(self.anchor, self.shape, self.handle)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.anchor.device.type == "meta":
            return HeldTensor, (self.anchor, tuple(self.shape))
        raise HeldTensorError(
            "a held cache cannot be pickled. Use specache_compile.save(cache, folder) and load(folder, model) for "
            "another process, materialize(cache) for a plain copy, and copy.deepcopy(cache) for a held copy."
        )

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise held_read("numpy()")

    def tolist(self) -> Any:
        raise held_read("tolist()")

    def __getitem__(self, index: Any) -> Tensor:
        """Crop and row selection. Not through ATen, whose slice creates a view that Dynamo would trace with its
        base."""
        parts = index if isinstance(index, tuple) else (index,)
        if not any(part is Ellipsis for part in parts):
            parts = (*parts, Ellipsis)
        where = next(i for i, part in enumerate(parts) if part is Ellipsis)
        missing = 4 - (len(parts) - 1)
        result = self
        for dim, part in enumerate((*parts[:where], *[slice(None)] * missing, *parts[where + 1 :])):
            result = take(result, dim, part)
        return result

    def repeat_interleave(self, repeats: Any, dim: int | None = None, **kwargs: Any) -> HeldTensor:
        """Repeat each batch row. Not through ATen, which decomposes it into expands and views."""
        return select_rows(self, dim, torch.arange(self.shape[0], device=self.device).repeat_interleave(repeats))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record shape edits in the handle. `cat` returns a shape under Dynamo and real values otherwise; other ops
        raise."""
        kwargs = kwargs or {}
        if func is aten.cat.default:
            anchors = [part.anchor if isinstance(part, HeldTensor) else part for part in args[0]]
            is_traced = any(isinstance(anchor, FakeTensor) for anchor in anchors)
            return (traced_cat if is_traced else uncompiled_cat)(*args, **kwargs)
        rule = EDITS.get(func)
        if rule is None or not isinstance(args[0], HeldTensor):
            raise held_read(f"{func}")
        return rule(*args, **kwargs)


def traced_cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    """The shape of Hugging Face's cache update while Dynamo traces; the rewritten graph has no such node."""
    plain = next(part for part in parts if not isinstance(part, HeldTensor))
    shape = list(plain.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return plain.new_empty(shape)


def uncompiled_cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Hugging Face's cache update in an uncompiled call: from here on this layer's keys, or values, are plain."""
    held, *new = parts
    if not isinstance(held, HeldTensor) or held.handle is None or dim not in (2, -2):
        raise held_read("a cat other than a cache update")
    return torch.cat([held.handle.session.to_plain(held.handle), *new], dim)


def edited(held: HeldTensor, shape: Any, edit: Edit) -> HeldTensor:
    if held.handle is None:
        raise held_read("an edit inside the compiled model")
    return HeldTensor(held.anchor, shape, replace(held.handle, edits=(*held.handle.edits, edit)))


@functools.cache
def free_sizes() -> dict[str, Any]:
    """The attributes by which `maybe_mark_dynamic` frees the sizes of rows and tokens. Each step creates two tensors a
    layer, and copying is faster."""
    marked = torch.empty(1, 1, 1, 1, device="meta")
    before = set(vars(marked))
    torch._dynamo.maybe_mark_dynamic(marked, (0, 2))
    return {name: value for name, value in vars(marked).items() if name not in before}


def keep(held: HeldTensor, *args: Any, **kwargs: Any) -> HeldTensor:
    return held


def take(held: Any, dim: int, part: Any) -> Any:
    """Apply one dimension's part of an index: for rows like a plain tensor, errors included; for tokens a crop.

    If no token is left, the result is a plain tensor, so that the next call is a prefill.
    """
    if isinstance(part, slice) and part.indices(held.shape[dim]) == (0, held.shape[dim], 1):
        return held
    if dim == 2 and isinstance(part, slice):
        start, stop, step = part.indices(held.shape[2])
        if (start, step) != (0, 1):
            raise held_read("a slice that does not start at the first token")
        cropped = edited(held, (*held.shape[:2], stop, held.shape[3]), Crop(stop))
        return cropped if stop else held.anchor.new_empty(cropped.shape)
    if dim != 0:
        raise held_read("indexing other than by batch rows and a crop")
    rows = torch.arange(held.shape[0], device="cpu")
    return select_rows(held, 0, rows[part.cpu() if isinstance(part, Tensor) else part, ...])


def select_rows(held: HeldTensor, dim: int | None, rows: Tensor) -> HeldTensor:
    """Select the batch rows with these numbers [B']."""
    if dim != 0 or rows.dim() != 1:
        raise held_read("indexing other than by batch rows and a crop")
    return edited(held, (rows.numel(), *held.shape[1:]), SelectRows(rows))


def to_same(held: HeldTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> HeldTensor:
    if dtype not in (None, held.dtype) or (device is not None and torch.device(device).type != held.device.type):
        raise held_read(f"a move or cast of the cache (dtype={dtype}, device={device}; specache offloads it itself)")
    return held


def only_shape(held: HeldTensor, *, device: Any = None, **kwargs: Any) -> HeldTensor:
    """A held tensor on the meta device, without a handle: Dynamo stores the shape of an input as such."""
    if device is None or torch.device(device).type != "meta":
        raise held_read("empty_like")
    return HeldTensor(torch.empty_like(held.anchor, device="meta"), held.shape)


EDITS: dict[Any, Callable[..., HeldTensor]] = {
    aten.detach.default: keep,
    aten.alias.default: keep,
    aten.empty_like.default: only_shape,
    aten.index_select.default: select_rows,
    aten._to_copy.default: to_same,
}


def held_read(operation: str) -> HeldTensorError:
    return HeldTensorError(
        f"{operation} cannot read a held tensor: the specache backend keeps these keys and values in its own tiers. "
        "Read specache_compile.materialize(cache), a plain copy of the cache."
    )
