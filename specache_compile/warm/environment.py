"""All that compiled code depends on besides the model and the call: versions, settings, processor, our own source."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers

from .code import hash_of

PACKAGES = ("triton", "peft", "accelerate")
CONFIGS = (
    "torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.compiler.config",
    "torch.fx.experimental._config",
)  # fmt: skip
# Settings on which no graph depends: transformers sets the first two when it generates.
UNTOLD = ("recompile_limit", "accumulated_recompile_limit", "debug_dir_root")
SOURCES = (".py", ".cpp", ".h")
# Folders of this package that no compiled code comes from.
APART = ("bench", "demo", "explaining", "serving")


def components() -> dict[str, str]:
    """Each part by its name, as text: another text is another environment."""
    return {
        "python": sys.version,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "transformers": transformers.__version__,
        "packages": ", ".join(f"{name} {version_of(name)}" for name in PACKAGES),
        "specache": own_sources(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {processor()}",
        "threads": str(torch.get_num_threads()),
        "settings": " ".join(settings(name) for name in CONFIGS),
        "precision": f"{torch.get_float32_matmul_precision()} {torch.backends.mkldnn.enabled} {sdp_kernels()}",
    }


def environment() -> str:
    return hash_of(sorted(components().items()))


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def settings(name: str) -> str:
    """A hash of one of torch's modules of settings."""
    found = sorted(import_module(name).save_config_portable().items())
    told = [f"{key} {settled(value)}" for key, value in found if key not in UNTOLD]
    return hash_of(told)


def settled(value: object) -> str:
    """A setting's text; a set's order differs between processes, a function's address too."""
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    return getattr(value, "__qualname__", "") if callable(value) else repr(value)


def sdp_kernels() -> str:
    names = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
    return " ".join(str(getattr(torch.backends.cuda, f"{name}_enabled")()) for name in names)


@functools.cache
def processor() -> str:
    """A hash of what the processor can do, where the system tells."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.is_file() else []
    flags = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return hash_of(flags)


@functools.cache
def own_sources() -> str:
    """A hash of this package's own files: what they make of a graph is what is kept."""
    digest = hashlib.sha256()
    for file in files():
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def files() -> Iterator[Path]:
    for name in (
        "specache_compile",
        "specache_compile.passes",
        "specache_compile.lowering",
        "specache_compile.kernels",
    ):
        folder = Path(str(import_module(name).__file__)).parent
        inside = (file for file in folder.rglob("*") if file.suffix in SOURCES)
        yield from sorted(file for file in inside if file.relative_to(folder).parts[0] not in APART)
