"""Drafting: a decode step that approximates is a draft, which an exact pass over the host tier verifies
(arXiv 2404.11912); or what the text itself says is, and the tiers verify it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specache_compile.errors import OptionError
from specache_compile.kernels.attention import BLOCK
from specache_compile.options import number_or_auto, option

from .host_tier import HostOptions

# Of the option verify: drafts are looked up in the text so far, and one widened decode over the tiers verifies them.
TIERS = "tiers"


def check_verify(name: str, value: Any) -> None:
    if value not in (None, "auto", TIERS) and (type(value) is not int or not 1 <= value <= BLOCK):
        raise OptionError(f"option {name}={value!r}: give a number of tokens, 1 to {BLOCK}, 'auto', 'tiers', or None")


@dataclass(frozen=True)
class DraftOptions(HostOptions):
    """Those of every method whose decode step approximates what its host tier has whole."""

    verify: int | str | None = option(
        None, check_verify,
        "tokens that the decode phase drafts, for one exact pass over the host tier to verify: generate gives the full "
        "cache's tokens. auto: as many as give most tokens a second. tiers, not exact: drafts are looked up in the "
        "text so far, and one decode of several tokens verifies them", type=number_or_auto, metavar="N",
    )  # fmt: skip
