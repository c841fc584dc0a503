"""Preempted requests: their caches are swapped to a folder, and loaded again bit for bit."""

from __future__ import annotations

import functools
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from specache_compile.caches.joining import drop
from specache_compile.caches.saving import loaded, save

from .request import Request, Stage
from .twice import FailedTwice, twice


class SwapFolder:
    """A temporary folder inside a given one; it is deleted with the batch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="specache-", dir=folder))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def put(self, request: Request) -> None:
        """Swap a request's cache of one row to the folder, and free its pages. If it raises, nothing has changed."""
        if request.cache is not None:
            place = self.folder / uuid.uuid4().hex
            try:
                save(request.cache, place)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
            request.swapped, cache, request.cache = place, request.cache, None
            drop(cache)
        request.stage = Stage.WAITING


def drop_swapped(request: Request) -> None:
    """Delete a request's swapped cache."""
    if request.swapped is not None:
        shutil.rmtree(request.swapped, ignore_errors=True)
        request.swapped = None


def load_swapped(folder: Path, model: Any) -> DynamicCache:
    """Load a swapped cache. Like a cache in memory, it stays valid when the model's weights change."""
    return loaded(folder, model, by_any_weights=True)


def swapped_in_or_none(request: Request, model: Any) -> DynamicCache | None:
    """The swapped cache of a request; None if it cannot be read or does not fit into memory."""
    assert request.swapped is not None
    try:
        return twice(functools.partial(load_swapped, request.swapped, model))
    except FailedTwice:
        return None
