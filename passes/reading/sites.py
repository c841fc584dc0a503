"""What a captured graph holds: its attentions, and those that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch.fx import Node

from .latents import Latents
from .nodes import turns_neighbours

Part = Literal["keys", "values"]
PARTS: tuple[Part, Part] = ("keys", "values")


@dataclass
class Site:
    """One attention in a graph, with the nodes that a rewrite needs.

    q: [B, Hq, T, d].
    k, v: [B, H, T, d], the new pairs; of latent attention the new latents and their RoPE parts, and behind the pass
        `absorb` both the whole row.
    cat_k, cat_v: the cache update.
    past_k, past_v: the held placeholders, None in a prefill.
    mask: [B|1, Hq|1, T|1, n + T]; None where causality and padding say it all.
    padding: the name of the input [B, n + T] that says which tokens are there; None where all are.
    sinks: [Hq], or None.
    frequencies: the name of the input [h] that RoPE turns the keys by; None where none was found.
    biased_keys: a bias was added to the keys before.
    latents: how keys and values are made of what the cache keeps, which then is a row of rank + rope numbers: one
        head's pair of halves, of head_dim channels each. None where the cache keeps keys and values.
    """

    number: int
    attention: Node
    q: Node
    k: Node
    v: Node
    cat_k: Node
    cat_v: Node
    past_k: Node | None
    past_v: Node | None
    mask: Node | None
    padding: str | None
    sinks: Node | None
    scale: float
    softcap: float | None
    heads: int
    query_heads: int
    head_dim: int
    frequencies: str | None = None
    biased_keys: bool = False
    latents: Latents | None = None

    @property
    def turned_by(self) -> str | None:
        """`frequencies` where RoPE turns channels j and j + h by them; None where it turns neighbours."""
        return None if self.frequencies is None or turns_neighbours(self.k) else self.frequencies

    def moved(self, to: Mapping[Node, Node]) -> Site:
        """The same site in a copy of its graph."""
        latents = None if self.latents is None else replace(self.latents, **moved_nodes(self.latents, to))
        return replace(self, latents=latents, **moved_nodes(self, to))


def moved_nodes(of: Site | Latents, to: Mapping[Node, Node]) -> dict[str, Any]:
    """The fields of a site, or of latents, that are nodes: those nodes in a copy of their graph."""
    values = {declared.name: getattr(of, declared.name) for declared in fields(of)}
    return {name: to[node] for name, node in values.items() if isinstance(node, Node)}


@dataclass(frozen=True)
class LeftAlone:
    """An attention, or a whole graph, that stays as Hugging Face wrote it.

    node: the attention's name, or what says that all are meant.
    reason: for a person.
    by_model: no call of this model would change it, whatever its arguments.
    """

    node: str
    reason: str
    by_model: bool = False


@dataclass(frozen=True)
class Found:
    """What `find_attention` reads in a graph."""

    sites: tuple[Site, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()

    @property
    def padding(self) -> str | None:
        """The name of the input [B, n] that says which tokens are there; None where no site is padded."""
        return next((site.padding for site in self.sites if site.padding is not None), None)
