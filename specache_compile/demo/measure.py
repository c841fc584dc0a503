"""The demo's measurements: each method answers, then the methods' steps are timed in turn.

Every method decodes with `specache bench`'s ways, and the same compiled model answers and is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from specache_compile.bench.measure import WARM_UP, many_graphs, spread, steps_behind, steps_in_turn
from specache_compile.bench.ways import Decoding, twin_of
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER, contains_key
from specache_compile.runtime.records import forget
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import device_total

from .asking import Prompts, answer, asks_of
from .rows import DENSE, FULL, METHODS, TIMED, Row


@dataclass(frozen=True)
class Size:
    """How much is measured.

    depths: of the keys.
    contexts: in tokens; the keys are hidden in the first.
    rounds: of timed steps.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    depths: tuple[float, ...] = (0.1, 0.4, 0.6, 0.9)
    contexts: tuple[int, ...] = (2048, 8000)
    rounds: int = 5

    def turns(self, timed: bool) -> int:
        """Turns of the progress bar: a reading and each asked prompt; where steps are timed, also each round, and each
        reading and method at each further context."""
        asked = 1 + len(self.methods) * (1 + len(self.depths))
        further = (len(self.contexts) - 1) * (1 + len(self.methods))
        return asked + (further + len(self.contexts) * self.rounds if timed else 0)


class Demo:
    """A model under several methods.

    lowering: this backend's; "eager" where nothing can be compiled, and then no step is timed.
    rows: the finished results, by method.
    """

    def __init__(self, model: Any, reader: Reader, size: Size, lowering: str, bar: tqdm) -> None:
        self.model, self.reader, self.size, self.lowering, self.bar = model, reader, size, lowering, bar
        self.names = METHODS if lowering == "eager" else TIMED
        self.twins = {method: twin_of(model, self.names[method], lowering) for method in size.methods}
        self.rows: dict[str, Row] = {}

    def run(self, text: Sequence[int]) -> None:
        """Ask behind the first context, and time steps there and at the others."""
        with torch.no_grad(), many_graphs():
            try:
                self.ask(text)
                for context in self.size.contexts[1:] if self.lowering != "eager" else ():
                    self.time(text, context)
            finally:
                torch._dynamo.reset()
                forget(self.model)

    def ask(self, text: Sequence[int]) -> None:
        """Make a row with answers for each method. Then time each method's steps, behind its answer to the question."""
        context, room = self.size.contexts[0], CHAT_ANSWER + steps_behind(self.size.rounds)
        asks = asks_of(self.reader, text, context - room, self.size.depths)
        self.tell(f"reading {len(asks)} prompts of {context - room:,} tokens")
        prompts = Prompts(self.model, [ask.prompt for ask in asks])
        self.bar.update()
        ways: dict[str, Decoding] = {}
        for method in self.size.methods:
            self.tell(f"{method}: {'asked' if self.lowering == 'eager' else 'compiling'}")
            said = []
            for number in range(len(asks)):
                one = prompts.begun(self.names[method], self.twins[method], number, room)
                said.append(answer(one, self.reader))
                ways.setdefault(method, one)  # the first is the question's
                self.bar.update()
                self.tell(f"{method}: asked")
            keys = [contains_key(words, ask.answer) for words, ask in zip(said[1:], asks[1:], strict=True)]
            self.rows[method] = Row(
                method, said[0], dict(zip(self.size.depths, keys, strict=True)), tiers_of(ways[method]),
                ways[method].bytes()[0] / ways[FULL].bytes()[0],
            )  # fmt: skip
        if self.lowering != "eager":
            self.note(ways, context)

    def time(self, text: Sequence[int], context: int) -> None:
        """Time the steps of all methods behind a text that is read once."""
        room = steps_behind(self.size.rounds)
        self.tell(f"reading {context:,} tokens")
        prompt = Prompts(self.model, [(list(text) * (1 + context // len(text)))[: context - room]])
        self.bar.update()
        ways: dict[str, Decoding] = {}
        for method in self.size.methods:
            self.tell(f"{method}: compiling for {context:,} tokens")
            ways[method] = prompt.begun(self.names[method], self.twins[method], 0, room)
            for _ in range(WARM_UP):
                ways[method].step()
            self.bar.update()
        self.note(ways, context)

    def note(self, ways: dict[str, Decoding], context: int) -> None:
        """Time steps in turn, and put them into the rows."""
        for method, steps in steps_in_turn(ways, self.model.device, self.size.rounds, context, self.bar).items():
            self.rows[method].step_ms[context], self.rows[method].step_ms_half[context] = spread(steps)

    def tell(self, doing: str) -> None:
        self.bar.set_postfix_str(doing)


def tiers_of(one: Decoding) -> dict[str, int]:
    """Bytes of a way's cache by tier. Hugging Face's own layers are one tier."""
    session = session_of(one.cache)
    tiers = {} if session is None else dict(session.statistics.bytes_by_tier)
    plain = one.bytes()[0] - device_total(tiers)
    return {**tiers, DENSE: plain} if plain else tiers
