"""A checkpoint's model and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specache_compile.errors import SpecacheError, first_line

from .names import MODEL, config_of, print_origin, resolved

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its weights. folder: a folder of safetensors, or a hub name."""

    folder: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase


def open_checkpoint(name: str, **how: Any) -> Checkpoint:
    """The config and tokenizer of a checkpoint; a known name is converted, and its origin printed. how: as for
    `from_pretrained`. SpecacheError if one of them cannot be read."""
    folder = resolved(name)
    if Path(folder).is_file():
        raise SpecacheError(f"{name} is a file. Pass {MODEL}")
    print_origin(name)
    return Checkpoint(folder, config_of(folder, **how), tokenizer_of(folder, **how))


def load_model(
    checkpoint: str | Checkpoint, dtype: str | torch.dtype = "auto", device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer.

    Args:
        checkpoint: a known name ("smollm2-135m"), a folder, or a hub name.
        dtype: of the weights; "auto" is the checkpoint's own dtype.
        device: "cpu", "cuda" or "cuda:1", for example; None uses CUDA if there is a device, else the CPU.

    Returns:
        The model, for inference and not compiled, and its tokenizer.

    Raises:
        SpecacheError: there is no such checkpoint, tokenizer or device, or the weights are damaged.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        print(tokenizer.decode(model.generate(**inputs, max_new_tokens=8)[0]))
    """
    device = usable_device(device)
    opened = open_checkpoint(checkpoint) if isinstance(checkpoint, str) else checkpoint
    return placed(with_weights(opened.folder, dtype=dtype), device), opened.tokenizer


def with_weights(folder: str, **how: Any) -> Any:
    """The model of a resolved checkpoint. how: as for `from_pretrained`. SpecacheError if its weights are damaged."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, **how)
    except SafetensorError as error:
        raise SpecacheError(f"{folder}: the weights are damaged ({error}). Copy or download them again") from error


def usable_device(name: str | None) -> str:
    """The device's name, or the default; SpecacheError, before weights are loaded, if this torch cannot use it."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # no such name, or a kind that this torch does not support
        raise no_device(name, error) from error
    return name


def placed(model: Any, device: str) -> Any:
    """The model on a device, for inference; SpecacheError if that fails."""
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # too little memory, or as in `usable_device`
        raise no_device(device, error) from error


def no_device(name: str, error: Exception) -> SpecacheError:
    return SpecacheError(f"device {name}: {first_line(error)}. Pass another device")


def limit_of(model: Any) -> int:
    """The longest context, in tokens, of a model or a config."""
    config = getattr(model, "config", model).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 1 << 62)


def tokenizer_of(folder: str, **how: Any) -> Any:
    """The tokenizer of a resolved checkpoint. how: as for `AutoTokenizer.from_pretrained`.

    SpecacheError if none is saved: for some families transformers would create an empty one.
    """
    from transformers import AutoTokenizer

    why = "it would have no words"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **how)
        if len(tokenizer) > len(tokenizer.all_special_tokens):
            return tokenizer
    except ValueError as error:
        why = first_line(error)
    raise SpecacheError(
        f"{folder} has no readable tokenizer ({why}). Save one beside the weights; for a byte-level model copy "
        "tokenizer.json and tokenizer_config.json of examples/needle-llama"
    )
