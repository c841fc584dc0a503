"""The pass-key task: one needle in a haystack of Python source, asked for at the end.

Token id = byte value, so no tokenizer is needed. The haystack is the running interpreter's standard
library; a tenth of its files is held out of training and is all that evaluation sees.
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

NEEDLE = "\nThe pass key is {key}. Remember it.\n"
QUESTION = "\nWhat is the pass key? The pass key is "
KEY_DIGITS = 5


@dataclass(frozen=True)
class Sample:
    """One question: `prompt` and the `answer` it wants, both as token ids (bytes)."""

    prompt: bytes
    answer: bytes


def library_source(held_out: bool) -> bytes:
    """All of the standard library's source, or the tenth of its files that training never sees."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}
    files = (path for path in sorted(root.rglob("*.py")) if not skip & set(path.relative_to(root).parts))
    chosen = [p for p in files if (zlib.crc32(p.relative_to(root).as_posix().encode()) % 10 == 0) == held_out]
    return b"\n".join(path.read_bytes() for path in chosen)


def random_key(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(KEY_DIGITS))


def sample(source: bytes, length: int, depth: float, rng: random.Random) -> Sample:
    """A prompt of exactly `length` tokens whose needle stands at `depth` (0 = first, 1 = right before the question)."""
    key = random_key(rng)
    needle, question = NEEDLE.format(key=key).encode(), QUESTION.encode()
    room = length - len(needle) - len(question)
    if room < 0:
        raise ValueError(f"a pass-key prompt needs at least {length - room} tokens, not {length}")
    start = rng.randrange(len(source) - room)
    text = source[start : start + room]
    cut = round(depth * room)
    return Sample(text[:cut] + needle + text[cut:] + question, key.encode())
