"""The folder of stored traces. Each file is written whole or not at all. Only trusted users may write: unpickling runs
code.

    traces/<environment>/<call>/<trace>/trace        replaces one trace of Dynamo
    traces/<environment>/<call>/<trace>/<variant>    one rewritten graph of the trace
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import pickle
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from specache_compile.cache_folder import VARIABLE, cache_folder
from specache_compile.errors import warn

from .code import PLAIN, code_hash, hash_of

log = logging.getLogger(__name__)
TRACES, TRACE = "traces", "trace"
# Traces of one call. A call has several where one process needed a phase that the stored trace lacks.
MOST_TRACES = 8
PACKAGES = ("transformers", "triton", "peft", "accelerate")
CONFIGS = (
    "torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.compiler.config",
    "torch.fx.experimental._config",
)  # fmt: skip
# Settings on which no graph depends: transformers sets the first two when it generates.
IGNORED = ("recompile_limit", "accumulated_recompile_limit", "debug_dir_root")
OWN = ("specache_compile", "specache_compile.passes", "specache_compile.lowering", "specache_compile.kernels")


def folder() -> Path | None:
    """The folder of stored traces; None where $SPECACHE_CACHE is unset."""
    return cache_folder() / TRACES if os.environ.get(VARIABLE) else None


def traces_of(call: Path) -> list[Path]:
    """The folders of a call's traces, the newest first."""
    try:
        files = sorted(call.glob(f"*/{TRACE}"), key=lambda file: file.stat().st_mtime, reverse=True)
    except OSError:  # another process removes one
        return []
    return [file.parent for file in files]


def load(path: Path) -> Any:
    """A file's value; None where there is no file, or a damaged one."""
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:  # unpickling a damaged file can raise any error
        log.info("%s is not loaded: %r", path, error)
        return None


def save(path: Path, value: Any) -> bool:
    """Write a value's file whole; False, with one warning, where the folder cannot be written."""
    data = pickle.dumps(value)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as part:
            (Path(part) / path.name).write_bytes(data)
            os.replace(Path(part) / path.name, path)
    except OSError as error:
        warn_once(
            f"no trace is stored for later processes: {error}. Set {VARIABLE} to a folder that this user can write to"
        )
        return False
    return True


@functools.cache
def warn_once(message: str) -> None:
    warn(message)


@contextlib.contextmanager
def no_collecting() -> Iterator[None]:
    """Pause Python's garbage collection, which would search all objects that are being loaded again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def components() -> dict[str, Any]:
    """Each part of the environment, by name."""
    cuda = torch.backends.cuda
    sdp = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    return {
        "python": sys.version,
        "torch": (torch.__version__, torch.version.git_version),
        "packages": [getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES],
        "specache": own_sources(),
        "processor": (platform.machine(), torch.backends.cpu.get_cpu_capability(), processor()),
        "devices": devices(),
        "settings": [settings(name) for name in CONFIGS],
        "kernels": (torch.backends.mkldnn.enabled, sdp),
    }


def environment() -> str:
    return hash_of(components())


def devices() -> list[tuple[Any, ...]]:
    """The GPUs that this process uses, for which Triton compiles."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() * torch.cuda.is_initialized()))
    return [(each.name, each.major, each.minor, each.multi_processor_count, each.total_memory) for each in found]


def settings(name: str) -> str:
    """A hash of one of torch's modules of settings. The order of a set differs between processes."""
    found = import_module(name).save_config_portable().items()
    texts = {key: repr(sorted(map(repr, value)) if isinstance(value, set) else value) for key, value in found}
    return hash_of(sorted((key, text) for key, text in texts.items() if key not in IGNORED))


@functools.cache
def processor() -> str:
    """A hash of the processor's features, where the system lists them."""
    listed = Path("/proc/cpuinfo")
    return hash_of(re.findall("^(?:flags|Features).*", listed.read_text(), re.M)[:1]) if listed.is_file() else ""


@functools.cache
def own_sources() -> str:
    """A hash of this package's files: they determine the rewritten graphs."""
    found = (file for name in OWN for file in sorted(Path(str(import_module(name).__file__)).parent.rglob("*")))
    return hash_of([(file.name, file.read_bytes()) for file in found if file.suffix in (".py", ".cpp", ".h")])


def call_key(code: CodeType, local_scope: Mapping[str, Any], compiled: Any) -> str:
    """A hash of a frame's code, its arguments' kinds and the arguments of torch.compile."""
    arguments, structure = tree_flatten(dict(local_scope))
    return hash_of((code_hash(code), str(structure), [*map(kind_of, arguments)], compiled), 24)


def kind_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = [size == 1 for size in value.shape]
        return type(value).__name__, str(value.dtype), value.device.type, sizes, value.requires_grad
    if isinstance(value, torch.nn.Module):
        modules = [(name, type(module).__qualname__) for name, module in value.named_modules()]
        weights = [(name, tuple(p.shape), str(p.dtype), p.device.type) for name, p in value.named_parameters()]
        return hash_of((modules, weights))
    if isinstance(value, PLAIN):
        return repr(value)
    layers = getattr(value, "layers", None)
    keys = [getattr(layer, "keys", None) for layer in layers] if isinstance(layers, list) else []
    return type(value).__qualname__, [(type(each).__name__, getattr(each, "ndim", 0)) for each in keys]
