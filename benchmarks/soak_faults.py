"""The faults of the soak test: an interrupted step and a failing copy, which a cache survives."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

from soak_state import Soak, some_text

from specache_compile.kernels.movement import tier_ops
from specache_compile.runtime.step import Step


class Interruption(KeyboardInterrupt):
    """The Ctrl-C that an operation raises inside a step."""


class CopyError(MemoryError):
    """The error of a copy."""


PLACES = ((Step, "run_graph"), (tier_ops, "put"), (tier_ops, "pairs_at"))


@contextlib.contextmanager
def interruption(draw: random.Random) -> Iterator[None]:
    """Ctrl-C or an error just before or just after one of the first runs of a graph or copies."""
    owner, name = draw.choice(PLACES)
    error = draw.choice((Interruption, CopyError))
    original, calls, early = getattr(owner, name), draw.randrange(2), draw.random() < 0.5
    countdown = iter([False] * calls + [True])

    def interrupted(*arguments: Any) -> Any:
        now = next(countdown, False)
        if now and early:
            raise error
        result = original(*arguments)
        if now:
            raise error
        return result

    with mock.patch.object(owner, name, interrupted):
        yield


def interrupted_step(soak: Soak, draw: random.Random) -> int:
    """A step that Ctrl-C or an error may end half way, then the same step again, then one more."""
    pair = soak.pick(draw)
    ids = some_text(draw, len(pair.text), draw.choice((1, 1, draw.randint(2, 70))))
    try:
        with interruption(draw):
            return soak.step(pair, ids)
    except (Interruption, CopyError):
        soak.facts["steps interrupted"] += 1
    return soak.step(pair, ids) + soak.step(pair, ids[:, :1])
