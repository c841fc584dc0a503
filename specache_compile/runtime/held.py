"""Held tensors: what Hugging Face's cache keeps in place of keys and values: shape and dtype, no storage.

Length, crop, row selection, repeat and deepcopy work on them; the session replays those edits on its tiers when
the cache is next used. Where no compiled graph runs, HF's update makes them plain; any other reading raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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


class Owner(Protocol):
    """Whose pairs held tensors stand for (`session.py`).

    version: counts the changes that no old view survives.
    moved: layers that another owner has taken over, and their numbers there.
    """

    version: int
    moved: dict[int, tuple[Any, int]]

    def fork(self, handle: Handle) -> Owner:
        """A second owner with copies of all that this one has, for the view that `handle` has."""

    def give_up(self, handle: Handle) -> Tensor:
        """A plain copy [B, H, n, d] of what `handle` stands for."""


@dataclass(frozen=True)
class Handle:
    """What a held tensor stands for: keys or values of one layer of a session.

    session: whose they are.
    version: of the session, when the tensor was made.
    site: the layer's number.
    part: keys or values.
    edits: of this tensor since.
    """

    session: Any  # an Owner
    version: int
    site: int
    part: Part
    edits: tuple[Edit, ...] = field(default=())

    @property
    def now(self) -> Handle:
        """The same layer, by the session that has it now (`regroup.py`)."""
        session, site = self.session, self.site
        while site in session.moved:
            session, site = session.moved[site]
        return self if session is self.session else replace(self, session=session, site=site)


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
        handle = self.handle.now
        key = id(handle.session), handle.version
        forks = memo.setdefault(id(HeldTensor), {})
        if key not in forks:
            forks[key] = handle.session.fork(handle)
        fork: Owner = forks[key]
        return HeldTensor(self.anchor, self.shape, replace(handle, session=fork, version=fork.version))

    def __copy__(self) -> HeldTensor:
        return HeldTensor(self.anchor, self.shape, self.handle)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.anchor.device.type == "meta":
            return HeldTensor, (self.anchor, tuple(self.shape))
        raise held_saved()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise held_read("numpy()")

    def tolist(self) -> Any:
        raise held_read("tolist()")

    def __getitem__(self, index: Any) -> HeldTensor:
        """Crop and row selection. Not through ATen: its slice would make a view, which Dynamo traces with its base."""
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
        """Each batch row `repeats` times. Not through ATen, which takes it apart into expands and views."""
        return select_rows(self, dim, torch.arange(self.shape[0], device=self.device).repeat_interleave(repeats))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replay shape edits as handles; give `cat` its shape under Dynamo, its value outside; refuse all else."""
        kwargs = kwargs or {}
        if func is aten.cat.default:
            return (traced_cat if is_being_traced(args[0]) else uncompiled_cat)(*args, **kwargs)
        rule = EDITS.get(func)
        if rule is None or not isinstance(args[0], HeldTensor):
            raise held_read(f"{func}")
        return rule(*args, **kwargs)


def is_being_traced(parts: list[Tensor]) -> bool:
    return any(isinstance(p.anchor if isinstance(p, HeldTensor) else p, FakeTensor) for p in parts)


def traced_cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    """The shape of HF's cache update while Dynamo captures it; the rewritten graph has no such node."""
    plain = next(part for part in parts if not isinstance(part, HeldTensor))
    shape = list(plain.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return plain.new_empty(shape)


def uncompiled_cat(parts: list[Tensor], dim: int = 0) -> Tensor:
    """HF's cache update where no compiled graph runs it: from here on this layer's keys, or values, are plain."""
    held, *new = parts
    if not isinstance(held, HeldTensor) or held.handle is None or dim not in (2, -2):
        raise held_read("a cat that is not an update of the cache")
    handle = held.handle.now
    return torch.cat([handle.session.give_up(handle), *new], dim)


def edited(held: HeldTensor, shape: Any, edit: Edit) -> HeldTensor:
    if held.handle is None:
        raise held_read("an edit inside the compiled model")
    result = HeldTensor(held.anchor, shape, replace(held.handle, edits=(*held.handle.edits, edit)))
    torch._dynamo.maybe_mark_dynamic(result, (0, 2))
    return result


def keep(held: HeldTensor, *args: Any, **kwargs: Any) -> HeldTensor:
    return held


def take(held: HeldTensor, dim: int, part: Any) -> HeldTensor:
    """One dimension's part of an index. Rows: whatever a plain tensor takes there (its errors too); tokens: a crop."""
    if isinstance(part, slice) and part.indices(held.shape[dim]) == (0, held.shape[dim], 1):
        return held
    if dim == 2 and isinstance(part, slice):
        return crop(held, *part.indices(held.shape[2]))
    if dim != 0:
        raise held_read("indexing other than by batch rows and a crop")
    rows = torch.arange(held.shape[0], device="cpu")
    return select_rows(held, 0, rows[part.cpu() if isinstance(part, Tensor) else part, ...])


def crop(held: HeldTensor, start: int, stop: int, step: int) -> HeldTensor:
    if (start, step) != (0, 1):
        raise held_read("a slice that does not start at the first token")
    return edited(held, (*held.shape[:2], stop, held.shape[3]), Crop(stop))


def select_rows(held: HeldTensor, dim: int | None, rows: Tensor) -> HeldTensor:
    """The batch rows of these numbers [B']."""
    if dim != 0 or rows.dim() != 1:
        raise held_read("indexing other than by batch rows and a crop")
    return edited(held, (rows.numel(), *held.shape[1:]), SelectRows(rows))


def to_same(held: HeldTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> HeldTensor:
    if dtype not in (None, held.dtype) or (device is not None and torch.device(device).type != held.device.type):
        raise held_read(f"a move or cast of the cache (dtype={dtype}, device={device}; specache offloads by itself)")
    return held


def only_shape(held: HeldTensor, *, device: Any = None, **kwargs: Any) -> HeldTensor:
    """A held tensor on the meta device, which stands for nothing: what Dynamo stores of an input is its shape."""
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
        f"{operation} tried to read keys or values that the specache backend holds in its own tiers: this tensor has "
        "their shape alone. specache_compile.materialize(cache) gives a plain copy of the cache to read."
    )


def held_saved() -> HeldTensorError:
    return HeldTensorError(
        "a cache that the specache backend holds in its own tiers cannot be pickled. specache_compile.save(cache, "
        "folder) and load(folder, model) take it to another process; materialize(cache) makes a plain copy, and "
        "copy.deepcopy one that is held."
    )
