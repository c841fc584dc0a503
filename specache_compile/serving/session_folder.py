"""Sessions that did not fit into memory, in a folder; a later server goes on with them.

folder/
  .lock                   one server at a time
  session-3f9c.../        what `save` writes, and
    tokens.json           the conversation's tokens; written last: a folder without it is half a session
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
# Matches folders of sessions and nothing else that the folder may hold.
SESSION_FOLDER = "session-" + "[0-9a-f]" * 32


@dataclass(frozen=True, eq=False)
class Saved:
    """A conversation on disk; `ids`, `asked` and `crops` as in memory."""

    folder: Path
    ids: Tensor
    asked: int
    crops: bool
    nbytes: int


class SessionFolder:
    """A server's folder of at most `most` bytes, the least recently used session first. SpecacheError where another
    server uses the folder or it cannot be written."""

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
        told = {"asked": conversation.asked, "crops": conversation.crops, "ids": conversation.ids.tolist()}
        try:
            save(conversation.cache, folder)
            (folder / TOKENS).write_text(json.dumps(told))
        except Exception as error:  # no memory for the copy, for example: eviction goes on
            log.warning("%s", not_kept(error))
            shutil.rmtree(folder, ignore_errors=True)
            return False
        saved = Saved(folder, conversation.ids, conversation.asked, conversation.crops, size_of(folder))
        self.saved.append(saved)
        self.trim()
        return True

    def read(self, saved: Saved, model: Any, leave: bool) -> Conversation | None:
        """The conversation; None, with a warning in the log, where it cannot be read, which removes it.

        leave: remove it from the folder.
        """
        self.saved.remove(saved)
        try:
            conversation = Conversation(saved.ids, load(saved.folder, model), saved.asked, saved.crops)
        except Exception as error:  # a file of another version, for example
            log.warning("%s", not_kept(error))
            conversation, leave = None, True
        if leave:  # files that are mapped stay readable
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
    """The sessions of an earlier server, oldest first. Incomplete sessions are deleted."""
    left: dict[Saved, float] = {}
    for folder in root.glob(SESSION_FOLDER):
        try:
            told = json.loads((folder / TOKENS).read_text())
            ids = torch.tensor(told["ids"], dtype=torch.int64, device="cpu")
            saved = Saved(folder, ids, int(told["asked"]), bool(told["crops"]), size_of(folder))
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
