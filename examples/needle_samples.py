"""The pass-key task in bytes: one needle in a haystack of Python source, asked for at the end.

Token id = byte value. The haystack is the running interpreter's standard library; a tenth of its files is held out of
training and is all that evaluation sees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from specache_compile.evaluation.tasks.needle import ask


@dataclass(frozen=True)
class Sample:
    """One question: `prompt` and the `answer` it wants, both as token ids (bytes)."""

    prompt: bytes
    answer: bytes


def sample(source: bytes, length: int, depth: float, rng: random.Random) -> Sample:
    """A prompt of exactly `length` tokens whose needle stands at `depth` (0 = first, 1 = right before the question)."""
    one = ask(source, length, depth, rng, str.encode)
    return Sample(bytes(one.prompt), one.answer.encode())
