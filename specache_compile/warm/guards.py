"""Dynamo's guards of one trace, kept: those that torch can store as it stores them, the others by what they look at.

A guard that compares an identity means nothing in another process. So what it looks at is told (`told.py`) when it is
kept, and told again where it is to be used: if both say the same, the guard is built anew on what is there now, and is
from then on checked in every call, as Dynamo's own. What cannot be told cannot be kept.

    kept by torch      tensors, shapes, the cache's layers, the config's values, grad mode, ...
    told               functions, classes, modules, builtins; whatever a global name leads to
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import io
import pickle
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo.guards import CheckFunctionManager, GuardsStatePickler
from torch._dynamo.output_graph import OutputGraphCommon
from torch._dynamo.source import get_local_source_name
from torch._guards import Guard, GuardsSet, TracingContext, tracing
from torch.utils._ordered_set import OrderedSet
from torch.utils.weak import TensorWeakRef

from specache_compile.lowering.kept import NotKeepable
from specache_compile.runtime.held import HeldTensor

from .told import told

UNSTORED = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
# Guards by what of a value they depend on. Those that `NOTHING` names carry what they compare with themselves.
VALUE = {*UNSTORED, "BUILTIN_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH"} - {"DICT_VERSION", "NN_MODULE", "WEAKREF_ALIVE"}
TYPE = {"TYPE_MATCH"}
LENGTH = {"SEQUENCE_LENGTH", "TUPLE_ITERATOR_LEN", "RANGE_ITERATOR_MATCH"}
KEYS = {"DICT_KEYS_MATCH", "DICT_CONST_KEYS", "MAPPING_KEYS_CHECK"}
NOTHING = {
    "DICT_CONTAINS",
    "DICT_NOT_CONTAINS",
    "DUPLICATE_INPUT",
    "EMPTY_NN_MODULE_HOOKS_DICT",
    "NOT_PRESENT_IN_GENERIC_DICT",
    "SET_CONTAINS",
    "SET_NOT_CONTAINS",
}


class Unlike(Exception):
    """In what a call is another than the one that a form was kept of."""


@dataclass(frozen=True)
class KeptGuards:
    """Guards as data.

    state: what torch stores.
    others: the guards that it does not.
    told: what each of these looks at, in their order.
    builtins: of those that Dynamo looks up in a dictionary of its own, by their names.
    """

    state: bytes
    others: bytes
    told: list[str]
    builtins: dict[str, str]


def kept_guards(code: CodeType, output_graph: Any) -> KeptGuards:
    """The guards of a trace that Dynamo has just ended; NotKeepable, with the reason, where one cannot be told."""
    others: list[Guard] = []
    texts: list[str] = []
    builtin_texts: dict[str, str] = {}

    def keep(entries: Sequence[Any]) -> list[bool]:
        stored = [is_stored(entry, output_graph.local_scope) for entry in entries]
        others.clear()
        texts.clear()
        for entry in (entry for entry, is_one in zip(entries, stored, strict=True) if not is_one):
            builtin = builtin_of(entry.orig_guard, output_graph.name_of_builtins_dict_key_in_fglobals)
            if builtin is not None:
                builtin_texts[builtin] = looked_at(entry)
                continue
            others.append(bare(entry.orig_guard))
            texts.append(looked_at(entry))
        return stored

    manager = CheckFunctionManager(code, output_graph, guard_filter_fn=keep, save_guards=True, strict_error=True)
    assert manager.guards_state is not None
    return KeptGuards(manager.guards_state, pickle.dumps(others), texts, builtin_texts)


def builtin_of(guard: Guard, dictionary: str | None) -> str | None:
    """The builtin that a guard is of, which Dynamo finds under a name that it makes anew in each process."""
    found = re.fullmatch(r"G\['(\w+)'\]\['(\w+)'\]", guard.name)
    return found[2] if found is not None and found[1] == dictionary else None


def is_stored(entry: Any, local_scope: Mapping[str, Any]) -> bool:
    """Whether torch stores a guard so that it holds in another process."""
    root = get_local_source_name(entry.orig_guard.originating_source)
    if entry.is_global or isinstance(local_scope.get(root or ""), FunctionType):
        return False
    return not {entry.guard_type, *(entry.derived_guard_types or ())} & UNSTORED


def looked_at(entry: Any) -> str:
    """What a guard that torch does not store depends on, as text."""
    text = text_of(entry.guard_type, entry.value if entry.has_value else None, entry.orig_guard.create_fn)
    if text is None or (not entry.has_value and entry.guard_type not in NOTHING):
        raise NotKeepable(f"guard {entry.guard_type} of {entry.name}, a {type(entry.value).__name__}")
    return text


def text_of(kind: str, value: Any, create: Any) -> str | None:
    if kind in NOTHING:
        return ""
    if kind in VALUE:
        return told(value)
    if kind in TYPE:
        return told(type(value))
    if kind in LENGTH:
        return f"{told(type(value))} {len(value)}" if hasattr(value, "__len__") else None
    if kind in KEYS:
        return f"{told(type(value))} {told(tuple(value))}" if told(tuple(value)) is not None else None
    if kind == "HASATTR":
        name = str(create.keywords.get("attr") or create.args[0])
        return f"{name} {hasattr(value, name)}"
    return None


def bare(guard: Guard) -> Guard:
    """A guard without what belongs to this process."""
    return dataclasses.replace(
        guard, obj_weakref=None, guarded_class_weakref=None, create_fn=without_references(guard.create_fn),
        guard_types=None, code_list=None, stack=None, user_stack=None,
    )  # fmt: skip


def without_references(create: Any) -> Any:
    if not isinstance(create, functools.partial):
        return create
    args, keywords = ([referred(value) for value in create.args], {k: referred(v) for k, v in create.keywords.items()})
    return functools.partial(create.func, *args, **keywords)


def referred(value: Any) -> Any:
    return value() if isinstance(value, (weakref.ref, TensorWeakRef)) else value


def rebuilt(
    kept: KeptGuards, code: CodeType, local_scope: dict[str, Any], global_scope: dict[str, Any]
) -> tuple[Any, Callable[[Any], bool]]:
    """For a frame that kept guards let pass: Dynamo's guard manager, and what is to be asked beside it in each call.

    Unlike, with the reason, where they do not let it pass.
    """
    others = others_of(kept)
    compared: list[Any] = []  # by identity: while these live, nothing else has theirs
    differs = difference(others, kept.told, {"L": local_scope, "G": global_scope}, compared)
    if differs is not None:
        raise Unlike(differs)
    check_builtins(kept.builtins)
    state = state_of(kept)
    manager = CheckFunctionManager(
        code, OutputGraphCommon(state.output_graph), shape_code_parts=state.shape_code_parts,
        runtime_global_scope=global_scope, **local_state_of(state),
    ).guard_manager  # fmt: skip
    check(manager, local_scope)
    here = dataclasses.replace(
        state.output_graph, local_scope=local_scope, global_scope=global_scope,
        input_source_to_sizes_strides={}, _guards=GuardsSet(OrderedSet(others)), _aotautograd_guards=[],
    )  # fmt: skip
    try:
        others_manager = CheckFunctionManager(
            code, OutputGraphCommon(here), runtime_global_scope=global_scope
        ).guard_manager
    except (AssertionError, KeyError, AttributeError) as error:
        raise Unlike(str(error)) from error
    check(others_manager, local_scope)  # what `NOTHING` names is not told
    values = {name: getattr(builtins, name) for name in kept.builtins}

    def holds(scope: Any, _alive: Sequence[Any] = compared) -> bool:
        return are_the_builtins(values) and bool(others_manager.check(scope))

    return manager, holds


def state_of(kept: KeptGuards) -> Any:
    """What torch stores of guards."""
    with tracing(TracingContext(None)):  # what guards name an import by asks for a trace that is under way
        return GuardsUnpickler(io.BytesIO(kept.state)).load()


def others_of(kept: KeptGuards) -> list[Guard]:
    """The guards that are told, without what they compare with."""
    with tracing(TracingContext(None)):
        return list(pickle.loads(kept.others))


def local_state_of(state: Any) -> dict[str, Any]:
    """Grad mode, dispatch keys and the like, as the trace found them; before torch 2.15 guards take a call's."""
    return {"guard_build_local_state": state.local_state} if hasattr(state, "local_state") else {}


def check(manager: Any, local_scope: dict[str, Any]) -> None:
    """Unlike, with the reason, where guards do not let a call pass."""
    if not manager.check(local_scope):
        raise Unlike(str(manager.check_verbose(local_scope)))


def check_builtins(texts: Mapping[str, str]) -> None:
    """Unlike where a builtin is another than the one that was told."""
    for name, was in texts.items():
        now = told(getattr(builtins, name, None))
        if now != was:
            raise Unlike(f"builtin {name}: {was}, and now {now}")


def are_the_builtins(values: Mapping[str, Any]) -> bool:
    return all(vars(builtins).get(name) is value for name, value in values.items())


def difference(others: Sequence[Guard], texts: Sequence[str], scope: dict[str, Any], compared: list[Any]) -> str | None:
    """A guard that looks now at something else than when it was kept; None where there is none. What they look at is
    appended to `compared`."""
    closure_vars = torch._dynamo.guards._get_closure_vars()
    cache: dict[Any, Any] = {}
    for guard, was in zip(others, texts, strict=True):
        kind = guard.create_fn_name()
        if kind in NOTHING:
            continue
        try:
            value = guard.originating_source.get_value(scope, closure_vars, cache)
        except (KeyError, AttributeError, IndexError, TypeError) as error:
            return f"{kind} {guard.name}: {error}"
        now = text_of(kind, value, guard.create_fn)
        if now != was:
            return f"{kind} {guard.name}: {was}, and now {now}"
        compared.append(value if kind in VALUE else type(value))
    return None


class GuardsUnpickler(getattr(torch._dynamo.package, "_GuardsStateUnpickler", pickle.Unpickler)):  # type: ignore[misc]
    """As torch unpickles its guards, but for held tensors. From 2.15 on it has a class of its own for that."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return MarkedAgain if found is GuardsStatePickler else found


class MarkedAgain(GuardsStatePickler):
    """Held tensors are marked as those that a session gives out: guards compare the mark, and torch forgets it."""

    @classmethod
    def _unpickle_traceable_wrapper_subclass(cls, *parts: Any) -> Any:
        tensor = super()._unpickle_traceable_wrapper_subclass(*parts)
        if isinstance(tensor, HeldTensor):
            torch._dynamo.maybe_mark_dynamic(tensor, (0, 2))
        return tensor
