"""What a method puts at a site: one op for each phase's attention, and the ops that keep the new pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """An op by name, the state tensors that it takes, and its settings.

    At an attention: op(q, k, v, mask, sinks, cursor, *state, *settings, scale, softcap) → out, or (out, selection
    scores) where `scores`; a mask of one row is padding, beside which an op is causal by itself. As a store: op(k, v,
    padding, cursor, *state, *settings). Behind them all RoPE's frequencies [h], or None where none were found, if the
    state tensor `turned` [B, H, n, ...] is not empty.
    """

    op: str
    state: tuple[str, ...]
    settings: tuple[Any, ...] = ()
    scores: bool = False
    turned: str = ""


@dataclass(frozen=True)
class Selector:
    """Which pairs the next step's slots are to hold: op(scores, *state, *settings), which writes `wanted`.

    scores float32 [B, H, C]: what the last lane's attention gave each token; below 0: no candidate. wanted int32
    [B, H, k]: tokens, -1 for none. corrects: whether a step chooses again, by its own token, before it
    attends.
    """

    op: str
    state: tuple[str, ...] = ("wanted",)
    settings: tuple[Any, ...] = ()
    corrects: bool = False


@dataclass(frozen=True)
class Recipe:
    """A method at one site. A phase that `attend` does not name stays as Hugging Face wrote it: exact, over the new
    pairs alone, which is what a prefill's attention is. Without a selector nothing is fetched."""

    attend: Mapping[str, Call]
    stores: tuple[Call, ...]
    selector: Selector | None = None


# The recipe of a site, by its number.
RecipeOf = Callable[[int], Recipe]
