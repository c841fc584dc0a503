"""The store: a folder of files that this user alone may write, each written whole or not at all.

    traces/<environment>/<call>/<form>/form              what stands in place of one trace of Dynamo's
    traces/<environment>/<call>/<form>/<variant>         a rewritten graph of the form's

A file is unpickled by who reads it, which runs whatever it says. So nothing is read that another user could have
written: the file that was opened belongs to this user, and nobody else may write to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specache_compile.cache_folder import VARIABLE, cache_folder, is_off
from specache_compile.errors import warn

# Below $SPECACHE_CACHE.
TRACES = "traces"
# Of all files together; the forms that were used longest ago go first.
MOST_BYTES = 4 << 30
# Forms of one call: more than one where a process needed a phase that the form at hand had not been rewritten for.
MOST_FORMS = 8
FORM = "form"
# A form's folder, below that of its environment and its call.
NAMES = re.compile("[0-9a-f]{16}/[0-9a-f]{24}/[0-9a-f]{32}")
# What a writer that was killed leaves behind begins with it.
PART = ".part-"

_told: set[str] = set()


def folder() -> Path | None:
    """Where forms are kept; None: nowhere."""
    return None if is_off() else cache_folder() / TRACES


def forms_of(call: Path) -> list[Path]:
    """The folders of a call's forms, the newest first."""
    with contextlib.suppress(OSError):
        found = [(path.stat().st_mtime, path) for path in call.iterdir() if (path / FORM).is_file()]
        return [path for _, path in sorted(found, reverse=True)]
    return []


def read(path: Path, root: Path) -> bytes | None:
    """The bytes of a file below `root`; None where there is none, or where another user could have put it there."""
    try:
        with path.open("rb") as file:
            levels = path.relative_to(root).parents
            places = [os.fstat(file.fileno()), *(os.stat(root / level) for level in levels)]
            above = {*root.absolute().parents, *root.resolve().parents}
            if not all(map(is_ours, places)) or not all(is_safe_above(os.stat(each)) for each in above):
                tell_once(
                    f"{root}: other users may write there, or have: nothing is taken from it, and models are traced"
                )
                return None
            return file.read()
    except OSError:
        return None


def is_ours(found: os.stat_result) -> bool:
    """Whether only this user, or root, can have written to a file or folder."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_safe_above(found: os.stat_result) -> bool:
    """Whether strangers cannot put another folder in the place of one in this one; in /tmp they cannot."""
    return not found.st_mode & stat.S_IWOTH or bool(found.st_mode & stat.S_ISVTX)


def write(path: Path, data: bytes) -> bool:
    """Put a file in its place, whole; False, and one warning, where the folder takes none."""
    try:
        make_folder(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=PART)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        tell_once(f"{VARIABLE}: nothing is kept for the next process: {error}")
        return False
    return True


def make_folder(path: Path) -> None:
    """A folder, and those above it, for this user alone, whatever is usual here."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def used(form: Path) -> None:
    """Note that a form was used now."""
    with contextlib.suppress(OSError):
        os.utime(form)


def drop(form: Path) -> None:
    """Remove a form, which may be half gone already."""
    shutil.rmtree(form, ignore_errors=True)
    for above in (form.parent, form.parent.parent):
        with contextlib.suppress(OSError):
            above.rmdir()


def trim(root: Path, most_bytes: int) -> None:
    """Remove the forms that were used longest ago, until the rest has `most_bytes` at most."""
    found = sorted(((used, size, form) for form, size, used in entries(root)), reverse=True)
    total = 0
    for _, size, form in found:
        total += size
        if total > most_bytes:
            drop(form)


def entries(root: Path) -> Iterator[tuple[Path, int, float]]:
    """Each form's folder, its bytes, and when it was used last; of what else the folder holds, nothing."""
    for form in root.glob("*/*/*"):
        if not NAMES.fullmatch(str(form.relative_to(root))):
            continue
        with contextlib.suppress(OSError):
            sizes = [file.stat().st_size for file in form.iterdir()]
            yield form, sum(sizes), form.stat().st_mtime


def clear(root: Path) -> int:
    """Remove every form; returns the bytes."""
    found = list(entries(root))
    for form, _, _ in found:
        drop(form)
    return sum(size for _, size, _ in found)


def tell_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        warn(message)
