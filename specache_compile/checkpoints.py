"""Where a model's name leads: a local folder or a hub name, with or without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import SpecacheError


def checked(model: str) -> str:
    """The path or hub name, or an OSError that names a path which is not there."""
    looks_local = model.startswith((".", "/", "~")) or model.endswith(".json")
    if looks_local and not Path(model).expanduser().exists():
        raise OSError(f"no checkpoint at {model}: give a folder with config.json, a config.json, or a hub name")
    return model


def placed(model: Any, device: str) -> Any:
    """The model on a device, for inference, or a SpecacheError that names a device which it cannot be on."""
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # no such name; or a kind that this torch was built without
        raise SpecacheError(f"--device {device}: {str(error).splitlines()[0]}") from error


def is_byte_level(model: str) -> bool:
    """A local checkpoint of 256 tokens without a tokenizer reads bytes, as the shipped examples do."""
    folder = Path(model)
    if not folder.is_dir() or (folder / "tokenizer.json").exists() or (folder / "tokenizer_config.json").exists():
        return False
    from transformers import AutoConfig

    return bool(AutoConfig.from_pretrained(model).vocab_size == 256)
