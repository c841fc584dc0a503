"""RoPE whose frequencies depend on the longest row of a call: longrope (Phi-3) and dynamic NTK."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RopeSwitch:
    """The length at which a call's frequencies change.

    kind: transformers' rope_type.
    tokens: the longest row, in tokens, of a call with the first frequencies; inf if they are constant.
    grows: above it, each length has its own frequencies (dynamic NTK).
    """

    kind: str = "default"
    tokens: float = math.inf
    grows: bool = False

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


def rope_switch(config: Any) -> RopeSwitch:
    """The switch of a model with this config."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    given = getattr(text, "rope_parameters", None) or {}
    layers = [value for value in given.values() if isinstance(value, Mapping)]
    switches = [switch_of(each, text) for each in layers or [given]]
    first = min(switches, key=lambda switch: switch.tokens)
    return replace(first, grows=any(switch.grows for switch in switches))


def switch_of(parameters: Mapping[str, Any], config: Any) -> RopeSwitch:
    kind = str(parameters.get("rope_type", "default"))
    if "dynamic" in kind:
        return RopeSwitch(kind, config.max_position_embeddings, grows=True)
    if kind == "longrope":
        original = parameters.get("original_max_position_embeddings")
        return RopeSwitch(kind, original or config.original_max_position_embeddings)
    return RopeSwitch()
