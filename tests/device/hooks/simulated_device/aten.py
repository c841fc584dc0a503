"""aten on the simulated device: an op with a CUDA kernel runs its CPU kernel on the same memory.

It runs at the place in the current stream where CUDA would launch its own kernel.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulated_device import driver

# Ops whose CUDA code does no arithmetic: memory, views, and reading one number.
KEPT = {
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "alias", "resize_", "unfold",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_", "record_stream",
    "_local_scalar_dense", "_pin_memory", "is_pinned", "view_as_real", "view_as_complex", "_efficientzerotensor",
    "is_set_to", "_fused_sdp_choice", "_resize_output_",
}  # fmt: skip
# Ops that read their result, or an index's size, on the host: on CUDA they stop it.
STOP_THE_HOST = {
    "nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount", "equal", "repeat_interleave",
}  # fmt: skip
INDEX = {"index", "index_put_", "_index_put_impl_"}
MIX_DEVICES = {*INDEX, "_foreach_copy_"}  # they accept host tensors next to device tensors

Given = dict[str, Any]
_library = torch.library.Library("aten", "IMPL", "CUDA")


def mapped(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return a value with each tensor in it replaced."""
    if isinstance(value, list | tuple):
        return [mapped(each, replace) for each in value]
    return replace(value) if isinstance(value, Tensor) else value


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, found.append)
    return found


def alias_of(tensor: Tensor) -> Tensor:
    """Return a device tensor's memory as a CPU tensor, which does not keep the memory alive."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    out = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    out = out.conj() if tensor.is_conj() else out
    return torch._neg_view(out) if tensor.is_neg() else out


def like(tensor: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def writable(tensor: Tensor, written: bool) -> Tensor:
    """Return an alias; an empty `out` may be resized, which an alias cannot be."""
    return like(tensor, "cpu") if written and tensor.is_cuda and tensor.numel() == 0 else alias_of(tensor)


def kept(tensor: Tensor, written: bool) -> Tensor:
    """Return the argument of work that runs later: the same memory, or the values that the host has now."""
    return writable(tensor, written) if tensor.is_cuda else tensor.clone()


class OnCpu:
    """The CUDA kernel of one op."""

    def __init__(self, name: str) -> None:
        self.name, _, overload = name.partition(".")
        self.overloads = getattr(torch.ops.aten, self.name)
        self.op = getattr(self.overloads, overload or "default")
        arguments, returns = self.op._schema.arguments, self.op._schema.returns
        self.names = [argument.name for argument in arguments]
        self.tensors = [argument.name for argument in arguments if str(argument.type) == "Tensor"]
        written = {tuple(x.alias_info.before_set): x.name for x in arguments if x.alias_info and x.alias_info.is_write}
        self.written = set(written.values())
        # The argument that each result is, or None for a new tensor.
        self.sources = [x.alias_info and written.get(tuple(x.alias_info.before_set)) for x in returns]
        # Integers for shapes alone: an index of zero always exists; a divisor is not zero.
        self.integer = int(any(part in self.name for part in ("div", "rem", "mod")))

    def device_of(self, given: Given) -> torch.device:
        """Return the device of all tensors; those of one number may be elsewhere."""
        tensors, device = tensors_in(list(given.values())), given.get("device")
        devices = {x.device for x in tensors if x.is_cuda and x.dim()} or {x.device for x in tensors if x.is_cuda}
        if self.name not in MIX_DEVICES:
            devices |= {x.device for x in tensors if x.is_cpu and x.dim() and x.numel()}
        if len(devices) > 1:
            found = " and ".join(map(str, devices))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found}! (aten::{self.name})")
        if device is not None and device.type == "cuda" and device.index is not None:
            return device
        return next(iter(devices), torch.device("cuda", torch.cuda.current_device()))

    def stops_the_host(self, given: Given) -> bool:
        masks = self.name in INDEX and any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(given["indices"]))
        return masks or self.name in STOP_THE_HOST

    def on_cpu(self, given: Given, replace: Callable[[Tensor, bool], Tensor], draws: bool) -> Given:
        """Return the arguments for the CPU's kernel."""
        found = {name: mapped(x, lambda t, name=name: replace(t, name in self.written)) for name, x in given.items()}
        if given.get("device") is not None:
            found["device"] = torch.device("cpu")
        if "generator" in self.names:
            cuda = given.get("generator") or torch.cuda.default_generators[self.device_of(given).index]
            found["generator"] = drawing(cuda) if draws else torch.Generator()
        return found

    def stand_in(self, tensor: Tensor, written: bool) -> Tensor:
        """Return numbers in place of an input that is computed later, to find the shapes of the results."""
        if not tensor.is_cuda:
            return tensor
        return like(tensor, "cpu").fill_(1 if tensor.is_floating_point() else self.integer)

    def results(self, given: Given) -> list[Any]:
        # torch passes a number in a tensor's place as the number, which only another overload may accept.
        numbers = any(isinstance(given.get(name), int | float | complex) for name in self.tensors)
        found = (self.overloads if numbers else self.op)(**given)
        return [found] if len(self.sources) == 1 else list(found or ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        device, later = self.device_of(given), driver.deferred()
        if self.stops_the_host(given):
            torch.cuda.current_stream().synchronize()
            later = False
        called = self.on_cpu(given, self.stand_in if later else writable, not later)
        first = self.results(called)
        for name in self.written & given.keys():  # an `out` that the CPU's kernel has resized
            theirs, ours = given[name], called[name]
            if isinstance(theirs, Tensor) and theirs.shape != ours.shape:
                theirs.resize_(ours.shape)
                if not later:
                    alias_of(theirs).copy_(ours)
        made = [each for source, each in zip(self.sources, first, strict=True) if source is None]
        outputs = mapped(made, lambda x: like(x, device))
        aliases = list(map(alias_of, tensors_in(outputs)))

        def store(results: list[Any]) -> None:
            computed = [each for source, each in zip(self.sources, results, strict=True) if source is None]
            for alias, result in zip(aliases, tensors_in(computed), strict=True):
                alias.copy_(result)

        if later:
            inputs = self.on_cpu(given, kept, True)
            driver.enqueue(f"aten::{self.name}", lambda: store(self.results(inputs)))
        else:
            store(first)
        new = iter(outputs)
        returned = [next(new) if source is None else given[source] for source in self.sources]
        return returned[0] if len(returned) == 1 else tuple(returned) or None


def drawing(cuda: torch.Generator) -> torch.Generator:
    """Return a CPU generator from the seed and the offset of CUDA's; its numbers differ from CUDA's."""
    offset = 0 if driver.capturing() else cuda.get_offset()
    if not driver.capturing():
        cuda.set_offset(offset + 4)
    return torch.Generator().manual_seed((cuda.initial_seed() * 1000003 + offset) % 2**63)


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_sums: bool, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what CUDA's kernel returns, by the CPU's plain formula; the output's layout is tokens before heads."""
    (rows, heads, queries, _), grouped = q.shape, q.shape[1] != k.shape[1]
    out = q.new_empty(rows, queries, heads, v.shape[3]).transpose(1, 2)
    sums = q.new_empty(rows, heads, math.ceil(queries / 32) * 32 if with_sums else 0, dtype=torch.float32)
    to, query, key, value, added = (x if x is None else alias_of(x) for x in (out, q, k, v, bias))
    plain = torch.ops.aten._scaled_dot_product_attention_math

    def attend() -> None:
        to.copy_(plain(query, key, value, added, 0.0, causal, None, scale=scale, enable_gqa=grouped)[0])

    driver.enqueue("attention", attend)
    return out, sums, *(torch.scalar_tensor(0, dtype=torch.int64) for _ in range(2))


op_on_cpu = functools.cache(OnCpu)


def kernel_of(name: str) -> Callable[..., Any]:
    """Return a function whose first use reads the op's schema."""
    return torch._disable_dynamo(lambda *args, **kwargs: op_on_cpu(name)(*args, **kwargs))


def between(to: Tensor, source: Tensor) -> Tensor:
    """Copy in the source's stream; as in CUDA, the stream of `to` waits, and is waited for."""
    reading, writing = map(torch.cuda.current_stream, (source.device, to.device))
    read, written = alias_of(source), alias_of(to)
    reading.wait_stream(writing)
    with torch.cuda.stream(reading):
        driver.enqueue("aten::copy_", lambda: written.copy_(read))
    writing.wait_stream(reading)
    return to


def copying() -> Callable[..., Tensor]:
    """Return `copy_`: between host and device it is CUDA's own, which copies memory."""
    across, within = torch.library.get_kernel("aten::copy_", "CUDA"), kernel_of("copy_")

    def copy_(keys: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if to.is_cuda and source.is_cuda:
            return within(to, source) if to.device == source.device else between(to, source)
        return across.call_boxed(keys, to, source, non_blocking)

    return torch._disable_dynamo(copy_)


def install() -> None:
    """Replace CUDA's kernels. An op without a CPU kernel keeps its own, whose launch the driver refuses by name."""
    kernels = {
        name.removeprefix("aten::"): kernel_of(name.removeprefix("aten::"))
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
        if name.startswith("aten::") and torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
    }
    kernels["_scaled_dot_product_efficient_attention"] = torch._disable_dynamo(efficient_attention)
    kernels["copy_"] = copying()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what is replaced
        for name in kernels.keys() - KEPT:
            _library.impl(name, kernels[name], with_keyset=name == "copy_", allow_override=True)
