"""A value told in words: equal words, in another process, for a value that a trace takes for the same."""

from __future__ import annotations

import enum
import inspect
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from .code import PLAIN, behind, code_hash, function_hash, hash_of

NAMED = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
SAID = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def told(value: Any) -> str | None:
    """Words for a value; None where none would tell it from another."""
    if isinstance(value, enum.Enum):
        return f"{named(type(value))}.{value.name}"
    if type(value) in PLAIN or isinstance(value, SAID):
        return repr(value)
    if type(value) in (tuple, list, set, frozenset):
        return several(value)
    if isinstance(value, CodeType):
        return f"code {code_hash(value)}"
    if isinstance(value, FunctionType):
        return f"function {named(value)} {function_hash(value)}"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if inspect.isclass(value):
        return f"class {named(value)} {class_hash(value)}"
    if isinstance(value, MethodType):
        function = told(value.__func__)
        return None if function is None else f"method of {named(type(value.__self__))}: {function}"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"op {value}"
    if isinstance(value, NAMED):
        return f"builtin {named(value)}"
    return None


def several(values: Any) -> str | None:
    parts = [told(value) for value in values]
    if None in parts:
        return None
    ordered = parts if isinstance(values, (tuple, list)) else sorted(map(str, parts))
    return f"{type(values).__name__} {ordered}"


def named(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}"


def class_hash(value: type) -> str:
    """What a class's own methods say; its bases have their own."""
    found = [(place, function_hash(f)) for name, member in vars(value).items() for place, f in behind(name, member)]
    return hash_of(sorted(found))
