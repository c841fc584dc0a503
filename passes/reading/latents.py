"""Latent attention (DeepSeek-V2, arXiv 2405.04434): its cache, and how keys and values are made of that."""

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
    """How a site's keys and values are made of what the cache keeps.

    keys, values: what the attention reads, [B, Hq, n, nope + rope] and [B, Hq, n, v].
    weight: [Hq · (nope + v), rank], which makes a latent into each head's key, without its RoPE part, and value.
    nope: channels of a key without RoPE.
    rank: channels of a latent, which the cache keeps as keys [B, 1, n, rank].
    rope: channels that all heads' keys share, which the cache keeps as values [B, 1, n, rope].
    """

    keys: Node
    values: Node
    weight: Node
    nope: int
    rank: int
    rope: int


def match_latents(form: Form) -> tuple[Node, Node, Latents] | None:
    """The cached latents, the cached RoPE parts, and how keys and values are made of both; None where they are not.

    both = linear(latents, weight).view(B, n, Hq, nope + v).transpose(1, 2)
    nope, values = split(both, [nope, v], -1)
    keys = cat([nope, ropes.expand(-1, Hq, -1, -1)], -1)
    """
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
    sizes = [int(value_of(part).shape[-1]) for part in (nope, form.values, latents, ropes)]
    if sizes[0] + sizes[1] != width or value_of(weight).shape != (heads * width, sizes[2]):
        return None
    return latents, ropes, Latents(form.keys, form.values, weight, sizes[0], sizes[2], sizes[3])


def projection_of(both: Node) -> Node | None:
    """The linear layer behind what is split, viewed by heads; None where there is none."""
    if both.target not in ("transpose", torch.transpose) or tuple(both.args[1:]) != (1, 2):
        return None
    view: Any = both.args[0]
    linear = view.args[0] if view.target in ("view", "reshape") else view
    return linear if isinstance(linear, Node) and linear.target is F.linear else None


def check(linear: Node, latents: Node, weight: Node, ropes: Node) -> None:
    """NoMatch where the projection is no plain matrix, or the cached row is no pair of halves."""
    value = value_of(weight)
    if argument(linear, 2, "bias") is not None or not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        raise NoMatch(
            "the projection of its latents is not one plain matrix (a bias, quantised weights, an adapter)", True
        )
    shapes = [tuple(value_of(node).shape) for node in (latents, ropes)]
    if any(len(shape) != 4 or shape[1] != 1 for shape in shapes) or (shapes[0][3] + shapes[1][3]) % 2:
        raise NoMatch(f"its latents and their RoPE parts, {shapes[0]} and {shapes[1]}, are not halves of one row", True)
