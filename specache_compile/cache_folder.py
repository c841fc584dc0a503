"""$SPECACHE_CACHE: where converted checkpoints and kept traces stand between processes."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

VARIABLE = "SPECACHE_CACHE"
OFF = "off"


def cache_folder() -> Path:
    """$SPECACHE_CACHE, or the platform's folder for caches."""
    given = os.environ.get(VARIABLE, "")
    return Path(given).expanduser() if given and not is_off() else user_cache_path("specache-compile", appauthor=False)


def is_off() -> bool:
    """Whether no trace is to be kept or taken."""
    return os.environ.get(VARIABLE, "").lower() == OFF
