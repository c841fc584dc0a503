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
    asked = given and not is_off()
    found = Path(given).expanduser() if asked else user_cache_path("specache-compile", appauthor=False)
    if not asked and not found.is_absolute():
        raise RuntimeError(f"this user has no home folder: say in ${VARIABLE} where files are kept")
    return found.absolute()


def is_off() -> bool:
    """Whether no trace is to be kept or taken."""
    return os.environ.get(VARIABLE, "").lower() == OFF
