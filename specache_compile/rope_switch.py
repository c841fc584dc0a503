"""RoPE whose frequencies depend on the longest row of a call: longrope (Phi-3) and dynamic NTK."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specache_compile.errors import SpecacheError


@dataclass(frozen=True)
class RopeSwitch:
    """The length at which a call's frequencies change.

    kind: transformers' rope_type.
    tokens: the longest row, in tokens, of a call with the first frequencies.
    grows: above it, each length has its own frequencies (dynamic NTK).
    """

    kind: str
    tokens: int
    grows: bool

    def misfit(self, lengths: Sequence[int]) -> bool:
        """Whether rows of these lengths would have other frequencies in one call than each row alone."""
        beyond = [length > self.tokens for length in lengths]
        return len(beyond) > 1 and any(beyond) and (self.grows or not all(beyond))

    def longest_from(self, prompt: int) -> float:
        """Most tokens of a row that begins with so many, if its frequencies may not change."""
        return math.inf if prompt > self.tokens and not self.grows else self.tokens

    def reason(self) -> str:
        return (
            f"the model's RoPE ({self.kind}) depends on the longest row of a call, and some rows are longer than "
            f"{self.tokens:,} tokens"
        )


def rope_switch(config: Any) -> RopeSwitch | None:
    """The switch of a model with this config; None if its frequencies are constant."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    given = getattr(text, "rope_parameters", None) or {}
    layers = [value for value in given.values() if isinstance(value, Mapping)]
    switches = [switch for each in layers or [given] if (switch := switch_of(each, text)) is not None]
    if not switches:
        return None
    first = min(switches, key=lambda switch: switch.tokens)
    return replace(first, grows=any(switch.grows for switch in switches))


def switch_of(parameters: Mapping[str, Any], config: Any) -> RopeSwitch | None:
    kind = str(parameters.get("rope_type", "default"))
    if "dynamic" in kind:
        return RopeSwitch(kind, config.max_position_embeddings, grows=True)
    if kind == "longrope":
        original = parameters.get("original_max_position_embeddings")
        return RopeSwitch(kind, original or config.original_max_position_embeddings, grows=False)
    return None


def rows_apart(switch: RopeSwitch) -> SpecacheError:
    return SpecacheError(
        f"these rows cannot run in one call: {switch.reason()}. Separate them with specache_compile.split(cache)"
    )
