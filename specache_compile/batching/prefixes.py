"""Cached prefixes: a later prompt with the same first tokens shares their pages.

Without sessions a prefix ends at the end of a chunk and of a page. So a request that starts from it prefills the same
chunks as without it, and has the same tiers bit for bit. With sessions the caches of finished requests are prefixes
too, cut to the tokens that they share with a prompt.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from specache_compile.caches import saving
from specache_compile.caches.joining import drop
from specache_compile.errors import SpecacheError
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import fields_of

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Prefix:
    """A cached prefix.

    ids: int64 [n], its tokens.
    cache: a cache of one row with these; None: it is in `folder`.
    crops: whether a prompt may use its first tokens alone.
    """

    ids: Tensor
    cache: DynamicCache | None
    crops: bool
    folder: Path | None = None

    def usable(self, prompt: Tensor) -> int:
        """How many first tokens a prompt can start from, without the prompt's last token. Few tokens of a long prefix
        are not worth a copy."""
        n = min(shared(self.ids, prompt), len(prompt) - 1)
        return n if n == len(self.ids) or (self.crops and n >= min(PAGE, len(self.ids) // 2)) else 0

    def loaded(self, model: Any) -> DynamicCache | None:
        """Its cache, read if it is in the folder. None, with a warning in the log, if it cannot be read."""
        try:
            return self.cache if self.folder is None else saving.load(self.folder, model)
        except Exception as error:
            log.warning("a session is prefilled again, since it cannot be read: %s", error)
            return None


class SpillFolder:
    """A temporary folder inside a given one; it is deleted with the batch. SpecacheError if it cannot be written.

    most_bytes: the limit of its size.
    """

    def __init__(self, folder: Path, most_bytes: float = math.inf) -> None:
        self.most_bytes = most_bytes
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
            shutil.rmtree(place, ignore_errors=True)
            log.warning("a session is dropped, since it cannot be written: %s", error)
            return None
        return place

    def is_full(self) -> bool:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()) > self.most_bytes


class Prefixes:
    """The most recently used prefixes, evicted to a folder if there is one.

    most: the limit of their number in memory.
    kept: the least recently used first.
    evicted: number of evictions to "disk" and to "nowhere".
    """

    def __init__(self, most: int, spill: SpillFolder | None) -> None:
        self.most, self.spill = most, spill
        self.kept: list[Prefix] = []
        self.evicted: Counter[str] = Counter()

    @property
    def in_memory(self) -> list[Prefix]:
        return [prefix for prefix in self.kept if prefix.cache is not None]

    def longest(self, prompt: Tensor) -> tuple[int, Prefix | None]:
        """The prefix with the most usable tokens for a prompt, and their number."""
        length, number = max(((p.usable(prompt), number) for number, p in enumerate(self.kept)), default=(0, 0))
        if not length:
            return 0, None
        self.kept.append(self.kept.pop(number))
        return length, self.kept[-1]

    def put(self, ids: Tensor, copied: Callable[[], DynamicCache], crops: bool) -> None:
        """Keep a cache of these tokens, which `copied` returns, unless a kept one has them. It replaces prefixes of it
        if it can be cropped to them."""
        has_them = (p for p in self.kept if shared(p.ids, ids) == len(ids))
        if not self.most or any(p.crops or len(p.ids) == len(ids) for p in has_them):
            return
        for shorter in [p for p in self.kept if crops and shared(p.ids, ids) == len(p.ids)]:
            self.remove(shorter)
        while len(self.in_memory) >= self.most:
            self.drop_oldest()
        try:
            self.kept.append(Prefix(ids, copied(), crops))
        except Exception as error:  # the request is complete without it
            log.warning("a prefix is not kept, since its cache cannot be copied: %s", error)

    def drop_oldest(self) -> bool:
        """Evict the least recently used prefix from memory; whether there was one."""
        oldest = next(iter(self.in_memory), None)
        if oldest is None or oldest.cache is None:
            return False
        folder = None if self.spill is None else self.spill.put(oldest.cache)
        self.evicted["nowhere" if folder is None else "disk"] += 1
        if self.spill is None or folder is None:
            self.remove(oldest)
            return True
        cache, oldest.folder, oldest.cache = oldest.cache, folder, None
        drop(cache)
        on_disk = [prefix for prefix in self.kept if prefix.folder is not None]
        while on_disk and self.spill.is_full():
            self.remove(on_disk.pop(0))
        return True

    def remove(self, prefix: Prefix) -> None:
        """Forget a prefix, and free its memory."""
        self.kept.remove(prefix)
        if prefix.folder is not None:
            shutil.rmtree(prefix.folder, ignore_errors=True)
        if prefix.cache is not None:
            drop(prefix.cache)

    def clear(self) -> bool:
        """Forget all prefixes; whether there were some."""
        had = bool(self.kept)
        while self.kept:
            self.remove(self.kept[-1])
        return had


def shared(ids: Tensor, prompt: Tensor) -> int:
    """The length of the common prefix."""
    n = min(len(ids), len(prompt))
    different = (ids[:n] != prompt[:n]).nonzero()
    return int(different[0]) if len(different) else n


def can_crop(cache: DynamicCache) -> bool:
    """Whether all layers can drop their last tokens: no sliding window and no eviction has dropped others."""
    session = session_of(cache)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    return session is None or any(item.has_all_pairs for item in fields_of(session.options, session.layers[0]))
