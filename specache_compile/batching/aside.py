"""Requests that give way to older ones: their caches stand in a folder, and come back bit for bit."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from specache_compile.caches.rows import drop
from specache_compile.caches.saving import load, save

from .memory import Memory, Running
from .request import Request, Stage


def put_aside(request: Request, root: Path) -> None:
    """Have a request wait again, with its cache of a row alone in a folder below `root`, and no more in pages. OSError
    where the folder takes none: nothing has changed then."""
    if request.cache is not None:
        folder = root / uuid.uuid4().hex
        try:
            save(request.cache, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        drop(request.cache)
        request.aside = folder
    request.cache, request.stage = None, Stage.WAITING


def bring_back(request: Request, model: Any) -> DynamicCache:
    """The cache of a request that was put aside, as one of a row alone."""
    assert request.aside is not None
    cache = load(request.aside, model)
    forget(request)
    return cache


def forget(request: Request) -> None:
    """Nobody needs what was put aside any more."""
    if request.aside is not None:
        shutil.rmtree(request.aside, ignore_errors=True)
        request.aside = None


def who_gives_way(memory: Memory, running: Sequence[Running], steps: Sequence[tuple[Running, int]]) -> Request | None:
    """Of those that run, the one that began last, where pages are too few for a turn and somebody else goes on without
    it. steps: who takes part in the turn, and with how many tokens."""
    if memory.pool is None or memory.pool.left is None:
        return None
    paged = [request for request, cache, _ in running if cache is None or memory.tiers_of(cache) is not None]
    if len(paged) < 2 or memory.has(sum(memory.needed_for(*one, tokens) for one, tokens in steps)):
        return None
    return max(paged, key=lambda request: request.began)
