"""What a server keeps between requests: caches with the tokens that they hold, in memory and, past that, on disk.

A request goes on from the conversation that shares the longest prefix of token ids with its prompt. The least recently
used one goes first where a bound is passed: to the folder, where there is one.
"""

from __future__ import annotations

import copy
import json
import shutil
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from specache_compile.errors import SpecacheError, SpecacheWarning, folder_is_served, not_kept
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import device_total, fields_of
from specache_compile.saving import load, save

TOKENS = "tokens.json"
# Tokens at the end of a prompt that the next turn's may lack: templates drop what they put before an answer (an empty
# thought, say) once it is given.
GENERATION_PROMPT = 32


@dataclass(frozen=True)
class Bounds:
    """What all conversations together may take: their number in memory, and bytes. A CPU's tiers are all the host's."""

    conversations: int
    host_bytes: int
    device_bytes: int
    disk_bytes: int


@dataclass(eq=False)
class Conversation:
    """`ids` int64 [n]: the tokens that the cache holds; the first `prompt` of them were the last request's. `folder`:
    where it is saved, while it is not in memory. `moved`: bytes that its session is known to have moved."""

    ids: Tensor
    prompt: int = 0
    cache: Any = None
    folder: Path | None = None
    moved: tuple[int, int] = (0, 0)
    nbytes: dict[str, int] = field(default_factory=dict)

    def shared(self, prompt: Tensor) -> int:
        """Tokens that this and a prompt begin with alike, but for the prompt's last, which the model is asked."""
        n = min(len(self.ids), len(prompt) - 1)
        different = (self.ids[:n] != prompt[:n]).nonzero()
        return int(different[0]) if len(different) else n

    def is_continued_by(self, shared: int) -> bool:
        """Whether a prompt that shares so many tokens is this conversation's next turn, or its last one anew."""
        return shared >= max(1, self.prompt - min(GENERATION_PROMPT, self.prompt // 2))

    def serves(self, shared: int) -> bool:
        """Whether going on from here beats a prefill: a copy is not worth less than half of it."""
        return self.is_continued_by(shared) or shared >= max(1, len(self.ids) // 2)


class Conversations:
    """All of a server's, least recently used first. One thread at a time; `total` may be asked from another.

    note_evicted: told "disk" or "nowhere" of each session that leaves the memory."""

    def __init__(self, model: Any, bounds: Bounds, folder: Path | None, note_evicted: Callable[[str], object]) -> None:
        self.model, self.bounds, self.folder, self.note_evicted = model, bounds, folder, note_evicted
        self.in_memory: list[Conversation] = []
        self.on_disk: list[Conversation] = []
        self.lock = None if folder is None else locked(folder)
        if folder is not None:
            self.on_disk = found(folder)
            self.trim_disk()

    def take(self, prompt: Tensor) -> Conversation:
        """One whose cache holds a prefix of `prompt` [n], n ≥ 1, to go on from; an empty one where none serves.

        The caller gives it back to `put`, or drops it. SpecacheError where a saved one cannot be read.
        """
        kept = [*self.on_disk, *self.in_memory]
        shared = [conversation.shared(prompt) for conversation in kept]
        best = max(range(len(kept)), key=lambda i: (shared[i], i), default=None)
        self.make_room(self.bounds.conversations - 1)
        if best is None or not kept[best].serves(shared[best]):
            return self.empty()
        conversation, n = kept[best], shared[best]
        if conversation.folder is None and n < len(conversation.ids) and not can_crop(conversation.cache):
            return self.empty()
        taken = self.owned(conversation, conversation.is_continued_by(n))
        return taken if taken is not None and crop(taken, n) else self.empty()

    def owned(self, conversation: Conversation, moves: bool) -> Conversation | None:
        """A conversation in memory for the caller alone: itself, where it `moves` out of here, or else a copy; None,
        with a warning, where it was saved and cannot be read."""
        if conversation.folder is not None:
            try:
                cache = load(conversation.folder, self.model)
            except SpecacheError as error:
                warnings.warn(not_kept(error), SpecacheWarning, stacklevel=2)
                cache, moves = None, True
            taken = Conversation(conversation.ids, conversation.prompt, cache)
            if moves:  # what is mapped stays readable
                self.on_disk.remove(conversation)
                shutil.rmtree(conversation.folder, ignore_errors=True)
            return None if cache is None else taken
        if not moves:
            return replace(conversation, cache=copy.deepcopy(conversation.cache), moved=(0, 0))
        if conversation in self.in_memory:
            self.in_memory.remove(conversation)
        return conversation

    def empty(self) -> Conversation:
        config = self.model.config.get_text_config(decoder=True)
        return Conversation(torch.empty(0, dtype=torch.int64), cache=DynamicCache(config=config))

    def put(self, conversation: Conversation) -> None:
        """Keep it, as the most recently used; others, or itself, are evicted until all is within the bounds."""
        conversation.nbytes = bytes_of(conversation.cache)
        self.in_memory.append(conversation)
        self.make_room(self.bounds.conversations)

    def make_room(self, conversations: int) -> None:
        """Evict until at most so many are in memory, within the bounds of bytes."""
        while self.in_memory and (
            len(self.in_memory) > conversations
            or self.total("host") > self.bounds.host_bytes
            or self.total("device") > self.bounds.device_bytes
        ):
            self.evict(self.in_memory.pop(0))

    def evict(self, conversation: Conversation) -> None:
        """To disk, where there is a folder and the cache can be saved."""
        if self.folder is None:
            self.note_evicted("nowhere")
            return
        folder = self.folder / f"session-{uuid.uuid4().hex}"
        try:
            save(conversation.cache, folder)
        except SpecacheError as error:
            self.note_evicted("nowhere")
            warnings.warn(not_kept(error), SpecacheWarning, stacklevel=2)
            return
        # Written last: a folder without it is half a session, which `found` clears away.
        tokens = {"prompt": conversation.prompt, "ids": conversation.ids.tolist()}
        (folder / TOKENS).write_text(json.dumps(tokens))
        self.note_evicted("disk")
        nbytes = {"disk": size_of(folder)}
        self.on_disk.append(Conversation(conversation.ids, conversation.prompt, folder=folder, nbytes=nbytes))
        self.trim_disk()

    def trim_disk(self) -> None:
        while sum(saved.nbytes["disk"] for saved in self.on_disk) > self.bounds.disk_bytes:
            oldest = self.on_disk.pop(0)
            assert oldest.folder is not None
            shutil.rmtree(oldest.folder, ignore_errors=True)

    def close(self) -> None:
        """Evict all, and give the folder free: a later server finds them there."""
        while self.in_memory:
            self.evict(self.in_memory.pop(0))
        if self.lock is not None:
            self.lock.release()

    def total(self, place: str) -> int:
        """Bytes of all conversations at a place: "host", "device" or "disk"."""
        kept = self.on_disk if place == "disk" else self.in_memory
        return sum(conversation.nbytes[place] for conversation in list(kept))


def can_crop(cache: DynamicCache) -> bool:
    """Whether all layers can give back their last tokens: no window has passed over others, nothing was evicted."""
    session = session_of(cache)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    if session is None:
        return True
    return any(item.has_all_pairs for item in fields_of(session.options, session.layers[0]))


def crop(conversation: Conversation, n: int) -> bool:
    """Keep its first n tokens; False where its cache cannot."""
    surplus = conversation.cache.get_seq_length() - n
    if surplus > 0:
        if not can_crop(conversation.cache):
            return False
        conversation.cache.crop(-surplus)
    conversation.ids = conversation.ids[:n]
    return True


def bytes_of(cache: DynamicCache) -> dict[str, int]:
    """Bytes of a cache on the host and on the device; on a CPU all are the host's."""
    session = session_of(cache)
    layers: list[Any] = list(cache.layers)
    plain = [x for layer in layers for x in (layer.keys, layer.values) if getattr(x, "handle", None) is None]
    host, device = 0, sum(x.nbytes for x in plain)
    if session is not None:
        tiers = session.statistics.bytes_by_tier
        host, device = tiers.get("host", 0), device + device_total(tiers)
    on_cpu = (plain[0] if session is None else session.cursor).device.type == "cpu"
    return {"host": host + device, "device": 0} if on_cpu else {"host": host, "device": device}


def found(folder: Path) -> list[Conversation]:
    """Those that an earlier server has left, oldest first; halves of one are cleared away."""
    left = []
    for session in folder.glob("session-*"):
        try:
            told = json.loads((session / TOKENS).read_text())
            ids, prompt = torch.tensor(told["ids"], dtype=torch.int64), int(told["prompt"])
        except (OSError, ValueError, KeyError, TypeError):
            shutil.rmtree(session, ignore_errors=True)
            continue
        left.append(Conversation(ids, prompt, folder=session, nbytes={"disk": size_of(session)}))
    return sorted(left, key=lambda saved: (saved.folder / TOKENS).stat().st_mtime)  # type: ignore[operator]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def locked(folder: Path) -> FileLock:
    """The folder for this server alone; SpecacheError where another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", thread_local=False)  # it is released by the thread that closes
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise folder_is_served(folder) from None
    return lock
