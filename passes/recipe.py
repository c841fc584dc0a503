"""A method's recipe for a site: one attention op per phase, and the ops that store the new pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OpCall:
    """One call of an op at a site.

    op: name of the op.
    state: names of the state tensors that the op takes.
    settings: the arguments after the state tensors.
    scores: an attention op returns (out, selection scores) instead of out.
    turned: name of a state tensor [B, H, n, ...]. If that tensor is not empty, the op's last argument is RoPE's
        frequencies [h], or None if none were found.

    An attention is op(q, k, v, mask, sinks, cursor, *state, *settings, scale, softcap); a mask of one row is padding,
    to which the op adds causality. A store is op(k, v, padding, cursor, *state, *settings).
    """

    op: str
    state: tuple[str, ...]
    settings: tuple[Any, ...] = ()
    scores: bool = False
    turned: str = ""


@dataclass(frozen=True)
class Selector:
    """Selects the pairs for the next step's slots: op(scores, *state, *settings) writes `selected`.

    op: name of the op.
    state: names of the state tensors that the op takes. One is `selected` int32 [B, H, k]: tokens, or -1 for none.
    settings: the arguments after the state tensors.
    corrects: each step selects again, by its own token, before its attention.

    scores float32 [B, H, C]: the last lane's attention weight of each token; below 0 for tokens that are no candidates.
    """

    op: str
    state: tuple[str, ...] = ("selected",)
    settings: tuple[Any, ...] = ()
    corrects: bool = False


@dataclass(frozen=True)
class Recipe:
    """A method at one site.

    attend: name of a phase → its attention. A missing phase keeps Hugging Face's exact attention over the new pairs
        alone, as in a prefill.
    stores: the calls that store the new pairs.
    selector: None for a method that fetches nothing.
    """

    attend: Mapping[str, OpCall]
    stores: tuple[OpCall, ...]
    selector: Selector | None = None


# A function from a site's number to its recipe.
RecipeOf = Callable[[int], Recipe]
