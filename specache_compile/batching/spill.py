"""The spill folder of a batch: the caches of evicted sessions, bit for bit."""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from specache_compile.caches import saving
from specache_compile.errors import SpecacheError

log = logging.getLogger(__name__)


class SpillFolder:
    """A temporary folder inside a given one; it is deleted with the batch. SpecacheError if it cannot be written."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="specache-", dir=folder))
        except OSError as error:
            why = f"the spill folder {folder} cannot be written ({error.strerror}). Give another one"
            raise SpecacheError(why) from error
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def put(self, cache: DynamicCache) -> Path | None:
        """Write a cache of one row. None, with a warning in the log, if it cannot be written."""
        place = self.folder / uuid.uuid4().hex
        try:
            saving.save(cache, place)
        except Exception as error:
            remove(place)
            log.warning("a session is dropped, since it cannot be written: %s", error)
            return None
        except BaseException:
            remove(place)
            raise
        return place


def load(place: Path, model: Any) -> DynamicCache | None:
    """Read a cache. None, with a warning in the log, if it cannot be read."""
    try:
        return saving.load(place, model)
    except Exception as error:
        log.warning("a session is prefilled again, since it cannot be read: %s", error)
        return None


def remove(place: Path | None) -> None:
    """Delete a cache, if there is one."""
    if place is not None:
        shutil.rmtree(place, ignore_errors=True)


def size_of(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
