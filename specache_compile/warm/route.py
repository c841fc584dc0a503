"""Where Dynamo would trace a frame for this backend, a kept form is looked for first; what it traces is kept behind it.

    Dynamo: no graph of this process lets the call pass
      └ convert: a kept form does → its code and guards become one of Dynamo's entries for this frame and backend
      └          none does        → Dynamo traces, and the form is kept for the next process

Both are entries of Dynamo's as any other, which it asks by their guards and by the backend's options in every call.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._dynamo import convert_frame
from torch._dynamo.types import GuardedCode, wrap_guarded_code
from torch._guards import CompileContext, compile_context
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from specache_compile.compile.compiled_options import own_compiler
from specache_compile.compile.rewritten import Rewrites, observers
from specache_compile.lowering.kept import NotKeepable, keep_from_here_on
from specache_compile.runtime.variant import Variant

from . import store
from .call import call_key, has_hooks
from .collecting import no_collecting
from .environment import environment
from .form import call_name, form_of, in_force
from .graph import is_wanted, keep_form
from .guards import Unlike
from .standing import Standing

T = TypeVar("T")

log = logging.getLogger(__name__)
# The folder of the call that this thread's Dynamo traces now.
_tracing = threading.local()
# The forms that this process has in force, by their folders.
_in_force: dict[Path, Standing] = {}


def route_traces() -> None:
    """Extend `ConvertFrameAssert.__call__` and `DynamoOutput.build_guards`, once for the process."""
    convert = convert_frame.ConvertFrameAssert.__call__
    build_guards = convert_frame.DynamoOutput.build_guards
    # Named here, so that a torch which lacks one is told of before anything is in force.
    _ = torch._functorch.config.bundled_autograd_cache, torch._functorch.config.bypass_autograd_cache_key
    _ = convert_frame.get_compile_id
    if getattr(convert, "asks_the_store", False):
        return

    @functools.wraps(convert)
    def convert_or_recall(self: Any, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, **rest: Any) -> Any:
        call = or_none(call_of, self, frame)
        keep_from_here_on(call is not None)
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
            keep(_tracing.call, code, self)
        return made

    convert_or_recall.asks_the_store = True  # type: ignore[attr-defined]
    convert_frame.ConvertFrameAssert.__call__ = convert_or_recall  # type: ignore[method-assign]
    convert_frame.DynamoOutput.build_guards = build_and_keep  # type: ignore[method-assign]
    observers.append(keep_late)


def or_none(ask: Callable[..., T | None], *given: Any) -> T | None:
    """What `ask` says; None where it fails, since a frame can always be traced: an argument may raise whatever it likes
    when it is looked at, and a folder may be in any state."""
    try:
        return ask(*given)
    except Exception as error:
        log.info("not kept, and not taken: %s: %s", type(error).__name__, error, exc_info=True)
        return None


def call_of(converter: Any, frame: Any) -> Path | None:
    """The folder of a frame's call; None where no form may be taken for it, or none be kept."""
    root = store.folder()
    asked = own_compiler(converter)
    if root is None or asked is None or not is_wanted() or frame.f_code in convert_frame.output_codes:
        return None
    model = frame.f_locals.get("self")
    modes = torch._C._len_torch_function_stack() or _get_current_dispatch_mode_stack()
    if not isinstance(model, torch.nn.Module) or modes or has_hooks(model) or is_split():
        return None
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return None
    return root / environment() / call_key(frame.f_code, frame.f_locals, how(converter, asked))


def how(converter: Any, asked: Any) -> dict[str, str]:
    """What torch.compile was told, but for what it sets while it runs (`dynamic`), which is in the environment."""
    return {
        "options": repr(sorted(getattr(asked, "kwargs", {}).items(), key=str)),
        "fullgraph": repr(converter._one_graph),
    }


def is_split() -> bool:
    """Whether a model may be split over ranks, which would have to take the same form, or none."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def root_of(call: Path) -> Path:
    return call.parent.parent


def recall(call: Path, frame: Any, frame_state: Any) -> GuardedCode | None:
    """The newest kept form that lets a call pass."""
    for folder in store.forms_of(call):
        if folder in _in_force and not _in_force[folder].alive:
            continue
        data = store.read(folder / store.FORM, root_of(call))
        if data is None:
            continue
        compile_id = convert_frame.get_compile_id(frame_state)
        try:
            with compile_context(CompileContext(compile_id)), no_collecting():
                code, manager, _in_force[folder] = in_force(
                    data, folder, root_of(call), frame.f_code, frame.f_locals, frame.f_globals
                )
        except Unlike as reason:
            log.info("not taken: %s", reason)
        except Exception as error:  # whatever a damaged file raises when it is unpickled
            store.tell_once(f"{folder} is of no use ({type(error).__name__}: {error}): the model is traced")
            log.debug("unusable form", exc_info=True)
        else:
            store.used(folder)
            return GuardedCode(code, manager, compile_id, f"Torch-Compiled Region: {compile_id}")
    return None


def keep(call: Path, code: Any, dynamo_output: Any) -> None:
    """Keep what Dynamo has traced, if that can be."""
    try:
        form, graph = form_of(call_name(call), code, dynamo_output)
        folder = call / uuid.uuid4().hex
        for made in graph.rewrites.made.values():
            keep_form(folder, made)
        if store.write(folder / store.FORM, pickle.dumps(form)):
            graph.rewrites.kept = folder
            store.trim(root_of(call), store.MOST_BYTES)
            for old in store.forms_of(call)[store.MOST_FORMS :]:
                store.drop(old)
    except NotKeepable as reason:
        log.info("not kept: %s", reason)
    except Exception as error:  # what cannot be pickled says so in many ways
        log.info("not kept: %s: %s", type(error).__name__, error, exc_info=True)


def keep_late(rewrites: Rewrites, variant: Variant) -> None:
    """Keep a form that a running generation has needed, beside those of its graph."""
    folder = rewrites.kept
    if folder is None:
        return
    try:
        keep_form(folder, rewrites.made[variant])
    except Exception as error:
        log.info("not kept: %s: %s", type(error).__name__, error, exc_info=True)
