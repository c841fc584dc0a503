"""The key of what a model computes: cached tokens are valid only for a model with an equal key.

Sampled values of weights show optimiser steps, weight syncs and writes through `.data` or numpy. Settings are plain
attributes of modules (active adapters of PEFT, for example). A write through `.data` or numpy that changes no sampled
value is not seen: call `Batch.forget_prefixes()` after it. A sum over all values would be too slow.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Least number of values to sample of a tensor.
SAMPLED = 256
# Attributes of a module that change no cached value, or that its own calls change.
NO_SETTINGS = {
    *vars(torch.nn.Module()), "_caches", "_is_hf_initialized", "gradient_checkpointing", "hf_device_map",
    "kernel_config", "loss_type", "max_seq_len_cached", "name_or_path", "warnings_issued",
}  # fmt: skip
# RoPE types whose frequencies depend on the length of a call.
LENGTH_ROPE = {"dynamic", "longrope"}
PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class PrefillKey:
    """The part of a key that is valid in other processes, at the time when a row of a cache was filled.

    weights: a sorted hash for each weight and persistent buffer, over shape, dtype and sampled values.
    settings: a hash for each setting of the decoder, by name; None: the model was not found.
    """

    weights: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] | None = None


def model_key(model: torch.nn.Module) -> object:
    """A model's key within this process, for `==`. It also covers the number of writes to each weight, and the training
    mode."""
    weights = [*model.parameters(), *persistent_buffers(model)]
    written = [(id(weight), 0 if weight.is_inference() else weight._version) for weight in weights]
    buffers = [buffer for module in model.modules() if not follows_length(module) for buffer in module.buffers(False)]
    values = sampled([*model.parameters(), *buffers])
    return written, values, settings_of(model), [module.training for module in model.modules()]


class Watch:
    """Compares a model before every step with an earlier state: `model_key` would take too long.

    It compares all attributes, the number of writes to each tensor, and one value of it. It keeps replaced tensors
    alive.
    """

    @torch.inference_mode(False)
    def __init__(self, model: torch.nn.Module) -> None:
        self.attributes = [
            (vars(m), {name: copy.copy(x) if type(x) in (dict, list, set) else x for name, x in vars(m).items()})
            for m in model.modules()
        ]
        tensors = [*model.parameters(), *model.buffers()]
        self.tensors = [tensor for tensor in tensors if not is_traceable_wrapper_subclass(tensor)]
        first = [part.as_strided((1,), (1,)).view(torch.uint8) for tensor in tensors for part in parts_of(tensor)]
        self.first = [[x for x in first if x.device == device] for device in {x.device for x in first}]
        self.before = self.written()

    @torch.inference_mode(False)
    def written(self) -> object:
        counts = [(0 if x.is_inference() else x._version, x.data_ptr()) for x in self.tensors]
        return counts, [torch.cat(values).tolist() for values in self.first]

    def holds(self) -> bool:
        """Whether nothing has changed, as far as it compares."""
        try:
            return all(now == before for now, before in self.attributes) and self.written() == self.before
        except (RuntimeError, ValueError):  # `==` of two tensors or arrays
            return False


def prefill_key(model: torch.nn.Module | None, weights: Iterable[Tensor]) -> PrefillKey:
    """The key of a prefill with these weights. None: the model is unknown."""
    if model is None:
        return PrefillKey(weight_hashes(weights))
    decoder = decoder_of(model)  # all wrappers of a model have it in common
    settings = {name: hash_of(repr(values)) for name, values in settings_of(decoder).items()}
    return PrefillKey(weight_hashes([*weights, *persistent_buffers(decoder)]), tuple(sorted(settings.items())))


def weight_hashes(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """16 hex digits for each tensor, over its shape, dtype and sampled values; sorted."""
    return tuple(sorted(hash_of(f"{kind} {values.hex()}") for kind, values in sampled(tensors)))


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.inference_mode(False)
@torch.no_grad()
def sampled(tensors: Iterable[Tensor]) -> list[tuple[str, bytes]]:
    """The shape and dtype of each tensor, and the bytes of some of its values."""
    parts = [part for tensor in tensors for part in parts_of(tensor)]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, part in enumerate(parts):
        groups.setdefault((part.device, part.dtype), []).append(number)
    values: dict[int, Tensor] = {}
    for numbers in groups.values():
        views = [some_values(parts[number]) for number in numbers]
        copied = torch.cat(views).cpu().split([len(view) for view in views])  # one copy from the device
        values.update(zip(numbers, copied, strict=True))
    return [
        (f"{tuple(part.shape)} {part.dtype}", values[number].view(torch.uint8).numpy().tobytes())
        for number, part in enumerate(parts)
    ]


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of; none where it has no memory."""
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # a DTensor lists its mesh too
                yield from parts_of(part)
    elif tensor.numel() and tensor.device.type != "meta" and not isinstance(tensor, FakeTensor):
        yield tensor.detach()


def some_values(tensor: Tensor) -> Tensor:
    """A tensor's values at equal distances [n]."""
    whole = tensor.contiguous()
    step = max(1, whole.numel() // SAMPLED)
    return whole.as_strided((-(-whole.numel() // step),), (step,))


def settings_of(model: torch.nn.Module) -> dict[str, list[object]]:
    """The plain attributes of a model's modules: their values by name, in the modules' order. They are the same in
    every process."""
    from transformers import PreTrainedModel  # loaded with the model; compiling alone does not need it

    found: dict[str, list[object]] = {}
    for module in model.modules():
        loaded = isinstance(module, PreTrainedModel)  # its private attributes describe how it was loaded
        for name, value in vars(module).items():
            if name in NO_SETTINGS or (loaded and name.startswith("_")):
                continue
            try:
                setting = plain(value)
            except TypeError:
                continue
            found.setdefault(name, []).append(setting)
    return found


def plain(value: Any) -> object:
    """A number, a text, or a non-empty container of these, in a form that compares and prints the same in every
    process. TypeError for any other value; an empty container may be a cache."""
    if isinstance(value, PLAIN):
        return str(value) if isinstance(value, (str, torch.dtype)) else value
    if not isinstance(value, (dict, list, tuple, set, frozenset)) or not value:
        raise TypeError(f"{type(value).__name__} is not plain")
    if isinstance(value, dict):
        return sorted((repr(plain(key)), plain(item)) for key, item in value.items())
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else sorted(repr(plain(x)) for x in value)


def follows_length(module: torch.nn.Module) -> bool:
    """Whether each call computes a module's buffers from its longest position."""
    kinds = getattr(module, "rope_type", None)
    return not LENGTH_ROPE.isdisjoint(kinds.values() if isinstance(kinds, dict) else [kinds])


def persistent_buffers(model: torch.nn.Module) -> list[Tensor]:
    """The buffers that a checkpoint has. The others follow from the configuration."""
    return [
        buffer for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]  # fmt: skip


def calling_model() -> torch.nn.Module | None:
    """The model, or a part of it, whose compiled forward is running: the innermost with a decoder on the stack. Graphs
    receive only tensors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and hasattr(owner, "get_decoder"):
            return owner
        frame = frame.f_back
    return None


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model without a vision tower, for example."""
    return getattr(model, "get_decoder", lambda: model)()
