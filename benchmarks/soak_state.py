"""The state of benchmarks/soak.py: both models, the live caches and the counters."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from specache_compile.compat import cache_of, with_cache
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.session import Session

VOCABULARY, POOL = 128, 5
TOLERANCE = 1e-3  # of logits


@dataclass(frozen=True)
class Sizes:
    """At most so many rows, tokens of a prompt, tokens of a cache, and tokens of one generation."""

    rows: int = 12
    prompt: int = 300
    longest: int = 600
    new: int = 24


# Where each launch takes milliseconds.
SMALL = Sizes(rows=3, prompt=100, longest=150, new=6)


class Difference(Exception):
    """An answer, an error or a lifetime that is not what it must be."""


@dataclass(eq=False)
class CachePair:
    """One cache twice, ours and Hugging Face's, and the text [B, n] that both hold."""

    ours: DynamicCache
    theirs: DynamicCache
    text: Tensor

    @property
    def session(self) -> Session | None:
        """Ours; None once the model has gone on uncompiled."""
        keys = self.ours.layers[0].keys
        return keys.handle.session if isinstance(keys, HeldTensor) else None

    def crop(self, tokens: int) -> None:
        for cache in (self.ours, self.theirs):
            cache.crop(-tokens)
        self.text = self.text[:, : self.text.shape[1] - tokens]


@dataclass
class Soak:
    """Both models, the caches alive, and what has been counted.

    earlier: the sessions that were there before; they are another's.
    """

    model: LlamaForCausalLM
    twin: LlamaForCausalLM
    assistant: LlamaForCausalLM
    sizes: Sizes = Sizes()
    pool: list[CachePair] = field(default_factory=list)
    dropped: list[weakref.ref[Session]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    earlier: list[weakref.ref[Session]] = field(default_factory=lambda: [weakref.ref(x) for x in live_sessions()])
    now: str = "the start"

    def pick(self, draw: random.Random) -> CachePair:
        """A cache of the pool; a new one where there is none. One that has grown long is cropped."""
        if not self.pool:
            self.start(draw)
        pair = draw.choice(self.pool)
        if pair.text.shape[1] > self.sizes.longest:
            pair.crop(draw.randrange(self.sizes.longest // 2, self.sizes.longest))
        return pair

    def start(self, draw: random.Random) -> int:
        ids = a_prompt(self, draw, 4)
        ours, theirs = self.twin(ids, use_cache=True), self.model(ids, use_cache=True)
        self.add(CachePair(cache_of(ours), cache_of(theirs), ids), draw)
        return compare_logits(ours.logits, theirs.logits)

    def step(self, pair: CachePair, ids: Tensor) -> int:
        """One step of both models on the tokens `ids`; what ours raises leaves theirs where it was."""
        ours = self.twin(ids, **with_cache(pair.ours), use_cache=True)
        theirs = self.model(ids, **with_cache(pair.theirs), use_cache=True)
        pair.text = torch.cat([pair.text, ids], 1)
        self.facts["calls that ended uncompiled"] += pair.session is None
        return compare_logits(ours.logits, theirs.logits)

    def add(self, pair: CachePair, draw: random.Random) -> None:
        if len(self.pool) == POOL:
            self.remove(draw.choice(self.pool))
        self.pool.append(pair)

    def remove(self, pair: CachePair) -> None:
        self.pool.remove(pair)
        self.note_dropped(pair.ours)

    def note_dropped(self, cache: DynamicCache) -> None:
        """Of a cache that nobody here keeps: its session must die."""
        keys = cache.layers[0].keys
        if isinstance(keys, HeldTensor):
            self.dropped.append(weakref.ref(keys.handle.session))

    def alive(self) -> int:
        """Sessions that this soak has made and that live."""
        others = {id(session) for held in self.earlier if (session := held()) is not None}
        return sum(id(session) not in others for session in live_sessions())

    def check_dropped(self) -> None:
        collect()
        alive = sum(session() is not None for session in self.dropped)
        if alive:
            raise Difference(f"{alive} of the {len(self.dropped)} sessions dropped last are still alive")
        self.dropped.clear()


def live_sessions() -> list[Session]:
    """All of this process."""
    collect()
    return [thing for thing in gc.get_objects() if type(thing) is Session]


def collect() -> None:
    """What no copy that is under way holds any more goes."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
    gc.collect()


def some_text(draw: random.Random, batch: int, length: int) -> Tensor:
    """Any tokens but the padding, on the default device."""
    generator = torch.Generator("cpu").manual_seed(draw.getrandbits(32))
    text = torch.randint(1, VOCABULARY, (batch, length), generator=generator, device="cpu")
    return text.to(torch.get_default_device())


def a_prompt(soak: Soak, draw: random.Random, largest: int | None = None) -> Tensor:
    """At most `largest` rows, and no more than the soak's sizes allow."""
    rows = min(soak.sizes.rows, largest or soak.sizes.rows)
    return some_text(draw, draw.randint(1, rows), draw.randint(1, soak.sizes.prompt))


def compare_logits(ours: Tensor, theirs: Tensor) -> int:
    worst = (ours - theirs).abs().max().item()
    if ours.shape != theirs.shape or not worst <= TOLERANCE:
        raise Difference(f"logits {list(ours.shape)} and {list(theirs.shape)} differ by {worst:.3g} (> {TOLERANCE})")
    return ours.shape[0] * ours.shape[1]
