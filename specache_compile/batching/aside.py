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

from specache_compile.caches.rows import drop
from specache_compile.caches.saving import loaded, save

from .request import Request, Stage
from .twice import FailedTwice, twice


class Aside:
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
            request.aside, cache, request.cache = place, request.cache, None
            drop(cache)
        request.stage = Stage.WAITING


def forget(request: Request) -> None:
    """Nobody needs what was put aside any more."""
    if request.aside is not None:
        shutil.rmtree(request.aside, ignore_errors=True)
        request.aside = None


def back_from(folder: Path, model: Any) -> DynamicCache:
    """The cache that was put aside. As in memory, it goes on if the model's weights have changed meanwhile."""
    return loaded(folder, model, by_any_weights=True)


def brought_or_none(request: Request, model: Any) -> DynamicCache | None:
    """The cache of a request that is aside; None where it cannot be read, or there is no room."""
    assert request.aside is not None
    try:
        return twice(functools.partial(back_from, request.aside, model))
    except FailedTwice:
        return None
