"""One trace and its rewritten graphs as data, and their installation as an entry of Dynamo in another process."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.convert_frame import output_codes
from torch._dynamo.output_graph import get_builtins_dict
from torch._dynamo.package import SerializedCode
from torch._dynamo.utils import CleanupHook, CleanupManager, orig_code_map
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.compat import model_of
from specache_compile.compile.backend import report_left_alone
from specache_compile.compile.captured import Captured
from specache_compile.compile.compiled_graph import CompiledGraph
from specache_compile.compile.rewrites import warn_of_one_lane
from specache_compile.lowering.kept import NotKeepable, data_of, lowered_from
from specache_compile.methods import METHODS
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.records import record_of
from specache_compile.runtime.rewritten import Rewritten, Variant
from specache_compile.runtime.symbols import as_traced

from . import trace_folder
from .code import hash_of, module_hash, modules_of
from .guards import BUILTINS, Unlike, arguments_of, kept_guards, rebuilt

COMPILED, LOADED = "__compiled_fn", "__specache_trace"
FACTS = "options mode phase layers padding pasts frequencies is_causal names symbols left_alone rope_switch"


class NotKept(Exception):
    """A call needs a rewritten graph that is not stored."""


class StoredFacts:
    """The facts of `compile/captured.py: Captured` that a call reads, without the graph."""

    def __init__(self, captured: Captured) -> None:
        options = captured.options
        if not METHODS[options.method].recipe.__module__.startswith("specache_compile."):
            raise NotKeepable(f"method {options.method!r} of another package, whose source is in no key")
        for fake in captured.fakes:
            plain = isinstance(fake, HeldTensor) or type(fake) in (FakeTensor, torch.nn.Parameter)
            if isinstance(fake, Tensor) and not plain:
                raise NotKeepable(f"an input of class {type(fake).__name__}")
        for name in FACTS.split():
            setattr(self, name, getattr(captured, name))
        self.batch, self.tokens = as_traced(captured.batch), as_traced(captured.tokens)


class StoredRewrites:
    """A graph's rewritten graphs, each loaded when needed; replaces `compile/rewrites.py: Rewrites`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.made: dict[Variant, Rewritten] = {}

    def compiled_for(self, variant: Variant, arguments: Sequence[Any]) -> Rewritten:
        """The graph rewritten for `variant`; NotKept where it is not stored."""
        if variant in self.made:
            return self.made[variant]
        try:
            self.made[variant] = made = rewritten_from(*trace_folder.load(self.folder / variant_name(variant)))
        except Exception as error:  # no file, or none that this torch can load
            raise NotKept(f"{variant.phase} of {self.name}") from error
        warn_of_one_lane(made)
        return made


def variant_name(variant: Variant) -> str:
    """A file's name, from the variant's text: hash() differs between processes."""
    return f"{variant.phase}-{hash_of(variant)}"


def keep_rewritten(folder: Path, made: Rewritten) -> bool:
    """Store a rewritten graph; NotKeepable if it cannot be serialised, or assumes sizes that its calls must check."""
    if made.assumes:
        raise NotKeepable("a graph that is valid for some sizes only")
    facts = dataclasses.replace(made, run=None, graph_module=None, stages={}, held_outputs=dict(made.held_outputs))  # type: ignore[arg-type]
    instructions = list(map(str, valid_vec_isa_list())) if valid_vec_isa_list.cache_info().currsize else []
    return trace_folder.save(folder / variant_name(made.variant), (facts, instructions, data_of(made.run)))


@trace_folder.no_collecting()
def rewritten_from(facts: Rewritten, instructions: list[str], lowered: Any) -> Rewritten:
    if instructions and not valid_vec_isa_list.cache_info().currsize:
        # Inductor's trial of each instruction set takes a third of a start. Skip it if the processor lists the same.
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            listed = list(map(str, valid_vec_isa_list()))
        if listed != instructions:
            valid_vec_isa_list.cache_clear()
    return dataclasses.replace(facts, run=lowered_from(lowered))


class StoredTrace(NamedTuple):
    """One trace."""

    modules: dict[str, str]  # those with the traced code, and their hashes
    guards: tuple[bytes, bytes]
    code: SerializedCode  # replaces the frame's code; its global `COMPILED` is the compiled graph
    imports: dict[str, str]  # global names of modules, and their import paths
    graph: Any  # StoredFacts


def stored_trace_of(code: CodeType, dynamo_output: Any) -> tuple[StoredTrace, CompiledGraph]:
    """A finished trace of Dynamo as data, and its graph; NotKeepable, with the reason, if it cannot be serialised."""
    output_graph = dynamo_output.tracer_output.output_graph
    bytecode: CodeType = dynamo_output.bytecode
    names = set(bytecode.co_names)
    compiled = [name for name in names if name.startswith(COMPILED)]
    if len(compiled) != 1 or any(name.startswith("__resume_at") for name in names):
        raise NotKeepable("a graph break")
    graph = output_graph.global_scope[compiled[0]]
    while (inner := getattr(graph, "_torchdynamo_orig_callable", None)) is not None:
        graph = inner
    if not isinstance(graph, CompiledGraph):
        raise NotKeepable("a graph that is not rewritten")
    modules = modules_of(output_graph.traced_code, classes_of(output_graph.local_scope))
    if modules is None:
        raise NotKeepable("code that is in no module's functions")
    builtins, imports = output_graph.name_of_builtins_dict_key_in_fglobals, dict(output_graph.import_sources)
    numbered = (names & output_graph.installed_globals) - {compiled[0], builtins, *imports}
    paths = {name: getattr(output_graph.global_scope[name], "__name__", "") for name in numbered}
    if any(sys.modules.get(path) is not output_graph.global_scope[name] for name, path in paths.items()):
        raise NotKeepable("a global that is no module")
    new_names = {
        **{name: f"__specache_{path}" for name, path in paths.items()},
        compiled[0]: COMPILED,
        builtins: BUILTINS,
    }
    imports |= {new_names[name]: path for name, path in paths.items()}
    kept_code = SerializedCode.from_code_object(renamed(bytecode, new_names))
    return StoredTrace(modules, kept_guards(code, output_graph), kept_code, imports, StoredFacts(graph.captured)), graph


def renamed(code: CodeType, names: Mapping[str | None, str]) -> CodeType:
    """Code with other names of globals: Dynamo numbers the globals that it adds."""
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names))


def classes_of(local_scope: Mapping[str, Any]) -> set[type]:
    """The classes of a frame's arguments, and of the modules and layers inside them."""
    found: set[type] = set()
    for value in arguments_of(local_scope):
        inside = value.modules() if isinstance(value, torch.nn.Module) else getattr(value, "layers", ())
        found |= {type(value), *map(type, inside)}
    return found


@trace_folder.no_collecting()
def installed(trace: StoredTrace, folder: Path, frame: Any) -> tuple[CodeType, Any, LoadedTrace]:
    """Code that replaces a frame's code, and its guard manager; Unlike if the trace does not fit the call."""
    code, global_scope = frame.f_code, frame.f_globals
    for name, was in trace.modules.items():
        if module_hash(importlib.import_module(name)) != was:
            raise Unlike(f"module {name} has other code")
    fixed: dict[str, Any] = {name: importlib.import_module(path) for name, path in trace.imports.items()}
    for name, value in {**fixed, BUILTINS: get_builtins_dict(global_scope)}.items():
        if global_scope.setdefault(name, value) is not value:
            raise Unlike(f"global {name} is taken")
    manager, holds = rebuilt(trace.guards, code, frame.f_locals, global_scope)
    names: dict[str | None, str] = {name: f"{name}_{uuid.uuid4().hex}" for name in (COMPILED, LOADED)}
    made = renamed(SerializedCode.to_code_object(trace.code), names)
    loaded = LoadedTrace(made, code, global_scope)
    model = model_of(frame.f_locals)
    assert model is not None, "`hooks.call_of` accepts a model's calls only"
    record = record_of(list(model.parameters()))
    report_left_alone(record, trace.graph.left_alone, len(trace.graph.layers))
    graph = CompiledGraph(trace.graph, StoredRewrites(folder))  # type: ignore[arg-type]
    own = {COMPILED: torch._dynamo.disable(graph), LOADED: loaded}
    outer = stub(code, names[LOADED])
    CleanupManager.instance[outer] = [CleanupHook.create(global_scope, names[name], own[name]) for name in own]
    output_codes.add(made)
    output_codes.add(outer)
    orig_code_map[outer] = code  # Dynamo reads it to report why it traces again
    torch._dynamo.eval_frame.skip_code(made)
    manager.root.add_lambda_guard(
        lambda scope: loaded.alive and holds(scope), ["guards that specache stored with this trace"], None
    )
    return outer, manager, loaded


class LoadedTrace:
    """Runs a stored trace's code, `made`. A call that needs a missing graph runs the original `code`, which Dynamo
    traces, and ends the stored trace: its guards reject later calls."""

    def __init__(self, made: CodeType, code: CodeType, global_scope: dict[str, Any]) -> None:
        self.made, self.code, self.global_scope = made, code, global_scope
        self.alive = True

    @torch._dynamo.decorators.skip  # Dynamo looks at the frames below
    def __call__(self, cells: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(self.made, cells)(*args, **kwargs)
        except NotKept:  # raised before the graph changes anything
            self.alive = False
        return self.function(self.code, cells)(*args, **kwargs)

    def function(self, code: CodeType, cells: tuple[Any, ...]) -> Any:
        return FunctionType(code, self.global_scope, code.co_name, None, tuple(map(CellType, cells)))


def stub(code: CodeType, name: str) -> CodeType:
    """Code with the arguments and free variables of `code`, which passes them to the global `name`.

    def forward(self, a, *args, b, **kwargs): return name((free, ...), self, a, *args, b=b, **kwargs)
    """
    empty = tuple(CellType() for _ in code.co_freevars)
    signature = inspect.signature(FunctionType(code, {}, code.co_name, None, empty))
    parameters = signature.parameters.values()
    arguments = ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else str(p) for p in parameters)
    free = "".join(f"{each}, " for each in code.co_freevars)
    source = (
        f"def outer({', '.join(code.co_freevars)}):\n"
        f"  def {code.co_name}{signature}:\n"
        f"    return {name}(({free}), {arguments})\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<specache: {code.co_name}>", "exec"), namespace)
    (made,) = (value for value in namespace["outer"].__code__.co_consts if isinstance(value, CodeType))
    if made.co_freevars != code.co_freevars:
        raise ValueError(f"free variables {code.co_freevars}")
    return made
