"""What a captured graph holds: its attentions, and those that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from torch.fx import Node

from .latents import Latents
from .nodes import turns_neighbours

Part = Literal["keys", "values"]
PARTS: tuple[Part, Part] = ("keys", "values")


@dataclass
class Site:
    """One attention in a graph, with the nodes that a rewrite needs.

    q: [B, Hq, T, d].
    k, v: [B, H, T, d], the new pairs.
    cat_k, cat_v: the cache update.
    past_k, past_v: the held placeholders, None in a prefill.
    mask: [B|1, Hq|1, T|1, n + T]; None where causality and padding say it all.
    padding: the name of the input [B, n + T] that says which tokens are there; None where all are.
    sinks: [Hq], or None.
    frequencies: the name of the input [h] that RoPE turns the keys by; None where none was found.
    biased_keys: a bias was added to the keys before.
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

    @property
    def turned_by(self) -> str | None:
        """`frequencies` where RoPE turns channels j and j + h by them; None where it turns neighbours."""
        return None if self.frequencies is None or turns_neighbours(self.k) else self.frequencies

    def moved(self, to: Mapping[Node, Node]) -> Site:
        """The same site in a copy of its graph."""
        values = {declared.name: getattr(self, declared.name) for declared in fields(self)}
        return replace(self, **{name: to[node] for name, node in values.items() if isinstance(node, Node)})


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
    """What `find_attention` reads in a graph.

    latents: latent attentions, which keep Hugging Face's cache.
    """

    sites: tuple[Site, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    latents: tuple[Latents, ...] = ()

    @property
    def padding(self) -> str | None:
        """The name of the input [B, n] that says which tokens are there; None where no site is padded."""
        return next((site.padding for site in self.sites if site.padding is not None), None)
