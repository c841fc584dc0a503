"""Hashes of code, and descriptions of values, that are equal in two processes if a trace treats the values alike.

A module's hash changes when its file is edited and when a function is replaced (`LlamaAttention.forward = other`).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
PRINTED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Code of torch and Python, whose versions are in the environment key.
VERSIONED = ("<frozen ", str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))


def hash_of(value: Any, digits: int = 16) -> str:
    """The first hex digits of a hash of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:digits]


@functools.cache
def code_hash(code: CodeType) -> str:
    """A hash of what a code object and those inside it do, without the file and line."""
    ordered = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in code.co_consts]
    constants = [code_hash(each) if isinstance(each, CodeType) else repr(each) for each in ordered]
    parts = (
        code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable,
    )  # fmt: skip
    return hash_of(parts, 64)


def members_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """A module's values and the attributes of its classes, with their names."""
    for name, value in list(vars(module).items()):
        if name.startswith("__") and not name.endswith("__"):
            continue  # Dynamo adds these to the module of a function that it compiles
        yield name, value
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield from ((f"{name}.{member}", attribute) for member, attribute in list(vars(value).items()))


def functions_in(place: str, value: Any, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, FunctionType]]:
    """The functions inside a function, a property, a static, class or cached method, and inside their decorators."""
    inner: tuple[Any, ...] = ()
    if isinstance(value, property):
        inner = (value.fget, value.fset)
    elif isinstance(value, (staticmethod, classmethod, functools._lru_cache_wrapper)):
        inner = (value.__wrapped__,)
    elif isinstance(value, FunctionType):
        yield place, value
        inner = cells_of(value)
    for each in inner:
        if id(each) not in seen:
            yield from functions_in(f"{place}<", each, seen | {id(value), id(each)})


def cells_of(function: FunctionType) -> tuple[Any, ...]:
    """The values that a function closes over."""
    return tuple(cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())


def functions_hash(members: Iterable[tuple[str, Any]]) -> str:
    """A hash of the functions in named values."""
    functions = [pair for name, value in members for pair in functions_in(name, value)]
    return hash_of(sorted((place, function_hash(function)) for place, function in functions), 64)


def function_hash(function: FunctionType) -> str:
    """A hash of a function's code, its defaults and the values that it closes over."""
    defaults = (function.__defaults__, *(function.__kwdefaults__ or {}).items())
    return hash_of((code_hash(function.__code__), plain_text(cells_of(function)), plain_text(defaults)), 64)


def plain_text(value: Any) -> str:
    """A plain value's text; the type of any other value."""
    if isinstance(value, tuple):
        return f"({', '.join(map(plain_text, value))})"
    return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__


def module_hash(module: ModuleType) -> str:
    """A hash of a module's file, its functions and its classes' plain constants."""
    members = list(members_of(module))
    inside = [(place, value) for place, value in members if "." in place and ".__" not in place]
    constants = sorted((place, repr(value)) for place, value in inside if isinstance(value, PLAIN))
    file = Path(getattr(module, "__file__", None) or "")
    return hash_of((functions_hash(members), constants, file.read_bytes() if file.is_file() else b""), 64)


def modules_of(codes: Iterable[CodeType], classes: Iterable[type]) -> dict[str, str] | None:
    """The modules that contain these code objects and define these classes, with their hashes.

    None where no module contains a code object.
    """
    remaining = set(codes)
    files = {file: name for name, module in list(sys.modules.items()) if (file := getattr(module, "__file__", None))}
    names = {name for code in remaining if (name := files.get(code.co_filename))}
    names |= {base.__module__ for each in classes for base in each.__mro__}
    remaining -= {code for name in names for code in codes_of(sys.modules[name])}
    remaining = {code for code in remaining if not code.co_filename.startswith(VERSIONED)}
    for name in sorted(sys.modules) if remaining else ():  # a dataclass generates methods, which have no file
        if name.startswith("transformers.") and (here := codes_of(sys.modules[name])) & remaining:
            names.add(name)
            remaining -= here
    return None if remaining else {name: module_hash(sys.modules[name]) for name in sorted(names)}


def codes_of(module: ModuleType) -> set[CodeType]:
    """The code objects of a module's functions, and those inside them."""
    found: set[CodeType] = set()
    new = {function.__code__ for place, value in members_of(module) for _, function in functions_in(place, value)}
    while new:
        found |= new
        new = {value for code in new for value in code.co_consts if isinstance(value, CodeType)}
    return found


def described(value: Any) -> str | None:
    """A text that identifies a value in every process; None where no text does."""
    if isinstance(value, enum.Enum):
        return f"{named(type(value))}.{value.name}"
    if type(value) in PLAIN or isinstance(value, PRINTED):
        return repr(value)
    if type(value) in (tuple, list, set, frozenset):
        parts = [described(each) for each in value]
        ordered = parts if isinstance(value, (tuple, list)) else sorted(map(str, parts))
        return None if None in parts else f"{type(value).__name__} {ordered}"
    if isinstance(value, FunctionType):
        return f"function {named(value)} {function_hash(value)}"
    if isinstance(value, types.MethodType):
        function = described(value.__func__)
        return None if function is None else f"method of {named(type(value.__self__))}: {function}"
    if inspect.isclass(value):
        return f"class {named(value)} {functions_hash(vars(value).items())}"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"op {value}"
    if isinstance(value, CodeType):
        return f"code {code_hash(value)}"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    return f"builtin {named(value)}" if isinstance(value, NAMED) else None


def named(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
