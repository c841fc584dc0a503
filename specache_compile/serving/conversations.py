"""The conversations that a server caches between requests, and the selection of one for a prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from specache_compile.caches.joining import drop
from specache_compile.model_key import model_key

from .conversation import Conversation, new_conversation, shared
from .session_folder import Saved, SessionFolder


@dataclass(frozen=True)
class Bounds:
    """Limits of conversations and bytes in memory. On a CPU all tiers are on the host."""

    conversations: int
    host_bytes: int
    device_bytes: int


class Conversations:
    """All conversations of a server, the least recently used first; it is evicted first, to the folder if there is one.

    Only one thread may use them, except for `total`.

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
        """The conversation with the longest common prefix with `prompt` int64 [n], n ≥ 1. The caller owns it, and
        passes it to `put` or drops it.

        A further turn takes its conversation out. Another request with a common prefix gets a copy, unless the copy
        would be more than twice as long as needed; any other request gets a new conversation. The prompt's last token
        is left to the model. No conversation is older than the last change of the model's weights or settings.
        """
        self.notice_weights()
        kept: list[Conversation | Saved] = [*self.on_disk, *self.in_memory]
        common = [shared(conversation.ids, prompt) for conversation in kept]
        lengths = [min(n, len(prompt) - 1) for n in common]
        turns = [is_next_turn(conversation, n) for conversation, n in zip(kept, common, strict=True)]
        serving = [i for i, conversation in enumerate(kept) if serves(conversation, lengths[i], turns[i])]
        best = max(serving, key=lambda i: (lengths[i], turns[i], i), default=None)
        taken = None if best is None else self.owned(kept[best], turns[best])
        self.evict_to(self.bounds.conversations - 1)
        if taken is None or best is None:
            return new_conversation(self.model, self.changes)
        taken.changes = self.changes
        taken.cut(lengths[best])
        return taken

    def notice_weights(self) -> None:
        """Drop the conversations in memory if the model's weights or settings have changed. `load` checks those on
        disk."""
        key = model_key(self.model)
        if key != self.key:
            self.key = key
            self.changes += 1
            while self.in_memory:
                self.lose(self.in_memory.pop())

    def forget(self) -> None:
        """Drop all conversations, in memory and on disk. Running ones will not be kept either."""
        self.changes += 1
        while self.in_memory:
            self.lose(self.in_memory.pop())
        if self.folder is not None:
            self.folder.clear()

    def lose(self, conversation: Conversation) -> None:
        drop(conversation.cache)
        self.note_evicted("nowhere")

    def owned(self, conversation: Conversation | Saved, leave: bool) -> Conversation | None:
        """A conversation for the caller: itself if it is to `leave`, else a copy. None if a saved one cannot
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
        """Keep a conversation as the most recently used, unless the model has changed since. Call `trim` afterwards."""
        if conversation.changes != self.changes:
            self.lose(conversation)
            return
        conversation.note()
        self.in_memory.append(conversation)

    def trim(self) -> None:
        """Evict until all limits are met."""
        self.evict_to(self.bounds.conversations)

    def evict_to(self, conversations: int) -> None:
        """Evict until at most so many are in memory, within the limits of bytes."""
        while (
            len(self.in_memory) > conversations
            or self.total("host") > self.bounds.host_bytes
            or self.total("device") > self.bounds.device_bytes
        ):
            self.evict()

    def give_up(self) -> bool:
        """Evict one conversation, for a request that waits for memory; whether there was one."""
        if self.in_memory:
            self.evict()
            return True
        return False

    def evict(self) -> None:
        """Evict the least recently used conversation, to disk if it can be saved."""
        oldest = self.in_memory.pop(0)
        saved = self.folder is not None and self.folder.put(oldest)
        drop(oldest.cache)
        self.note_evicted("disk" if saved else "nowhere")

    def close(self) -> None:
        """Evict all, and release the folder."""
        while self.in_memory:
            self.evict()
        if self.folder is not None:
            self.folder.close()

    def total(self, place: str) -> int:
        """Bytes of the conversations in memory, on the "host" or the "device"."""
        return sum(conversation.nbytes[place] for conversation in list(self.in_memory))


def is_next_turn(conversation: Conversation | Saved, n: int) -> bool:
    """Whether a request with n common tokens is the conversation's next turn, or its last turn again: then it has the
    whole last request. A common system prompt alone does not make it one."""
    return n >= max(1, conversation.request_length)


def serves(conversation: Conversation | Saved, n: int, next_turn: bool) -> bool:
    """Whether to continue from the first n tokens: the cache can be cut to them, and a copy, if needed, is worth its
    cost."""
    if n == 0 or (n < len(conversation.ids) and not conversation.crops):
        return False
    return next_turn or n >= len(conversation.ids) // 2
