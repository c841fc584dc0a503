"""Requests that give way to older ones: their caches stand in a folder, and come back bit for bit."""

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
    """A folder of its own below one that is given, which goes with the batch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="specache-", dir=folder))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def put(self, request: Request) -> None:
        """Have a request wait, its cache of a row alone in the folder and no more in pages. Where that raises, nothing
        has changed."""
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
    """Nobody needs what was put aside any more."""
    if request.swapped is not None:
        shutil.rmtree(request.swapped, ignore_errors=True)
        request.swapped = None


def load_swapped(folder: Path, model: Any) -> DynamicCache:
    """The cache that was put aside. As in memory, it goes on if the model's weights have changed meanwhile."""
    return loaded(folder, model, by_any_weights=True)


def swapped_in_or_none(request: Request, model: Any) -> DynamicCache | None:
    """The cache of a request that is aside; None where it cannot be read, or there is no room."""
    assert request.swapped is not None
    try:
        return twice(functools.partial(load_swapped, request.swapped, model))
    except FailedTwice:
        return None
