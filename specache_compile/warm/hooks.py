"""Loads a stored trace when Dynamo would trace a frame for this backend, and stores the traces of Dynamo.

A stored trace becomes an entry of Dynamo, which checks its guards and the backend's options in every call.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.types import GuardedCode, wrap_guarded_code
from torch._guards import CompileContext, compile_context
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from specache_compile.compat import model_of
from specache_compile.compile.compiled_options import own_compiler
from specache_compile.compile.rewrites import observers
from specache_compile.lowering.kept import NotKeepable

from . import trace_folder
from .guards import Unlike
from .stored_trace import LoadedTrace, installed, keep_rewritten, stored_trace_of

log = logging.getLogger(__name__)
# The folder of the call that this thread's Dynamo traces.
_tracing = threading.local()
# The stored traces that this process has loaded, by folder.
_loaded: dict[Path, LoadedTrace] = {}


@functools.cache
def route_traces() -> None:
    """Wrap `ConvertFrameAssert.__call__` and `DynamoOutput.build_guards`, once in the process."""
    convert = convert_frame.ConvertFrameAssert.__call__
    build_guards = convert_frame.DynamoOutput.build_guards
    # A torch without one of these names raises here, before anything is patched.
    functorch = torch._functorch.config
    _ = functorch.bundled_autograd_cache, functorch.bypass_autograd_cache_key, convert_frame.get_compile_id

    @functools.wraps(convert)
    def convert_or_recall(self: Any, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, **rest: Any) -> Any:
        call = or_none(call_of, self, frame)
        if call is not None and (recalled := or_none(recall, call, frame, frame_state)) is not None:
            return wrap_guarded_code(recalled)
        before, _tracing.call = getattr(_tracing, "call", None), call
        try:
            return convert(self, frame, cache_entry, hooks, frame_state, **rest)
        finally:
            _tracing.call = before

    @functools.wraps(build_guards)
    def build_and_keep(self: Any, code: Any, *args: Any, **kwargs: Any) -> Any:
        made = build_guards(self, code, *args, **kwargs)
        if getattr(_tracing, "call", None) is not None:
            or_none(keep, _tracing.call, code, self)
        return made

    convert_frame.ConvertFrameAssert.__call__ = convert_or_recall  # type: ignore[method-assign]
    convert_frame.DynamoOutput.build_guards = build_and_keep  # type: ignore[method-assign]
    # Later, a generation needs further graphs of a stored trace.
    observers.append(lambda graphs, key: graphs.kept and or_none(keep_rewritten, graphs.kept, graphs.made[key]))


def or_none(function: Callable[..., Any], *given: Any) -> Any:
    """The function's result; None if it raises. Arguments, pickle and the folder can raise any error, and a frame can
    always be traced."""
    try:
        return function(*given)
    except Exception as error:
        log.info("a trace is not stored or loaded: %r", error, exc_info=not isinstance(error, NotKeepable))
        return None


def call_of(converter: Any, frame: Any) -> Path | None:
    """The folder of a frame's call; None if its traces are neither loaded nor stored."""
    root, compiler, model = trace_folder.folder(), own_compiler(converter), model_of(frame.f_locals)
    if root is None or compiler is None or frame.f_code in convert_frame.output_codes:
        return None
    if model is None or has_hooks(model) or os.environ.get("SPECACHE_DUMP"):
        return None
    inductor = torch._inductor.config
    if inductor.force_disable_caches or any(v for k, v in inductor.get_config_copy().items() if "custom_p" in k):
        return None  # no text identifies the user's passes
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # all ranks would have to load the same trace
    if torch._C._len_torch_function_stack() or _get_current_dispatch_mode_stack():
        return None
    arguments = sorted(getattr(compiler, "kwargs", {}).items(), key=str), converter._one_graph  # of torch.compile
    return root / trace_folder.environment() / trace_folder.call_key(frame.f_code, frame.f_locals, arguments)


def has_hooks(model: torch.nn.Module) -> bool:
    """Whether modules have hooks, which Dynamo's guards do not check."""
    places = [vars(torch.nn.modules.module), *map(vars, model.modules())]
    found = (name for place in places for name, value in place.items() if name.endswith("_hooks") and value)
    return any("state_dict" not in name for name in found)


def recall(call: Path, frame: Any, frame_state: Any) -> GuardedCode | None:
    """The newest stored trace that accepts a call."""
    for folder in trace_folder.traces_of(call):
        trace = trace_folder.load(folder / trace_folder.TRACE)
        if trace is None or (folder in _loaded and not _loaded[folder].alive):
            continue
        compile_id = convert_frame.get_compile_id(frame_state)
        try:
            with compile_context(CompileContext(compile_id)):
                code, manager, _loaded[folder] = installed(trace, folder, frame)
            return GuardedCode(code, manager, compile_id, f"Torch-Compiled Region: {compile_id}")
        except Unlike as reason:
            log.info("a stored trace is not loaded: %s", reason)
    return None


def keep(call: Path, code: Any, dynamo_output: Any) -> None:
    """Store a trace, and the rewritten graphs that it has so far."""
    trace, graph = stored_trace_of(code, dynamo_output)
    folder = call / uuid.uuid4().hex
    for made in graph.rewrites.made.values():
        keep_rewritten(folder, made)
    if trace_folder.save(folder / trace_folder.TRACE, trace):
        graph.rewrites.kept = folder
        for old in trace_folder.traces_of(call)[trace_folder.MOST_TRACES :]:
            shutil.rmtree(old, ignore_errors=True)
