"""The pass-key task in bytes: a key in Python source, and a question at the end.

A token id is a byte value. The source is the interpreter's standard library. A tenth of its files is excluded from
training and used for evaluation only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from specache_compile.evaluation.tasks.needle import key_question


@dataclass(frozen=True)
class Sample:
    """A question (`prompt`) and its `answer`, both as token ids (bytes)."""

    prompt: bytes
    answer: bytes


def sample(source: bytes, length: int, depth: float, rng: random.Random) -> Sample:
    """A prompt of exactly `length` tokens whose needle stands at `depth` (0 = first, 1 = right before the question)."""
    one = key_question(source, length, depth, rng, str.encode)
    return Sample(bytes(one.prompt), one.answer.encode())
