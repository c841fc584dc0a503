"""A checkpoint's model and tokenizer, once its name is resolved."""

from __future__ import annotations

from typing import Any

from specache_compile.errors import SpecacheError, first_line


def placed(model: Any, device: str) -> Any:
    """The model on a device, for inference; SpecacheError where it cannot be there."""
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # no such name, or a kind that this torch was built without
        raise SpecacheError(f"--device {device}: {first_line(error)}") from error


def limit_of(model: Any) -> int:
    """The model's longest context, in tokens."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 62))


def tokenizer_of(folder: str, **how: Any) -> Any:
    """The tokenizer of a resolved checkpoint. how: as for `AutoTokenizer.from_pretrained`.

    SpecacheError where none is saved: for some families transformers would make one without words.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    except ValueError as error:
        raise no_tokenizer(folder, first_line(error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise no_tokenizer(folder, "it would know no word")
    return tokenizer


def no_tokenizer(folder: str, why: str) -> SpecacheError:
    return SpecacheError(
        f"{folder}: no tokenizer can be read there ({why}): save one beside the weights; a model of bytes takes the "
        "tokenizer.json and tokenizer_config.json of examples/needle-llama"
    )
