"""The faults of the soak test: an interrupted step, which a cache survives, and a failing copy, which ends it."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from soak_state import Difference, Soak, settle, some_text

import specache_compile as sc
from specache_compile.kernels.movement.copy_queue import CopyQueue
from specache_compile.runtime.step import Step


class Interruption(KeyboardInterrupt):
    """The Ctrl-C that an operation raises inside a step."""


PLACES = (
    (Step, "run_graph"), (CopyQueue, "submit_offload"), (CopyQueue, "submit_prefetch"), (CopyQueue, "wait_for"),
)  # fmt: skip


@contextlib.contextmanager
def interruption(draw: random.Random) -> Iterator[None]:
    """Ctrl-C just before or just after one of the first runs of a graph, submissions of copies or waits for one."""
    owner, name = draw.choice(PLACES)
    original, calls, early = getattr(owner, name), draw.randrange(2), draw.random() < 0.5
    countdown = iter([False] * calls + [True])

    def interrupted(*arguments: Any) -> Any:
        now = next(countdown, False)
        if now and early:
            raise Interruption
        result = original(*arguments)
        if now:
            raise Interruption
        return result

    with mock.patch.object(owner, name, interrupted):
        yield


def interrupted_step(soak: Soak, draw: random.Random) -> int:
    """A step that Ctrl-C may end half way, then the same step again, then one more."""
    pair = soak.pick(draw)
    ids = some_text(draw, len(pair.text), draw.choice((1, 1, draw.randint(2, 70))))
    try:
        with interruption(draw):
            return soak.step(pair, ids)
    except Interruption:
        soak.facts["steps interrupted"] += 1
    return soak.step(pair, ids) + soak.step(pair, ids[:, :1])


def refuses(use: Callable[[], object]) -> bool:
    """Whether it raises what a cache of which a copy has failed must raise; another error is none of it."""
    try:
        use()
    except sc.SpecacheError as error:
        if "a copy between the host tier and the device failed" not in str(error):
            raise
        return True
    return False


def failing_copy(soak: Soak, draw: random.Random) -> int:
    """A copy of one cache fails. Refused and dropped, its session dies."""
    fail_and_drop(soak, draw)
    soak.check_dropped()
    return 0


def fail_and_drop(soak: Soak, draw: random.Random) -> None:
    """One of the next copies fails: steps are right until the cache is refused, and refused it stays."""
    pair = soak.pick(draw)
    soak.step(pair, some_text(draw, len(pair.text), 8))
    one, turned = some_text(draw, len(pair.text), 1), torch.arange(len(pair.text)).flip(0)
    uses: dict[str, Callable[[], object]] = {
        "a step": lambda: soak.step(pair, one),
        "a crop and a step": lambda: (pair.ours.crop(-1), soak.step(pair, one)),
        "a reorder and a step": lambda: (pair.ours.reorder_cache(turned), soak.step(pair, one)),
        "copy.deepcopy": lambda: copy.deepcopy(pair.ours),
        "materialize": lambda: sc.materialize(pair.ours),
    }
    settle()
    soak.weather.failing = draw.randint(1, 4)
    for _ in range(3):
        refuses(uses["a step"])
        settle()
        if soak.weather.failing <= 0 and pair.session is not None:
            soak.facts["copies failed"] += 1
            for name in draw.choices(list(uses), k=3):
                if not refuses(uses[name]):
                    raise Difference(f"a copy of this cache has failed, and {name} was not refused")
            break
    soak.weather.failing = 0
    soak.remove(pair)
