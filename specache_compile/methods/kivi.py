"""KIVI (arXiv 2402.02750): old tokens in the low-bit tier, the newest and the first in 16 bits; no pair is fetched.

A host tier keeps extends and crops exact; with `host_tier=False` there is none, as in KIVI itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from specache_compile.kernels.state.layout import StoredTiers
from specache_compile.options import choice, number_or_word, option, whole
from specache_compile.passes.recipe import OpCall, Recipe, named

from .host_tier import HOST
from .low_bit import LowBitOptions
from .low_bit_tier import STORED
from .method import Method
from .slots import SLOT_INDEX, SLOTS


@dataclass(frozen=True)
class KiviOptions(LowBitOptions):
    """Options of KIVI, which all methods with a low-bit tier take."""

    method: str = "kivi"
    host_tier: bool = choice(
        True, (True, False),
        "also keep all pairs in host memory, for fetches, further turns, crops and drafts. False (specache: with "
        "top_k=0): a cache grows only token by token, as in KIVI",
    )  # fmt: skip
    host_bits: int | str = choice(
        16, (16, 8, "auto"),
        "bits of the pairs in host memory: 16, or 8 with a scale for each key and value, which halves the memory and "
        "the copied bytes. auto: 8 in the setting best",
        type=number_or_word,
    )  # fmt: skip
    skip_below: float = option(
        0.0, lambda weight: type(weight) in (int, float) and 0 <= weight <= 0.01,
        "accepted is a number from 0 to 0.01, such as 1e-4",
        "skip the low-bit values of 64 tokens whose attention weights are all below this number. The "
        "weights left out sum to less than this number times the tokens. 0: skip nothing",
        type=float, metavar="WEIGHT",
    )  # fmt: skip
    min_context: int | str = whole(
        "auto", 0,
        "tokens below which a cache stays in 16 bits on the device; a longer one is compressed. auto: the "
        "computed break-even of the GPU; 0 without one", words=("auto",), unit="a number of tokens",
        metavar="N",
    )  # fmt: skip

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        drafting = f"verify={self.verify!r}"
        if self.bits_on_host < 16 and self.drafts:
            yield f"host_bits={self.host_bits} with {drafting}: verification needs exact pairs. Pass host_bits=16"
        if self.bits_on_host < 16 and not self.layout.is_quantised:
            yield f"host_bits={self.host_bits} with bits=16: pairs must be exact. Pass host_bits=16"
        if self.host_bits == 8 and not self.host_tier:
            yield "host_bits=8 with host_tier=False: there is no host tier. Leave one of them out"
        if self.drafts and not self.host_tier:
            yield (
                f"host_tier=False with {drafting}: verifying and dropping drafts needs the host tier. Pass only one of "
                "them"
            )

    @property
    def bits_on_host(self) -> int:
        """host_bits; "auto" is 16, since this method fetches nothing."""
        return 16 if self.host_bits == "auto" else int(self.host_bits)

    @property
    def in_16_bits(self) -> Self:
        """The options below `min_context`: all pairs on the device in 16 bits. Drafts would be the exact tokens."""
        return replace(self, bits=16, value_bits=None, host_bits=16, verify=None)


def recipe(options: KiviOptions, site: int) -> Recipe:
    """A decode attends over the tiers, an extend over the host tier."""
    over_tiers = OpCall(
        "decode_attention",
        named(*StoredTiers._fields, "slots", "slot_index"),
        {"layout": [*map(int, options.layout)], "skip_below": float(options.skip_below)},
        scores=True,
    )
    attend = dict.fromkeys(("pre-decode", "decode"), over_tiers)
    stored = {**options.layout._asdict(), "zero_point": options.zero_point}
    stores: tuple[OpCall, ...] = (OpCall("append", named(*StoredTiers._fields), stored, turned="center"),)
    if options.host_tier:
        attend |= {"extend": OpCall("extend_attention", named("host"))}
        stores += (OpCall("offload", named("host")),)
    return Recipe(attend, stores)


# The attention's slots have no place here (top_k 0).
FIELDS = (HOST, *STORED, SLOTS, SLOT_INDEX)
METHOD = Method("kivi", KiviOptions, FIELDS, recipe, rows_differ=True)
