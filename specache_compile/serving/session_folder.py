"""Sessions that do not fit into memory, in a folder; a later server continues them.

.lock                              one server at a time
session-3f9c.../                   the files of `save`
session-3f9c.../tokens.json        the conversation's tokens, written last: without it a session is incomplete
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from specache_compile.caches.saving import load, save
from specache_compile.errors import SpecacheError

from .conversation import Conversation

log = logging.getLogger(__name__)
TOKENS = "tokens.json"
# Matches folders of sessions only.
SESSION_FOLDER = "session-" + "[0-9a-f]" * 32


@dataclass(frozen=True, eq=False)
class Saved:
    """A conversation on disk; `ids`, `request_length` and `crops` as in memory."""

    folder: Path
    ids: Tensor
    request_length: int
    crops: bool
    nbytes: int


class SessionFolder:
    """A server's folder of at most `most` bytes, the least recently used session first. SpecacheError if another server
    uses it or it cannot be written."""

    def __init__(self, root: Path, most: int) -> None:
        self.root, self.most = root, most
        self.lock = FileLock(root / ".lock", thread_local=False)  # another thread closes it
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=0)
        except Timeout:
            raise folder_is_served(root) from None
        except OSError as error:
            raise no_session_folder(root, error) from error
        self.saved = found(root)
        self.trim()

    def put(self, conversation: Conversation) -> bool:
        """Save it as the most recently used. False, with a warning in the log, where it cannot be saved."""
        folder = self.root / f"session-{uuid.uuid4().hex}"
        described = {
            "asked": conversation.request_length, "crops": conversation.crops, "ids": conversation.ids.tolist()
        }  # fmt: skip
        try:
            save(conversation.cache, folder)
            (folder / TOKENS).write_text(json.dumps(described))
        except Exception as error:  # no memory for the copy, for example: eviction continues
            log.warning("%s", not_kept(error))
            shutil.rmtree(folder, ignore_errors=True)
            return False
        saved = Saved(folder, conversation.ids, conversation.request_length, conversation.crops, size_of(folder))
        self.saved.append(saved)
        self.trim()
        return True

    def read(self, saved: Saved, model: Any, leave: bool) -> Conversation | None:
        """The conversation; None, with a warning in the log, where it cannot be read, which removes it.

        leave: remove it from the folder.
        """
        self.saved.remove(saved)
        try:
            conversation = Conversation(saved.ids, load(saved.folder, model), saved.request_length, saved.crops)
        except Exception as error:  # a file of another version, for example
            log.warning("%s", not_kept(error))
            conversation, leave = None, True
        if leave:  # mapped files stay readable
            shutil.rmtree(saved.folder, ignore_errors=True)
        else:
            self.saved.append(saved)
        return conversation

    def trim(self) -> None:
        while self.total() > self.most:
            shutil.rmtree(self.saved.pop(0).folder, ignore_errors=True)

    def clear(self) -> None:
        """Delete all sessions."""
        while self.saved:
            shutil.rmtree(self.saved.pop().folder, ignore_errors=True)

    def total(self) -> int:
        """Bytes of all sessions."""
        return sum(saved.nbytes for saved in list(self.saved))

    def close(self) -> None:
        self.lock.release()


def found(root: Path) -> list[Saved]:
    """The sessions of an earlier server, the oldest first. Incomplete sessions are deleted."""
    left: dict[Saved, float] = {}
    for folder in root.glob(SESSION_FOLDER):
        try:
            described = json.loads((folder / TOKENS).read_text())
            ids = torch.tensor(described["ids"], dtype=torch.int64, device="cpu")
            saved = Saved(folder, ids, int(described["asked"]), bool(described["crops"]), size_of(folder))
            left[saved] = (folder / TOKENS).stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            shutil.rmtree(folder, ignore_errors=True)
    return sorted(left, key=lambda saved: left[saved])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def folder_is_served(folder: Path) -> SpecacheError:
    return SpecacheError(f"--session-folder {folder}: another server uses this folder. Give another one")


def no_session_folder(folder: Path, error: OSError) -> SpecacheError:
    return SpecacheError(
        f"--session-folder {folder}: this folder cannot be written ({error.strerror}). Give another one"
    )


def not_kept(error: Exception) -> str:
    return f"a session is not kept, so the next turn of its conversation is prefilled whole: {error}"
