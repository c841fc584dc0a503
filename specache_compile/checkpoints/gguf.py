"""A GGUF file, converted once to a folder of safetensors in the user's cache ($SPECACHE_CACHE, or the platform's folder
for caches). Everything else reads that folder. Its weights are float32, which represents the values of 4-bit blocks
exactly.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
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
# Tensors that transformers silently leaves out: rotary positions would differ from the model's.
UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def folder_of(gguf: Path) -> Path:
    """The folder of a GGUF file's conversion, done or not. It is named by the file's content, not by its path."""
    with gguf.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return cache_folder() / "checkpoints" / f"{gguf.stem}-{content}"


def converted(gguf: Path) -> Path:
    """The safetensors folder of a GGUF file, made on first use."""
    folder = folder_of(gguf)
    if is_whole(folder):
        return folder
    split = split_of(gguf)
    with alone(folder.parent):
        if not is_whole(folder):
            convert(gguf, split, folder)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a conversion exists and none of its files ends early."""
    from safetensors import SafetensorError, safe_open

    weights = list(folder.glob("*.safetensors"))
    try:
        for path in weights:
            with safe_open(path, "pt"):
                pass
    except SafetensorError:
        return False
    return bool(weights) and all((folder / name).exists() for name in ("config.json", "tokenizer.json"))


def split_of(gguf: Path) -> str:
    """How text is split before it is tokenised, by the GGUF file ("" where it does not say).

    SpecacheError for missing packages, and for a file that is no GGUF file, ends early, or would be read only in part.
    """
    missing = [name for name in READERS if not is_installed(name)]
    if missing:
        raise SpecacheError(f"reading a GGUF file needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
        field = reader.fields.get("tokenizer.ggml.pre")
        split = str(field.contents()) if field else ""
    except Exception as error:  # many types, by the place where the file ends
        raise SpecacheError(f"{gguf}: not a GGUF file, or a truncated one ({first_line(error)})") from error
    unread = [tensor.name for tensor in reader.tensors if tensor.name in UNREAD]
    if unread:
        raise SpecacheError(
            f"{gguf}: transformers does not read its {', '.join(unread)}, which rotary positions are scaled by; "
            "give the model's safetensors folder or hub name"
        )
    return split


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder if needed; one process at a time is within. SpecacheError if it cannot be written."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process that converts into {folder}", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def convert(gguf: Path, split: str, folder: Path) -> None:
    """Write a GGUF file's dequantised weights, config and tokenizer to `folder`, all or nothing."""
    from safetensors import SafetensorError

    partial = folder.with_name(f"{folder.name}.partial")
    for left in (partial, folder):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    tokenizer = read_tokenizer(gguf, split)  # it refuses most foreign files
    print(f"converting {gguf.name} to safetensors in {folder}, once", file=sys.stderr)
    model = read_model(gguf)
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_tokenizer(gguf: Path, split: str) -> Any:
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    with loading(gguf):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if split == "smollm":  # llama.cpp then splits text at each digit, which transformers does not know
        splits = tokenizer.backend_tokenizer
        splits.pre_tokenizer = Sequence([Digits(individual_digits=True), splits.pre_tokenizer])
    return tokenizer


def read_model(gguf: Path) -> Any:
    """The model, dequantised in float32. transformers shows a progress bar on stderr."""
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
        raise SpecacheError(f"{gguf}: this GGUF file lacks {without[0]} ({len(without)} of the model's weights in all)")
    return plain(model)


@contextlib.contextmanager
def loading(gguf: Path) -> Iterator[None]:
    """Within it, errors of transformers name the file."""
    try:
        yield
    except Exception as error:  # many types, by what is foreign in the file
        raise SpecacheError(f"{gguf}: transformers cannot load this GGUF file: {first_line(error)}") from error


def plain(model: Any) -> Any:
    """The same weights in a model without the marks of the GGUF file.

    transformers would save the marked model as quantised, and undo its changes of names and values.
    """
    import torch

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        bare = type(model)(config)
    bare.load_state_dict(model.state_dict(), assign=True)
    bare.tie_weights()
    bare.generation_config = model.generation_config
    return bare


def unwritable(folder: Path, error: Exception) -> SpecacheError:
    return SpecacheError(
        f"the cache folder {folder} cannot be written ({first_line(error)}): set SPECACHE_CACHE to one that can"
    )


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
