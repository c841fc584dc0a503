"""SpeCache (arXiv 2503.16163): a low-bit copy on the device, and the k pairs that the next step wants, fetched one
step ahead."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specache_compile.errors import OptionError
from specache_compile.options import choice, inherited, whole
from specache_compile.passes.recipe import OpCall, Recipe, Selector

from .field import Field, LayerShape
from .host_tier import HOST
from .low_bit import APPENDED, LOW_BIT, RECENT, LowBitOptions, bits_or_memory
from .method import Method
from .slots import CORRECTED, FETCHED, SELECTED, SLOT_INDEX, SLOTS, TALLY

# On a real checkpoint 1.5 bits, rotated and corrected, are closer to the full cache than the paper's 2 bits by far
# (docs/evaluation.md).
PAPER = {
    "bits": 2, "rotate": False, "center": "never", "correct": "never", "sink_tokens": 0, "zero_point": "midpoint",
    "key_code": "levels", "value_code": "levels", "param_bits": 16,
}  # fmt: skip


@dataclass(frozen=True)
class SpecacheOptions(LowBitOptions):
    """What `torch.compile(..., options={...})` takes where no method is named; the defaults are "best"."""

    method: str = "specache"
    setting: str = choice(
        "best",
        ("best", "paper"),
        "defaults of bits, rotate, center, sink_tokens, zero_point, key_code, value_code, param_bits and correct: "
        "best, or as in SpeCache's paper",
    )
    bits: int | float = inherited(LowBitOptions, "bits", default=1.5)
    rotate: bool = inherited(LowBitOptions, "rotate", default=True)
    center: str = inherited(LowBitOptions, "center", default="auto")
    sink_tokens: int = inherited(LowBitOptions, "sink_tokens", default=4)
    zero_point: str = inherited(LowBitOptions, "zero_point", default="middles")
    key_code: str = inherited(LowBitOptions, "key_code", default="auto")
    value_code: str = inherited(LowBitOptions, "value_code", default="auto")
    param_bits: int | str = inherited(LowBitOptions, "param_bits", default="auto")
    host_bits: int | str = inherited(LowBitOptions, "host_bits", default="auto")
    top_k: int = whole(64, 0, "k: pairs fetched a layer and KV head; 0 is plain KIVI", metavar="K")
    speculate: bool | str = choice(
        "auto", (True, False, "auto"),
        "run the speculative token beside the output token; off: the output token chooses. auto: where it does not "
        "choose within the step (correct)",
        type=None, choices=None, action=argparse.BooleanOptionalAction,
    )  # fmt: skip
    correct: str = choice(
        "always",
        ("never", "always"),
        "fetch within the step what the token itself asks for and the slots lack",
    )
    hit_rate: bool = choice(False, (True, False), "also measure the hit rate (slow: it computes the true attention)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookup:
            self.check_lookup()
        if self.top_k and not self.host_tier:
            raise OptionError(
                f"option host_tier=False with top_k={self.top_k}: pairs are fetched from host memory; top_k=0"
            )
        if self.correct != "never" and not self.top_k:
            raise OptionError(
                f"option correct={self.correct!r} with top_k=0: where no pair is fetched, none is corrected"
            )

    @property
    def bits_on_host(self) -> int:
        """host_bits; "auto" is 8 where pairs are fetched to come close, and nothing is asked to be exact."""
        close = self.setting == "best" and self.top_k and self.layout.is_quantised and not self.drafts
        return 8 if self.host_bits == "auto" and close else super().bits_on_host

    @property
    def two_lanes(self) -> bool:
        """Whether the speculative token runs beside the output token."""
        return self.correct != "always" if self.speculate == "auto" else bool(self.speculate)

    def check_lookup(self) -> None:
        """The tokens of a widened decode choose their pairs together, and in its course; no other token is guessed."""
        together = {"speculate": (False,), "correct": ("always",)}
        accepted = together if self.top_k else {"speculate": (False,)}
        for name, (value,) in accepted.items():
            if (self.two_lanes if name == "speculate" else getattr(self, name)) != value:
                raise OptionError(
                    f"option lookup with {name}={getattr(self, name)!r}: a draft's tokens choose their pairs "
                    f"themselves, together; take {name}={value!r}"
                )
        if self.top_k and "correct" in self.disable_passes:
            raise OptionError(
                "option disable_passes with lookup: the pass 'correct' chooses a draft's pairs; take 'correct' "
                "out of it, or top_k=0"
            )

    @property
    def in_16_bits(self) -> SpecacheOptions:
        """Nothing is fetched, nothing guessed for it, and nothing to verify but what was looked up."""
        return replace(
            self, bits=16, value_bits=None, host_bits=16, top_k=0, speculate=False, correct="never", verify=None,
        )  # fmt: skip


def recipe(options: LowBitOptions, site: int) -> Recipe:
    """Decode attends over the tiers, an extend over the host's; the `prefetch` and `speculate` passes do the rest."""
    low_bit = tuple(field.name for field in LOW_BIT)
    over_tiers = OpCall(
        "decode_attention",
        (*low_bit, "recent", "slots", "slot_index"),
        tuple(options.layout),
        scores=True,
    )
    attend = dict.fromkeys(("pre-decode", "decode", "widened"), over_tiers)
    stores: tuple[OpCall, ...] = (OpCall("append", APPENDED, (*options.layout, options.zero_point), turned="center"),)
    if options.host_tier:
        attend |= {"extend": OpCall("extend_attention", ("host",))}
        stores += (OpCall("offload", ("host",)),)
    return Recipe(attend, stores, selector_of(options))


def selector_of(options: LowBitOptions) -> Selector | None:
    """None where no pair is fetched."""
    if not (isinstance(options, SpecacheOptions) and options.top_k):
        return None
    return Selector("select_topk", corrects=options.correct == "always")


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the setting that was given.

    Where no pair is fetched, none is corrected. Under lookup every token is corrected, and none is
    guessed.
    """
    found = bits_or_memory(given) | (PAPER if given.get("setting") == "paper" else {})
    if given.get("lookup"):
        found |= {"speculate": False, "correct": "always"}
    return {**found, "correct": "never"} if given.get("top_k") == 0 else found


FIELDS = (HOST, *LOW_BIT, RECENT, SLOTS, SLOT_INDEX, SELECTED, FETCHED, CORRECTED, TALLY)


def fields_at(options: LowBitOptions, layer: LayerShape) -> tuple[Field, ...]:
    return FIELDS if options.host_tier else tuple(field for field in FIELDS if field is not HOST)


METHOD = Method("specache", SpecacheOptions, FIELDS, recipe, fields_at, defaults, rows_differ=True)
