"""Text to hide needles in: the running interpreter's library. A tenth of it is held out of all training here."""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

from specache_compile.errors import SpecacheError


def library_source(held_out: bool) -> bytes:
    """All of the standard library's source, or the tenth of its files that training never sees."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}
    files = (path for path in sorted(root.rglob("*.py")) if not skip & set(path.relative_to(root).parts))
    chosen = [p for p in files if (zlib.crc32(p.relative_to(root).as_posix().encode()) % 10 == 0) == held_out]
    return b"\n".join(path.read_bytes() for path in chosen)


def too_short(tokens: int, required: int) -> SpecacheError:
    return SpecacheError(f"the text has {tokens:,} tokens, and {required:,} are required: give more --text")


def hide(
    haystack: Sequence[int], length: int, needles: Sequence[tuple[float, Sequence[int]]], question: Sequence[int],
    rng: random.Random,
) -> list[int]:  # fmt: skip
    """A prompt of exactly `length` tokens: text from a random place of the haystack, and `question`.

    Each needle stands at its depth of the text (0 = first, 1 = right before the question).
    """
    room = length - len(question) - sum(len(needle) for _, needle in needles)
    if room < 0:
        raise SpecacheError(f"this prompt needs at least {length - room} tokens, not {length}: raise --lengths")
    if room >= len(haystack):
        raise too_short(len(haystack), room)
    start = rng.randrange(len(haystack) - room)
    prompt, last = list[int](), start
    for depth, needle in sorted(needles):
        cut = start + round(depth * room)
        prompt += [*haystack[last:cut], *needle]
        last = cut
    return [*prompt, *haystack[last : start + room], *question]
