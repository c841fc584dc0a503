"""Converts a GGUF file once to a folder of safetensors in the cache folder, which everything else reads.

Its weights are float32, which represents the values of 4-bit blocks exactly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.metadata
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specache_compile.cache_folder import cache_folder
from specache_compile.errors import SpecacheError, first_line

from .gguf_keys import map_keys

# The packages that transformers needs to read a GGUF file: the extra `smollm2`.
READERS = ("gguf", "accelerate")
# Tensors that transformers silently leaves out: rotary positions would differ from the model's.
UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The thread that has replaced the library's reader (`parsed_once`).
PARSING = threading.RLock()


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


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Within it, a GGUF file is parsed once for config, tokenizer and weights.

    Each parse of Gemma's 262,144 pieces takes ten seconds.
    """
    if not is_installed("gguf"):
        yield
        return
    library: Any = importlib.import_module("gguf")
    with PARSING:
        parse = library.GGUFReader
        once = functools.cache(parse)
        library.GGUFReader = lambda path, *_: once(str(path))
        try:
            yield
        finally:
            library.GGUFReader = parse


@parsed_once()
def config_of(gguf: Path) -> Any:
    """The configuration of a GGUF file, without converting it. SpecacheError as for `opened`, and for keys that it
    cannot represent."""
    from transformers import AutoConfig

    reader = opened(gguf)
    with loading(gguf):
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    map_keys(gguf, reader.fields, config)
    return config


def opened(gguf: Path) -> Any:
    """A reader of a GGUF file. SpecacheError if packages are missing, or if the file is no GGUF file, ends early, or
    has tensors that transformers leaves out."""
    missing = [name for name in READERS if not is_installed(name)]
    if missing:
        raise SpecacheError(
            f"reading a GGUF file requires {' and '.join(missing)}. Run pip install {' '.join(missing)}"
        )
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except Exception as error:  # many types, depending on where the file ends
        raise SpecacheError(
            f"{gguf}: not a GGUF file, or truncated ({first_line(error)}). Download it again"
        ) from error
    unread = [tensor.name for tensor in reader.tensors if tensor.name in UNREAD]
    if unread:
        raise SpecacheError(
            f"{gguf}: transformers does not read {', '.join(unread)}, which scales rotary positions. Pass the model's "
            "safetensors folder or hub name"
        )
    return reader


@parsed_once()
def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's dequantised weights, config and tokenizer to `folder`, all or nothing."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    config = config_of(gguf)
    tokenizer = read_tokenizer(gguf)  # it rejects most foreign files
    print(f"converting {gguf.name} to safetensors in {folder}, once", file=sys.stderr)
    try:
        read_model(gguf, config).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_tokenizer(gguf: Path) -> Any:
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    with loading(gguf):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    split = opened(gguf).fields.get("tokenizer.ggml.pre")
    if (
        split is not None and split.contents() == "smollm"
    ):  # llama.cpp then splits text at each digit, which transformers does not know
        splits = tokenizer.backend_tokenizer
        splits.pre_tokenizer = Sequence([Digits(individual_digits=True), splits.pre_tokenizer])
    return tokenizer


def read_model(gguf: Path, config: Any) -> Any:
    """The dequantised model in float32, under a configuration for the same weights. transformers shows a
    progress bar."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    loader: Any = AutoModelForCausalLM
    with loading(gguf):
        model, found = loader.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )  # fmt: skip
    without = sorted(found["missing_keys"])
    if without:  # transformers would draw them at random
        raise SpecacheError(
            f"{gguf}: this GGUF file lacks {without[0]} ({len(without)} of the model's weights in all). "
            "Download it again"
        )
    return plain(model, config)


@contextlib.contextmanager
def loading(gguf: Path) -> Iterator[None]:
    """Within it, errors of transformers name the file."""
    try:
        yield
    except Exception as error:  # many types, depending on the file
        raise SpecacheError(f"{gguf}: transformers cannot load this GGUF file: {first_line(error)}") from error


def plain(model: Any, config: Any) -> Any:
    """The same weights in a model of this configuration, without the marks of the GGUF file.

    transformers would save the marked model as quantised, and revert its changes of names and values.
    """
    import torch

    config = copy.deepcopy(config)
    config.dtype = model.dtype
    with torch.device("meta"):
        bare = type(model)(config)
    bare.load_state_dict(model.state_dict(), assign=True)
    bare.tie_weights()
    bare.generation_config = model.generation_config
    return bare


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
