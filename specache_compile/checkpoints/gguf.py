"""Converts the GGUF file of a known checkpoint once to a folder of safetensors in the cache folder.

Its weights are float32, which represents the values of 4-bit blocks exactly.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specache_compile.cache_folder import cache_folder
from specache_compile.errors import SpecacheError, first_line

# The packages that transformers needs to read a GGUF file: the extra `smollm2`.
READERS = ("gguf", "accelerate")


def folder_of(gguf: Path) -> Path:
    """The folder of a GGUF file's conversion, done or not. Its name depends on the file's content, not on its path."""
    with gguf.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return cache_folder() / "checkpoints" / f"{gguf.stem}-{content}"


def converted(gguf: Path) -> Path:
    """The safetensors folder of a GGUF file, made on first use by one process at a time.

    SpecacheError if the cache folder cannot be written.
    """
    folder = folder_of(gguf)
    if not folder.exists():
        with writing(folder.parent):
            if not folder.exists():
                convert(gguf, folder)
    return folder


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Within it, one process at a time writes to a folder of the cache. SpecacheError if that fails."""
    from filelock import FileLock
    from safetensors import SafetensorError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            yield
    except (OSError, SafetensorError) as error:
        raise SpecacheError(
            f"the cache folder {folder} cannot be written ({first_line(error)}). Set SPECACHE_CACHE to another folder"
        ) from error


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's dequantised weights, config and tokenizer to `folder`, all or nothing.

    transformers shows a progress bar. SpecacheError if a package that reads the file is missing.
    """
    missing = [name for name in READERS if not is_installed(name)]
    if missing:
        raise SpecacheError(
            f"reading a GGUF file requires {' and '.join(missing)}. Run pip install {' '.join(missing)}"
        )
    from unittest import mock

    import torch
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    print(f"converting {gguf.name} to safetensors in {folder}, once", file=sys.stderr)
    library = importlib.import_module("gguf")
    # The file is parsed once for tokenizer, config and weights: a parse of Gemma's 262,144 pieces takes ten seconds.
    with mock.patch.object(library, "GGUFReader", functools.cache(library.GGUFReader)) as parse:
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        split = parse(str(gguf)).fields.get("tokenizer.ggml.pre")
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    # llama.cpp then splits text at each digit, which transformers does not.
    if split is not None and split.contents() == "smollm":
        splits = tokenizer.backend_tokenizer
        splits.pre_tokenizer = Sequence([Digits(individual_digits=True), splits.pre_tokenizer])
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
