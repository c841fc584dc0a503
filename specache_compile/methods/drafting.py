"""Options of drafting: an approximate decode step is a draft, which an exact pass over the host tier verifies (arXiv
2404.11912)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specache_compile.errors import OptionError
from specache_compile.kernels.attention.attention_ops import BLOCK
from specache_compile.options import number_or_auto, option

from .host_tier import HostOptions


def check_verify(name: str, value: Any) -> None:
    if value not in (None, "auto") and (type(value) is not int or not 1 <= value <= BLOCK):
        raise OptionError(f"option {name}={value!r}: accepted are 1 to {BLOCK} tokens, 'auto' and None")


@dataclass(frozen=True)
class DraftOptions(HostOptions):
    """Options of the methods with an approximate decode step and all pairs in a host tier."""

    verify: int | str | None = option(
        None, check_verify,
        "tokens that the decode phase drafts and one exact pass over the host tier verifies, so that generate returns "
        "the full cache's tokens. auto: the number with the most tokens per second", type=number_or_auto, metavar="N",
    )  # fmt: skip
