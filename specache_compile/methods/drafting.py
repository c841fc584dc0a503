"""Drafting: a decode step that approximates is a draft, which an exact pass over the host tier verifies
(arXiv 2404.11912)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specache_compile.errors import OptionError
from specache_compile.kernels.attention.attention_ops import BLOCK
from specache_compile.options import number_or_auto, option

from .host_tier import HostOptions


def check_verify(name: str, value: Any) -> None:
    if value not in (None, "auto") and (type(value) is not int or not 1 <= value <= BLOCK):
        raise OptionError(f"option {name}={value!r}: give a number of tokens, 1 to {BLOCK}, 'auto', or None")


@dataclass(frozen=True)
class DraftOptions(HostOptions):
    """Those of every method whose decode step approximates what its host tier has whole."""

    verify: int | str | None = option(
        None, check_verify,
        "tokens that the decode phase drafts, for one exact pass over the host tier to verify: generate gives the full "
        "cache's tokens. auto: as many as give most tokens a second", type=number_or_auto, metavar="N",
    )  # fmt: skip
