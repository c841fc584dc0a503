"""What a method puts at a site: one op for each phase's attention, and the ops that keep the new pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call of an op at a site.

    op: the op's name.
    state: names of the state tensors that the op takes.
    settings: the op's arguments behind them.
    scores: an attention's op returns (out, selection scores), and not out alone.
    turned: name of a state tensor [B, H, n, ...]; where this is not empty, the op's last argument is RoPE's frequencies
        [h], None where none were found.

    At an attention: op(q, k, v, mask, sinks, cursor, *state, *settings, scale, softcap). A mask of one row is padding,
    beside which the op is causal by itself. As a store: op(k, v, padding, cursor, *state, *settings).
    """

    op: str
    state: tuple[str, ...]
    settings: tuple[Any, ...] = ()
    scores: bool = False
    turned: str = ""


@dataclass(frozen=True)
class Selector:
    """Which pairs the next step's slots are to hold: op(scores, *state, *settings), which writes `wanted`.

    op: the op's name.
    state: names of the state tensors that the op takes, `wanted` int32 [B, H, k] among them: tokens, -1 for none.
    settings: the op's arguments behind them.
    corrects: a step chooses again, by its own token, before it attends.

    scores float32 [B, H, C]: what the last lane's attention gave each token; below 0: no candidate.
    """

    op: str
    state: tuple[str, ...] = ("wanted",)
    settings: tuple[Any, ...] = ()
    corrects: bool = False


@dataclass(frozen=True)
class Recipe:
    """A method at one site.

    attend: the attention of each phase, by the phase's name. A phase that is not there stays as Hugging Face wrote it:
        exact, over the new pairs alone, which is what a prefill's attention is.
    stores: what keeps the new pairs.
    selector: None: nothing is fetched.
    """

    attend: Mapping[str, Call]
    stores: tuple[Call, ...]
    selector: Selector | None = None


# The recipe of a site, by its number.
RecipeOf = Callable[[int], Recipe]
