"""A form: all that stands in place of one trace of Dynamo's, as bytes, and in force again in another process."""

from __future__ import annotations

import importlib
import pickle
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._dynamo.convert_frame import output_codes
from torch._dynamo.output_graph import get_builtins_dict
from torch._dynamo.package import SerializedCode
from torch._dynamo.utils import CleanupHook, CleanupManager, orig_code_map

from specache_compile.compile.compiled_graph import CompiledGraph
from specache_compile.lowering.kept import NotKeepable

from .code import changed, modules_of
from .graph import Recalled, graph_from, recalled
from .guards import KeptGuards, Unlike, kept_guards, rebuilt
from .standing import Standing, stub

COMPILED = "__compiled_fn"
STANDING = "__specache_form"


@dataclass(frozen=True)
class Form:
    """One trace, as data.

    call: the folder's name that it was kept for, below that of the environment.
    modules: of the code that was traced, each with its hash.
    code: what Dynamo runs in the frame's place.
    compiled: the global name by which that calls the compiled graph.
    modules_by_name: the modules that it has as globals, by import path.
    imports: its further globals that Dynamo made, by module and name there.
    builtins: the global name of the builtins.
    """

    call: str
    modules: dict[str, str]
    guards: KeptGuards
    code: SerializedCode
    compiled: str
    modules_by_name: dict[str, str]
    imports: dict[str, tuple[str, str]]
    builtins: str | None
    graph: Recalled


def form_of(call: str, code: CodeType, dynamo_output: Any) -> tuple[Form, CompiledGraph]:
    """The form of a trace that Dynamo has just ended, and its graph; NotKeepable, and why, where there is none."""
    output_graph = dynamo_output.tracer_output.output_graph
    bytecode: CodeType = dynamo_output.bytecode
    names = set(globals_of(bytecode))
    compiled = [name for name in names if name.startswith(COMPILED)]
    if len(compiled) != 1 or any(name.startswith("__resume_at") for name in names):
        raise NotKeepable("a graph break")
    graph = innermost(output_graph.global_scope[compiled[0]])
    if not isinstance(graph, CompiledGraph):
        raise NotKeepable("a graph that is not rewritten")
    facts = recalled(graph.captured)
    modules = modules_of(output_graph.traced_code, classes_of(output_graph.local_scope))
    if modules is None:
        raise NotKeepable("code that is in no module's functions")
    if output_graph.torch_function_mode_stack:
        raise NotKeepable("a torch function mode")
    builtins = output_graph.name_of_builtins_dict_key_in_fglobals
    modules_by_name = dict(output_graph.import_sources)
    made = (names & output_graph.installed_globals) - {compiled[0], builtins, *modules_by_name}
    imports = {name: place_of(name, output_graph.global_scope[name]) for name in made}
    form = Form(
        call, modules, kept_guards(code, output_graph), SerializedCode.from_code_object(bytecode), compiled[0],
        modules_by_name, imports, builtins, facts,
    )  # fmt: skip
    return form, graph


def classes_of(local_scope: Mapping[str, Any]) -> set[type]:
    """The classes of a frame's arguments, and of what models and caches among them are made of."""
    found: set[type] = set()
    for value in arguments_of(local_scope.values()):
        found.add(type(value))
        found.update(map(type, value.modules() if isinstance(value, torch.nn.Module) else getattr(value, "layers", ())))
    return found


def arguments_of(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments, and those that *args and **kwargs hold."""
    for value in values:
        if isinstance(value, (tuple, Mapping)):
            yield from value.values() if isinstance(value, Mapping) else value
        else:
            yield value


def globals_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from globals_of(value)


def innermost(function: Any) -> Any:
    """What Dynamo's wrappers that keep it from tracing call."""
    while (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = inner
    return function


def place_of(name: str, value: Any) -> tuple[str, str]:
    """By which import another process has the same value."""
    place = (
        (value.__name__, "")
        if isinstance(value, types.ModuleType)
        else (getattr(value, "__module__", ""), getattr(value, "__qualname__", ""))
    )
    try:
        same = found(place) is value
    except (ImportError, AttributeError, ValueError):
        same = False
    if not same:
        raise NotKeepable(f"global {name} is a {type(value).__name__} that no import leads to")
    return place


def found(place: tuple[str, str]) -> Any:
    value: Any = importlib.import_module(place[0])
    for part in filter(None, place[1].split(".")):
        value = getattr(value, part)
    return value


def in_force(
    data: bytes, folder: Path, root: Path, code: CodeType, local_scope: dict[str, Any], global_scope: dict[str, Any]
) -> tuple[CodeType, Any, Standing]:
    """Code for a frame in place of `code`, and its guard manager; Unlike where the form is of another call."""
    form: Form = pickle.loads(data)
    if form.call != call_name(folder.parent):
        raise Unlike(f"it was kept for {form.call}")
    if (name := changed(form.modules)) is not None:
        raise Unlike(f"module {name} has other code")
    install(form.modules_by_name, global_scope)
    manager, holds = rebuilt(form.guards, code, local_scope, global_scope)
    own: dict[str, Any] = {form.compiled: torch._dynamo.disable(graph_from(form.graph, folder, root))}
    own |= {name: found(place) for name, place in form.imports.items()}
    if form.builtins is not None:
        own[form.builtins] = get_builtins_dict(global_scope)
    names = {name: f"{name}_{uuid.uuid4().hex}" for name in own}
    made = renamed(SerializedCode.to_code_object(form.code), names)
    standing = Standing(made, code, global_scope)
    own[STANDING], names[STANDING] = standing, f"{STANDING}_{uuid.uuid4().hex}"
    outer = stub(code, names[STANDING])
    CleanupManager.instance[outer] = [CleanupHook.create(global_scope, names[name], own[name]) for name in own]
    output_codes.add(made)
    output_codes.add(outer)
    orig_code_map[outer] = code  # for why Dynamo traces again
    torch._dynamo.eval_frame.skip_code(made)
    manager.root.add_lambda_guard(
        lambda scope: standing.alive and holds(scope), ["what specache's store has told of this trace"], None
    )
    return outer, manager, standing


def call_name(call: Path) -> str:
    return f"{call.parent.name}/{call.name}"


def install(modules: Mapping[str, str], global_scope: dict[str, Any]) -> None:
    """The modules that Dynamo would have put among a frame's globals; it names them by their import path."""
    for name, path in modules.items():
        module = importlib.import_module(path)
        if global_scope.setdefault(name, module) is not module:
            raise Unlike(f"global {name} is taken")


def renamed(code: CodeType, names: Mapping[str, str]) -> CodeType:
    """Dynamo numbers the names of globals that it makes: in another process they may be taken."""
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names))
