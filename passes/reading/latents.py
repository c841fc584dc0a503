"""Match latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are projections of cached latents."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .attention_forms import Form, NoMatch, argument
from .nodes import value_of

SPLITS = (torch.functional.split, torch.split, "split")


@dataclass(frozen=True)
class Latents:
    """An attention whose keys and values are a projection of latents.

    attention: the attention's node.
    q: [B, Hq, T, nope + rope].
    latents: [B, 1, n, rank].
    ropes: [B, 1, n, rope], the RoPE part of the keys, which all heads share.
    weight: [Hq · (nope + v), rank], projects a latent to each head's key without RoPE, and value.
    nope: number of key channels without RoPE.
    mask, scale: as in `Form`.
    causal: SDPA applies its own causal mask.
    """

    attention: Node
    q: Node
    latents: Node
    ropes: Node
    weight: Node
    nope: int
    mask: Node | None
    scale: float
    causal: bool

    @property
    def is_decode(self) -> bool:
        """Whether each row has one new token at compile time."""
        tokens = value_of(self.q).shape[2]
        return isinstance(tokens, int) and tokens == 1 and not self.causal


def match_latents(attention: Node, form: Form) -> Latents | None:
    """Match keys and values that are projections of latents; None for any other attention.

    both = linear(latents, weight).view(B, n, Hq, nope + v).transpose(1, 2)
    nope, values = split(both, [nope, v], -1)
    keys = cat([nope, ropes.expand(-1, Hq, -1, -1)], -1)
    """
    if form.sinks is not None or form.softcap is not None or form.scaled_mask:
        return None
    if form.keys.target is not torch.cat or argument(form.keys, 1, "dim") not in (-1, 3):
        return None
    parts = form.keys.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    nope, rope = parts
    if any(node.target is not operator.getitem for node in (nope, form.values)) or rope.target != "expand":
        return None
    split, ropes = nope.args[0], rope.args[0]
    halves = [(operator.getitem, (split, number)) for number in (0, 1)]
    if [(node.target, node.args) for node in (nope, form.values)] != halves or split.target not in SPLITS:
        return None
    both = split.args[0]
    linear = projection_of(both)
    if linear is None:
        return None
    latents, weight = argument(linear, 0, "input"), argument(linear, 1, "weight")
    check(linear, latents, weight, ropes)
    heads, width = (int(value_of(both).shape[dim]) for dim in (1, 3))
    channels, outputs, rank = (int(value_of(part).shape[-1]) for part in (nope, form.values, latents))
    if channels + outputs != width or value_of(weight).shape != (heads * width, rank):
        return None
    return Latents(attention, form.q, latents, ropes, weight, channels, form.mask, form.scale, form.causal)


def projection_of(both: Node) -> Node | None:
    """Return the linear layer whose output is viewed by heads and split; None if there is none."""
    if both.target not in ("transpose", torch.transpose) or tuple(both.args[1:]) != (1, 2):
        return None
    view: Any = both.args[0]
    linear = view.args[0] if view.target in ("view", "reshape") else view
    return linear if isinstance(linear, Node) and linear.target is F.linear else None


def check(linear: Node, latents: Node, weight: Node, ropes: Node) -> None:
    """Raise NoMatch if the projection is no plain matrix, or if heads do not share the latents."""
    value = value_of(weight)
    if argument(linear, 2, "bias") is not None or not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        raise NoMatch(
            "the projection of its latents is not one plain matrix (a bias, quantised weights, an adapter)", True
        )
    shapes = [tuple(value_of(node).shape) for node in (latents, ropes)]
    if any(len(shape) != 4 or shape[1] != 1 for shape in shapes):
        raise NoMatch(
            f"its latents and their RoPE parts, {shapes[0]} and {shapes[1]}, are not shared by all heads", True
        )
