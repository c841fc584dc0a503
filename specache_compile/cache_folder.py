"""$SPECACHE_CACHE: the folder of converted checkpoints and stored traces."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

VARIABLE = "SPECACHE_CACHE"


def cache_folder() -> Path:
    """$SPECACHE_CACHE, or the platform's folder for caches."""
    given = os.environ.get(VARIABLE, "")
    found = Path(given).expanduser() if given else user_cache_path("specache-compile", appauthor=False)
    if not given and not found.is_absolute():
        raise RuntimeError(f"this user has no home folder: say in ${VARIABLE} where files are kept")
    return found.absolute()
