"""What Python code says, as a hash: whether the code that would be traced is the code that was.

A module's hash is taken of its file and of its functions as they are in the process, so that an edited file and a
function that was put in another's place (`LlamaAttention.forward = mine`) both show.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


def hash_of(value: Any, digits: int = 16) -> str:
    """The first hex digits of a hash of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:digits]


# Of code objects that are alive: a module's are asked for again with each form that its functions were traced for.
_hashes: WeakKeyDictionary[CodeType, str] = WeakKeyDictionary()


def code_hash(code: CodeType) -> str:
    """64 hex digits of what a code object does, and of those within it; not of where it stands."""
    if code not in _hashes:
        _hashes[code] = hash_of_code(code)
    return _hashes[code]


def hash_of_code(code: CodeType) -> str:
    constants = [code_hash(value) if isinstance(value, CodeType) else constant(value) for value in code.co_consts]
    told = (
        code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable,
    )  # fmt: skip
    return hash_of(told, 64)


def constant(value: Any) -> str:
    """A code object's constant as text. A set's order differs between processes."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def functions_of(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """A module's functions, its classes' methods, and what their decorators hold, each by its place."""
    for name, value in list(vars(module).items()):
        if name.startswith("__") and not name.endswith("__"):
            continue  # Dynamo's own, in the module whose function it has compiled
        yield from behind(name, value)
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for member, attribute in list(vars(value).items()):
                yield from behind(f"{name}.{member}", attribute)


def behind(place: str, value: Any, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, FunctionType]]:
    """The functions behind a function, a property, a static or class method, or a cached one."""
    if id(value) in seen:
        return
    seen = seen | {id(value)}
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from behind(place, part, seen)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from behind(place, value.__func__, seen)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from behind(place, value.__wrapped__, seen)
    elif isinstance(value, FunctionType):
        yield place, value
        for cell in value.__closure__ or ():
            try:
                yield from behind(f"{place}<", cell.cell_contents, seen)
            except ValueError:  # an empty cell
                continue


def function_hash(function: FunctionType) -> str:
    """A function's code, its defaults, and the plain values that its code closes over."""
    cells: list[str] = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:
            value = None
        cells.append(repr(value) if isinstance(value, PLAIN) else type(value).__qualname__)
    defaults = [plain_text(value) for value in (function.__defaults__ or (), *(function.__kwdefaults__ or {}).items())]
    return hash_of((code_hash(function.__code__), cells, defaults), 64)


def plain_text(value: Any) -> str:
    """A default's text where that says what the value is, and its type where not."""
    if isinstance(value, tuple):
        return f"({', '.join(map(plain_text, value))})"
    return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__


def module_hash(module: ModuleType) -> str:
    """Of a module's file, of its functions, and of the plain values that its classes have."""
    found = sorted((place, function_hash(function)) for place, function in functions_of(module))
    file = getattr(module, "__file__", None)
    source = Path(file).read_bytes() if file is not None and Path(file).is_file() else b""
    return hashlib.sha256(repr((found, plain_members(module))).encode() + source).hexdigest()


def plain_members(module: ModuleType) -> list[tuple[str, str, str]]:
    """What a class of a module says without code, which the file need not say any more."""
    return sorted(
        (name, member, repr(attribute))
        for name, value in list(vars(module).items())
        if inspect.isclass(value) and value.__module__ == module.__name__
        for member, attribute in list(vars(value).items())
        if isinstance(attribute, PLAIN) and not member.startswith("__")
    )


def modules_of(codes: Iterable[CodeType], classes: Iterable[type]) -> dict[str, str] | None:
    """The modules that hold these code objects and define these classes, each with its hash.

    None where a code object is in no module's functions; one within a function, a lambda's say, is that function's.
    Of torch and of Python, whose versions are in every key, some code is in no module by the time it runs.
    """
    wanted = set(codes)
    files = {file: name for name, module in list(sys.modules.items()) if (file := getattr(module, "__file__", None))}
    names = {name for code in wanted if (name := files.get(code.co_filename))}
    names |= {base.__module__ for each in classes for base in each.__mro__}
    hashes = {name: module_hash(sys.modules[name]) for name in sorted(names)}
    for name in hashes:
        wanted -= codes_of(sys.modules[name])
    for name in sorted(sys.modules) if any(map(is_elsewhere, wanted)) else ():  # what a dataclass made of a string
        if name.startswith("transformers.") and (here := codes_of(sys.modules[name])) & wanted:
            hashes[name] = module_hash(sys.modules[name])
            wanted -= here
    return None if any(map(is_elsewhere, wanted)) else hashes


def codes_of(module: ModuleType) -> set[CodeType]:
    return {code for _, function in functions_of(module) for code in codes_within(function.__code__)}


def is_elsewhere(code: CodeType) -> bool:
    """Whether code is neither torch's nor Python's own."""
    return not code.co_filename.startswith(("<frozen ", str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")))


def codes_within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from codes_within(value)


def changed(hashes: dict[str, str]) -> str | None:
    """A module whose functions are not what they were; None where there is none."""
    return next((name for name, was in hashes.items() if module_hash(importlib.import_module(name)) != was), None)
