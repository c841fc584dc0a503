"""RoPE whose frequencies follow the longest row of a call: longrope (Phi-3) and dynamic NTK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specache_compile.errors import SpecacheError


@dataclass(frozen=True)
class RopeSwitch:
    """When the frequencies of a call change.

    kind: transformers' rope_type.
    tokens: the longest row, in tokens, of a call with the first frequencies.
    grows: beyond that, each length has its own frequencies (dynamic NTK).
    """

    kind: str
    tokens: int
    grows: bool

    def misfit(self, lengths: Sequence[int]) -> bool:
        """Whether rows that are this long after a call would have frequencies in it that one row alone has not."""
        beyond = [length > self.tokens for length in lengths]
        return len(beyond) > 1 and any(beyond) and (self.grows or not all(beyond))

    def reason(self) -> str:
        return (
            f"the model's RoPE ({self.kind}) takes its frequencies from the longest row of a call, and the rows are on "
            f"two sides of {self.tokens:,} tokens, or beyond them"
        )


def rope_switch(config: Any) -> RopeSwitch | None:
    """The switch of a model with this config; None where frequencies are constant."""
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
        f"these rows cannot go on together: {switch.reason()}. Part them by specache_compile.split(cache)"
    )
