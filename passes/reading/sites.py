"""The results of reading a captured graph: the sites, and the attentions that are left alone."""

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

    A pass that replaces one of these nodes updates the site. Decisions of passes are in tags and reports.

    q: [B, Hq, T, d].
    k, v: [B, H, T, d], the new pairs.
    cat_k, cat_v: the cache update.
    past_k, past_v: the held placeholders; None in a prefill.
    mask: [B|1, Hq|1, T|1, n + T]; None for a mask of only causality and padding.
    padding: name of the padding input [B, n + T], true for real tokens; None without padding.
    sinks: [Hq], or None.
    frequencies: name of the input [h] with RoPE's frequencies of the keys; None if none was found.
    biased_keys: the linear layer of the keys has a bias.
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
        """`frequencies` if RoPE rotates channels j and j + h together; None if it rotates neighbours."""
        return None if self.frequencies is None or turns_neighbours(self.k) else self.frequencies

    def moved(self, to: Mapping[Node, Node]) -> Site:
        """Return the same site in a copy of its graph."""
        values = {declared.name: getattr(self, declared.name) for declared in fields(self)}
        return replace(self, **{name: to[node] for name, node in values.items() if isinstance(node, Node)})


@dataclass(frozen=True)
class LeftAlone:
    """An attention, or a whole graph, that keeps Hugging Face's form.

    node: name of the attention, or a phrase for the whole graph.
    reason: a sentence for the user.
    by_model: the reason holds for every call of this model.
    """

    node: str
    reason: str
    by_model: bool = False


@dataclass(frozen=True)
class Found:
    """The result of `find_attention`.

    latents: latent attentions, which keep Hugging Face's cache.
    """

    sites: tuple[Site, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    latents: tuple[Latents, ...] = ()

    @property
    def padding(self) -> str | None:
        """Name of the padding input [B, n]; None if no site is padded."""
        return next((site.padding for site in self.sites if site.padding is not None), None)
