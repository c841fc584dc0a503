"""What a call of a model looks like from outside: where its forms are looked for, before any guard is asked."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from .code import PLAIN, code_hash, hash_of

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_always_called",
)  # fmt: skip


def call_key(code: CodeType, local_scope: Mapping[str, Any], how: Mapping[str, str]) -> str:
    """A folder's name for calls of this code with arguments of these kinds. how: what torch.compile was told."""
    arguments = [(name, kind_of(value)) for name, value in sorted(local_scope.items())]
    return hash_of((code_hash(code), arguments, how), 24)


def kind_of(value: Any, depth: int = 0) -> Any:
    """Of a tensor no more than Dynamo always tells apart: its class, dtype, device, and which sizes are 1."""
    if isinstance(value, Tensor):
        sizes = tuple(size == 1 for size in value.shape)
        return type(value).__name__, str(value.dtype), value.device.type, sizes, value.requires_grad
    if isinstance(value, torch.nn.Module):
        return type(value).__qualname__, model_hash(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, FunctionType):
        return value.__qualname__
    if isinstance(value, Mapping):
        return [(str(key), kind_of(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return [kind_of(item, depth + 1) for item in value]
    layers = getattr(value, "layers", None)
    if isinstance(layers, list) and depth < 3:
        return type(value).__qualname__, [layer_kind(layer) for layer in layers]
    return type(value).__qualname__


def layer_kind(layer: Any) -> Any:
    """Of a cache's layer: its class, whether it is filled, and with what."""
    keys = getattr(layer, "keys", None)
    return (
        type(layer).__qualname__,
        getattr(layer, "is_initialized", None),
        type(keys).__name__,
        getattr(keys, "ndim", 0),
    )


def model_hash(model: torch.nn.Module) -> str:
    """Its modules' classes and its weights' shapes."""
    parts = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    weights = [(name, tuple(p.shape), str(p.dtype), p.device.type) for name, p in model.named_parameters()]
    return hash_of((parts, weights))


def has_hooks(model: torch.nn.Module) -> bool:
    """Whether code that is no method's runs with a module's: Dynamo's guards do not look there."""
    module = torch.nn.modules.module
    anywhere = (module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks)
    return any(anywhere) or any(getattr(part, name, None) for part in model.modules() for name in HOOKS)
