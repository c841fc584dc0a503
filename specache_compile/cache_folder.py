"""$SPECACHE_CACHE: the folder of converted checkpoints and stored traces."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub.constants import HF_HOME

VARIABLE = "SPECACHE_CACHE"


def cache_folder() -> Path:
    """$SPECACHE_CACHE, or a folder in Hugging Face's cache ($HF_HOME)."""
    given = os.environ.get(VARIABLE, "")
    found = Path(given).expanduser() if given else Path(HF_HOME) / "specache-compile"
    if not given and not found.is_absolute():
        raise RuntimeError(f"this user has no home folder. Set ${VARIABLE} to a folder")
    return found.absolute()
