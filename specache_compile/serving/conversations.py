"""The conversations that a server keeps between requests, and the choice of one for a prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from specache_compile.caches.joining import drop
from specache_compile.model_key import model_key

from .conversation import Conversation, begun, shared
from .session_folder import Saved, SessionFolder


@dataclass(frozen=True)
class Bounds:
    """The most conversations in memory, and the most bytes. On a CPU all tiers are the host's."""

    conversations: int
    host_bytes: int
    device_bytes: int


class Conversations:
    """All conversations of a server, the least recently used first; this one is evicted first, to the folder if there
    is one. Only one thread may use it, except for `total`.

    note_evicted: called for each evicted conversation with "disk" or "nowhere".
    """

    def __init__(
        self, model: Any, bounds: Bounds, folder: SessionFolder | None, note_evicted: Callable[[str], object]
    ) -> None:
        self.model, self.bounds, self.folder, self.note_evicted = model, bounds, folder, note_evicted
        self.in_memory: list[Conversation] = []
        self.key, self.changes = model_key(model), 0

    @property
    def on_disk(self) -> list[Saved]:
        return [] if self.folder is None else self.folder.saved

    def take(self, prompt: Tensor) -> Conversation:
        """The conversation with the longest prefix of `prompt` int64 [n], n ≥ 1. The caller owns it, and gives it to
        `put` or drops it.

        A conversation's next turn takes it away. Another request with the same beginning gets a copy, unless the copy
        would be more than twice what is needed. Any other request begins anew. The prompt's last token is left to the
        model. No conversation is older than the last change of the model's weights or settings.
        """
        self.notice_weights()
        kept: list[Conversation | Saved] = [*self.on_disk, *self.in_memory]
        common = [shared(conversation.ids, prompt) for conversation in kept]
        lengths = [min(n, len(prompt) - 1) for n in common]
        turns = [is_next_turn(conversation, n) for conversation, n in zip(kept, common, strict=True)]
        serving = [i for i, conversation in enumerate(kept) if serves(conversation, lengths[i], turns[i])]
        best = max(serving, key=lambda i: (lengths[i], turns[i], i), default=None)
        taken = None if best is None else self.owned(kept[best], turns[best])
        self.make_room(self.bounds.conversations - 1)
        if taken is None or best is None:
            return begun(self.model, self.changes)
        taken.changes = self.changes
        taken.cut(lengths[best])
        return taken

    def notice_weights(self) -> None:
        """Forget the conversations in memory if the model's weights or settings have changed. `load` compares those on
        disk."""
        key = model_key(self.model)
        if key != self.key:
            self.key = key
            self.changes += 1
            while self.in_memory:
                self.lose(self.in_memory.pop())

    def forget(self) -> None:
        """Forget all conversations, in memory and on disk. Those under way will not be kept either."""
        self.changes += 1
        while self.in_memory:
            self.lose(self.in_memory.pop())
        if self.folder is not None:
            self.folder.clear()

    def lose(self, conversation: Conversation) -> None:
        drop(conversation.cache)
        self.note_evicted("nowhere")

    def owned(self, conversation: Conversation | Saved, leave: bool) -> Conversation | None:
        """A conversation that the caller owns: itself if it is to `leave`, else a copy. None where a saved one cannot
        be read."""
        if isinstance(conversation, Saved):
            assert self.folder is not None
            return self.folder.read(conversation, self.model, leave)
        self.in_memory.remove(conversation)
        if leave:
            return conversation
        self.in_memory.append(conversation)
        return replace(conversation, cache=copy.deepcopy(conversation.cache))

    def put(self, conversation: Conversation) -> None:
        """Keep it as the most recently used, unless the model has changed since it was taken. The caller calls `trim`
        afterwards."""
        if conversation.changes != self.changes:
            self.lose(conversation)
            return
        conversation.note()
        self.in_memory.append(conversation)

    def trim(self) -> None:
        """Evict until all is within the bounds."""
        self.make_room(self.bounds.conversations)

    def make_room(self, conversations: int) -> None:
        """Evict until at most so many are in memory, within the bounds of bytes."""
        while (
            len(self.in_memory) > conversations
            or self.total("host") > self.bounds.host_bytes
            or self.total("device") > self.bounds.device_bytes
        ):
            self.evict()

    def give_up(self) -> bool:
        """Evict one, for a request that waits for memory; whether there was one."""
        if self.in_memory:
            self.evict()
            return True
        return False

    def evict(self) -> None:
        """Evict the least recently used conversation, to disk where it can be saved."""
        oldest = self.in_memory.pop(0)
        saved = self.folder is not None and self.folder.put(oldest)
        drop(oldest.cache)
        self.note_evicted("disk" if saved else "nowhere")

    def close(self) -> None:
        """Evict all and release the folder."""
        while self.in_memory:
            self.evict()
        if self.folder is not None:
            self.folder.close()

    def total(self, place: str) -> int:
        """Bytes of the conversations in memory, on the "host" or the "device"."""
        return sum(conversation.nbytes[place] for conversation in list(self.in_memory))


def is_next_turn(conversation: Conversation | Saved, n: int) -> bool:
    """Whether a request that shares n tokens is the conversation's next turn, or its last turn again: the request has
    all that was asked. Another question behind the same system prompt belongs to another conversation."""
    return n >= max(1, conversation.asked)


def serves(conversation: Conversation | Saved, n: int, next_turn: bool) -> bool:
    """Whether to go on from its first n tokens: it can be cut to them, and a copy, if one is needed, is worth its
    cost."""
    if n == 0 or (n < len(conversation.ids) and not conversation.crops):
        return False
    return next_turn or n >= len(conversation.ids) // 2
