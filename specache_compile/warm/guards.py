"""Dynamo's guards of one trace as data.

torch serialises most guards. Guards on object identity and on globals are stored with a description of the object
(`code.py: described`). Another process compares it with its own object and rebuilds the guard, so that Dynamo checks it
in every call. A trace with a guard that has no description is not stored.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.output_graph import OutputGraphCommon
from torch._dynamo.source import DictGetItemSource, GlobalSource, get_local_source_name
from torch._guards import Guard, GuardsSet, TracingContext, tracing
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from specache_compile.lowering.kept import NotKeepable

from .code import described

# The global name of the builtins in stored code and guards; Dynamo numbers its own name.
BUILTINS = "__specache_builtins"
# From torch 2.15 on a class of torch.
UNPICKLER = getattr(torch._dynamo.package, "_GuardsStateUnpickler", pickle.Unpickler)
REFERENCES = (weakref.ref, TensorWeakRef)
UNSTORED = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
# Guards by the part of a value that they compare. Those in `NOTHING` contain what they compare with.
VALUE = {*UNSTORED, "BUILTIN_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH"} - {"DICT_VERSION", "NN_MODULE", "WEAKREF_ALIVE"}
LENGTH = {"SEQUENCE_LENGTH", "TUPLE_ITERATOR_LEN", "RANGE_ITERATOR_MATCH"}
KEYS = {"DICT_KEYS_MATCH", "DICT_CONST_KEYS", "MAPPING_KEYS_CHECK"}
NOTHING = {
    "DICT_CONTAINS", "DICT_NOT_CONTAINS", "DUPLICATE_INPUT", "EMPTY_NN_MODULE_HOOKS_DICT",
    "NOT_PRESENT_IN_GENERIC_DICT", "SET_CONTAINS", "SET_NOT_CONTAINS",
}  # fmt: skip


class Unlike(Exception):
    """How a call differs from the one that a trace was stored for."""


def kept_guards(code: CodeType, output_graph: Any) -> tuple[bytes, bytes]:
    """The guards of a finished trace that torch serialises, and the others, each with a description of its object."""
    others: list[tuple[Guard, str]] = []
    builtins = output_graph.name_of_builtins_dict_key_in_fglobals

    def keep(entries: Sequence[Any]) -> list[bool]:
        stored = [is_stored(entry, output_graph.local_scope) for entry in entries]
        remaining = [entry for entry, is_one in zip(entries, stored, strict=True) if not is_one]
        others[:] = [(bare(entry.orig_guard, builtins), compared_text(entry)) for entry in remaining]
        return stored

    manager = CheckFunctionManager(code, output_graph, guard_filter_fn=keep, save_guards=True, strict_error=True)
    assert manager.guards_state is not None
    return manager.guards_state, pickle.dumps(others)


def is_stored(entry: Any, local_scope: Mapping[str, Any]) -> bool:
    """Whether torch serialises a guard so that it is valid in another process."""
    root = get_local_source_name(entry.orig_guard.originating_source)
    of_function = isinstance(local_scope.get(root or ""), FunctionType)
    return (
        not (entry.is_global or of_function) and not {entry.guard_type, *(entry.derived_guard_types or ())} & UNSTORED
    )


def compared_text(entry: Any) -> str:
    """A description of what a guard compares."""
    text = text_of(entry.guard_type, entry.value if entry.has_value else None, entry.orig_guard.create_fn)
    if text is None or (not entry.has_value and entry.guard_type not in NOTHING):
        raise NotKeepable(f"guard {entry.guard_type} of {entry.name}, a {type(entry.value).__name__}")
    return text


def text_of(kind: str, value: Any, create: Any) -> str | None:
    if kind in NOTHING:
        return ""
    if kind in VALUE:
        return described(value)
    if kind == "TYPE_MATCH":
        return described(type(value))
    if kind in LENGTH:
        return f"{described(type(value))} {len(value)}" if hasattr(value, "__len__") else None
    if kind in KEYS:
        keys = described(tuple(value))
        return None if keys is None else f"{described(type(value))} {keys}"
    if kind == "HASATTR":
        return str(hasattr(value, create.keywords.get("attr") or create.args[0]))
    return None


def bare(guard: Guard, builtins: str | None) -> Guard:
    """A guard without references to this process. builtins: Dynamo's global name of the builtins."""
    source, create = guard.originating_source, guard.create_fn
    if isinstance(source, DictGetItemSource) and getattr(source.base, "global_name", "") == builtins:
        source = DictGetItemSource(GlobalSource(BUILTINS), source.index)
    if isinstance(create, functools.partial):
        args = [each() if isinstance(each, REFERENCES) else each for each in create.args]
        keywords = {name: each() if isinstance(each, REFERENCES) else each for name, each in create.keywords.items()}
        create = functools.partial(create.func, *args, **keywords)
    return dataclasses.replace(
        guard, originating_source=source, create_fn=create, obj_weakref=None, guarded_class_weakref=None,
        guard_types=None, code_list=None, stack=None, user_stack=None,
    )  # fmt: skip


def rebuilt(
    kept: tuple[bytes, bytes], code: CodeType, local_scope: dict[str, Any], global_scope: dict[str, Any]
) -> tuple[Any, Callable[[Any], bool]]:
    """Dynamo's guard manager for a frame, and a second check for every call; Unlike where either rejects the frame."""
    others = others_of(kept[1])
    compared: list[Any] = []  # by identity: while these live, no other object has their address
    compare(others, {"L": local_scope, "G": global_scope}, compared)
    state = state_of(kept[0])
    # The dispatch keys during the trace. Before torch 2.15 the guards use those of the call.
    local_state = {"guard_build_local_state": state.local_state} if hasattr(state, "local_state") else {}
    manager = CheckFunctionManager(
        code, OutputGraphCommon(state.output_graph), shape_code_parts=state.shape_code_parts,
        runtime_global_scope=global_scope, **local_state,
    ).guard_manager  # fmt: skip
    check(manager, local_scope)
    here = dataclasses.replace(
        state.output_graph, local_scope=local_scope, global_scope=global_scope,
        input_source_to_sizes_strides={}, _guards=GuardsSet(OrderedSet(g for g, _ in others)), _aotautograd_guards=[],
    )  # fmt: skip
    try:
        others_manager = CheckFunctionManager(
            code, OutputGraphCommon(here), runtime_global_scope=global_scope
        ).guard_manager
    except (AssertionError, KeyError, AttributeError) as error:
        raise Unlike(str(error)) from error
    check(others_manager, local_scope)  # the guards in `NOTHING` have no description
    return manager, lambda scope, _alive=compared: bool(others_manager.check(scope))


def arguments_of(local_scope: Mapping[str, Any]) -> list[Any]:
    """A frame's arguments, with those in *args and **kwargs."""
    return list(tree_leaves(dict(local_scope), is_leaf=lambda value: not isinstance(value, (tuple, dict))))


def state_of(data: bytes) -> Any:
    with tracing(TracingContext(None)):  # a guard's name of an import requires an active trace
        return UNPICKLER(io.BytesIO(data)).load()


def others_of(data: bytes) -> list[tuple[Guard, str]]:
    with tracing(TracingContext(None)):
        return list(pickle.loads(data))


def check(manager: Any, local_scope: dict[str, Any]) -> None:
    """Raise Unlike, with the reason, where guards reject a call."""
    if not manager.check(local_scope):
        raise Unlike(str(manager.check_verbose(local_scope)))


def compare(others: Sequence[tuple[Guard, str]], scope: dict[str, Any], compared: list[Any]) -> None:
    """Raise Unlike where an object does not have its guard's description; append the objects to `compared`."""
    closure_vars = torch._dynamo.guards._get_closure_vars()
    cache: dict[Any, Any] = {}
    for guard, was in others:
        kind = guard.create_fn_name()
        if kind in NOTHING:
            continue
        try:
            value = guard.originating_source.get_value(scope, closure_vars, cache)
        except (KeyError, AttributeError, IndexError, TypeError) as error:
            raise Unlike(f"{kind} {guard.name}: {error}") from error
        if (now := text_of(kind, value, guard.create_fn)) != was:
            raise Unlike(f"{kind} {guard.name}: {was}, and now {now}")
        compared.append(value if kind in VALUE else type(value))
