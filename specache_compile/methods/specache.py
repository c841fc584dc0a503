"""SpeCache (arXiv 2503.16163): a low-bit copy on the device; each step fetches the k pairs that its token selects."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specache_compile.options import choice, inherited, whole
from specache_compile.passes.recipe import OpCall, Recipe, named

from . import kivi
from .kivi import KiviOptions
from .method import Method
from .slots import CORRECTED, FETCHED, SELECTED

# The paper's settings. On a real checkpoint the defaults are much closer to the full cache (docs/evaluation.md).
PAPER: dict[str, Any] = {
    "bits": 2, "top_k": 64, "center": "never", "sink_tokens": 0, "zero_point": "midpoint", "key_code": "levels",
    "value_code": "levels",
}  # fmt: skip


@dataclass(frozen=True)
class SpecacheOptions(KiviOptions):
    """Options of the default method; the defaults are those of the setting "best"."""

    method: str = "specache"
    setting: str = choice(
        "best",
        ("best", "paper"),
        "best, or paper: the defaults of SpeCache's paper, without rotation, 8-bit scales and corrections (copies, "
        "within the step, of selected pairs that are not in the slots)",
    )
    residual_length: int = inherited(KiviOptions, "residual_length", default=64)
    bits: int | float = inherited(KiviOptions, "bits", default=1.5)
    center: str = inherited(KiviOptions, "center", default="auto")
    sink_tokens: int = inherited(KiviOptions, "sink_tokens", default=4)
    zero_point: str = inherited(KiviOptions, "zero_point", default="middles")
    key_code: str = inherited(KiviOptions, "key_code", default="auto")
    value_code: str = inherited(KiviOptions, "value_code", default="auto")
    host_bits: int | str = inherited(KiviOptions, "host_bits", default="auto")
    top_k: int | str = whole(
        "auto", 0,
        "k: pairs to fetch for each layer and KV head; 0: none. auto: 64; with two KV heads 128, with one 256",
        words=("auto",), metavar="K",
    )  # fmt: skip
    speculate: bool | str = choice(
        "auto", (True, False, "auto"),
        "run the speculative token beside the output token, to select the pairs to prefetch. auto: unless the output "
        "token selects them within the step (setting best)",
        type=None, choices=None, action=argparse.BooleanOptionalAction,
    )  # fmt: skip

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.top_k and not self.host_tier:
            yield f"host_tier=False with top_k={self.top_k}: pairs are fetched from the host tier. Pass top_k=0"

    @property
    def rotates(self) -> bool:  # type: ignore[override]
        return self.setting == "best"

    @property
    def corrects(self) -> bool:  # type: ignore[override]
        """Whether a step also fetches the selected pairs that are not in the slots."""
        return self.setting == "best" and bool(self.top_k)

    @property
    def bits_on_host(self) -> int:
        """host_bits; "auto" is 8 in the setting "best" if pairs are fetched and nothing must be exact."""
        close = self.setting == "best" and self.top_k and self.layout.is_quantised and not self.drafts
        return 8 if self.host_bits == "auto" and close else super().bits_on_host

    @property
    def two_lanes(self) -> bool:
        """Whether the speculative token runs beside the output token."""
        return not self.corrects if self.speculate == "auto" else bool(self.speculate)

    @property
    def in_16_bits(self) -> SpecacheOptions:
        """Without fetches, speculative token and verification."""
        return replace(super().in_16_bits, top_k=0, speculate=False)


def recipe(options: SpecacheOptions, site: int) -> Recipe:
    """KIVI's, and a selector unless no pair is fetched. The passes `prefetch`, `correct` and `speculate` follow it."""
    selector = OpCall("select_topk", named("selected")) if options.top_k else None
    return replace(kivi.recipe(options, site), selector=selector, corrects=options.corrects)


def defaults(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults of the given setting."""
    return PAPER if given.get("setting") == "paper" else {}


FIELDS = (*kivi.FIELDS, SELECTED, FETCHED, CORRECTED)
METHOD = Method("specache", SpecacheOptions, FIELDS, recipe, defaults, rows_differ=True)
