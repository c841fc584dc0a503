"""The options of the backend, checked as they arrive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from .errors import OptionError
from .methods import METHODS

BITS = (1, 2, 4, 8, 16)
GROUP_SIZES = (32, 64, 128)
ZERO_POINTS = ("midpoint", "minimum")
# Whole numbers, and the least that each may be. R is at least one: a token is selected for fetching while it is in the
# window, where the newest is not yet.
LEAST = {"residual_length": 1, "top_k": 0, "eviction_block": 1, "seed": 0, "top_n": 1, "kept_layers": 0}
LOWERINGS = ("inductor", "eager")


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options={...})` accepts; the defaults are the paper's. Which of them mean something
    depends on the method: `parse_options` refuses the others.

    method: a name from `methods.METHODS`.
    bits: of the low-bit tier; 16 keeps it unquantised. group_size: g, tokens (keys) or channels (values) that share
    a scale. residual_length: R, newest tokens kept in 16 bits. top_k: k, pairs fetched for each layer and KV head;
    0 is plain KIVI. speculate: run the speculative token beside the output token; False lets the output token
    choose. zero_point: at 1 bit, the paper's "midpoint" or KIVI's "minimum". lowering: "inductor", or "eager" to run
    the rewritten graph as it is. hit_rate: also measure the hit rate (slow: it computes the true attention).
    disable_passes: names of passes to leave out. exact_layers: attentions, counted from 0 in the model's order, that
    stay as Hugging Face wrote them. host_memory: bytes that a cache's host tier may have; None: half of what is free.
    min_context: tokens below which a cache stays in 16 bits on the device, unfetched; it moves over when it has grown
    to them. "auto": the measured break-even of a GPU, 0 where there is none. mode: one of torch.compile's, which takes
    no `mode=` beside `options=`. inductor: config patches handed to Inductor.
    budget (eviction): pairs that each KV head keeps, or as a rate between 0 and 1 of the prompt's tokens.
    eviction_block: tokens encoded before as many pairs go, where a prompt is past the budget. seed: of `random`.
    top_n (kcache): values that each query head fetches in a step. kept_layers: first layers whose values stay.
    """

    method: str = "specache"
    bits: int = 2
    group_size: int = 64
    residual_length: int = 64
    top_k: int = 64
    speculate: bool = True
    zero_point: str = "midpoint"
    lowering: str = "inductor"
    hit_rate: bool = False
    disable_passes: tuple[str, ...] = ()
    exact_layers: tuple[int, ...] = ()
    host_memory: int | None = None
    min_context: int | str = "auto"
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    budget: int | float = 0.25
    eviction_block: int = 1
    seed: int = 0
    top_n: int = 128
    kept_layers: int = 1

    def __post_init__(self) -> None:
        one_of("method", self.method, tuple(METHODS))
        for name, value in METHODS[self.method].defaults.items():
            if name not in METHODS[self.method].takes:
                object.__setattr__(self, name, value)
        one_of("bits", self.bits, BITS)
        one_of("group_size", self.group_size, GROUP_SIZES)
        one_of("zero_point", self.zero_point, ZERO_POINTS)
        one_of("lowering", self.lowering, LOWERINGS)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"option {name}={value!r}: give a whole number, {least} or more")
        pairs, rate = type(self.budget) is int and self.budget >= 1, type(self.budget) is float and 0 < self.budget <= 1
        if not (pairs or rate):
            raise OptionError(
                f"option budget={self.budget!r}: give a number of pairs, or a rate above 0.0, at most 1.0"
            )
        if self.host_memory is not None and (type(self.host_memory) is not int or self.host_memory < 0):
            raise OptionError(f"option host_memory={self.host_memory!r}: give a number of bytes, or None")
        if self.min_context != "auto" and (type(self.min_context) is not int or self.min_context < 0):
            raise OptionError(f"option min_context={self.min_context!r}: give a number of tokens, 0 or more, or 'auto'")
        for name in ("speculate", "hit_rate"):
            one_of(name, getattr(self, name), (True, False))
        one_of("mode", self.mode, (None, *torch._inductor.list_mode_options()))
        if isinstance(self.disable_passes, str):
            raise OptionError(f"option disable_passes={self.disable_passes!r}: give a list of pass names")
        object.__setattr__(self, "disable_passes", tuple(self.disable_passes))
        if isinstance(self.exact_layers, (str, int)) or not all(type(n) is int and n >= 0 for n in self.exact_layers):
            raise OptionError(f"option exact_layers={self.exact_layers!r}: give a list of layer numbers from 0")
        object.__setattr__(self, "exact_layers", tuple(self.exact_layers))

    @property
    def window(self) -> int:
        """W = R + g: the most tokens that the recent tier holds."""
        return self.residual_length + self.group_size

    @property
    def in_16_bits(self) -> Options:
        """What holds below `min_context`: every pair on the device in 16 bits, none fetched, one lane."""
        return replace(self, bits=16, top_k=0, speculate=False)

    def budget_in_tokens(self, tokens: int) -> int:
        """Pairs that each KV head keeps of a prompt of `tokens`; a rate rounds up."""
        if isinstance(self.budget, int):
            return self.budget
        return max(1, math.ceil(round(self.budget * tokens, 6)))  # 0.07 of 100 is 7.000000000000001 by itself

    def for_prompt(self, tokens: int) -> Options:
        """These options with a budget that is a rate fixed to pairs: a cache keeps the budget that it started with.

        A method without a budget has the same options, and so the same graphs, for every prompt.
        """
        if isinstance(self.budget, int) or "budget" not in METHODS[self.method].takes:
            return self
        return replace(self, budget=self.budget_in_tokens(tokens))

    def low_bit_length(self, length: int) -> int:
        """Of `length` cached tokens, how many are in the low-bit tier: whole groups, all but the newest R..R+g-1."""
        return self.group_size * max(0, (length - self.residual_length) // self.group_size)


def one_of(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if not any(value is option or (type(value) is type(option) and value == option) for option in accepted):
        raise OptionError(f"option {name}={value!r}: accepted are {', '.join(map(repr, accepted))}")


def parse_options(given: Mapping[str, Any] | None) -> Options:
    """The options that a user passed, with the bad name or value and the accepted ones in the error."""
    given = dict(given or {})
    known = [f.name for f in fields(Options)]
    one_of("method", given.get("method", "specache"), tuple(METHODS))
    method = METHODS[given.get("method", "specache")]
    for name in given:
        if name not in known:
            raise OptionError(f"unknown option {name!r}: accepted are {', '.join(known)}")
        if name not in method.accepted:
            raise OptionError(f"option {name}: method {method.name!r} has none; it takes {', '.join(method.accepted)}")
    return Options(**{**method.defaults, **given})
