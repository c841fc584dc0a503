"""What passes share: the sites found, the phase, where each graph input comes from, and each pass's report."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from .phase import Phase
from .recipe import RecipeOf

# Dynamo names a weight by its place in the model, whose modules are numbered where they stand in a list, as layers do.
LAYER = re.compile(r"modules_(\d+)_|_layers_(\d+)_", re.IGNORECASE)
Part = Literal["keys", "values"]
PARTS: tuple[Part, Part] = ("keys", "values")


@dataclass
class Site:
    """One attention in a captured graph, with the nodes that a rewrite needs.

    q [B, Hq, T, d]; k, v [B, H, T, d] are the new pairs; mask is None (causal) or [B|1, Hq|1, T|1, n + T]; padded:
    tokens that the session's padding says are not there are hidden besides; sinks None or [Hq]. `past_k` and `past_v`
    are the held placeholders, None in a prefill. frequencies: the name of the input [h] that RoPE turns the keys by,
    None where none was found; biased_keys: a bias was added to them before.
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
    padded: bool
    sinks: Node | None
    scale: float
    softcap: float | None
    heads: int
    query_heads: int
    head_dim: int
    frequencies: str | None = None
    biased_keys: bool = False


@dataclass(frozen=True)
class LeftAlone:
    """An attention, or a whole graph, that stays as Hugging Face wrote it; `by_model`: whatever a person calls it
    with."""

    node: str
    reason: str
    by_model: bool = False


@dataclass(frozen=True)
class Input:
    """Where a graph input comes from at run time: the caller's argument, or the session's state."""

    source: Literal["argument", "cursor", "padding", "state", "guess", "guessed"]
    argument: int = -1
    site: int = -1
    field: str = ""


@dataclass(frozen=True)
class PassReport:
    """What one pass did: counts by what they count, and remarks for a person."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Tag:
    """What a node is that the passes have made: the state tensor `field` of a site, or a call of `op` there."""

    site: int
    field: str = ""
    op: str = ""


@dataclass
class Context:
    """The state of one run of the pipeline over one graph."""

    phase: Phase
    # Whether pairs are selected for the next step, and whether a second lane selects them.
    selects: bool
    speculate: bool
    hit_rate: bool
    recipe: RecipeOf
    # Fakes of a layer's state tensors by field, and of the cursor, in the graph's own fake mode.
    state: Sequence[dict[str, Any]]
    cursor: Any
    # Names of the placeholders that are held tensors.
    held: frozenset[str] = frozenset()
    inputs: list[Input] = field(default_factory=list)
    # The fake of the session's padding.
    padding: Any = None
    sites: list[Site] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    # The name of the input [B, n] that says which tokens are there, of the sites that are padded.
    padding_mask: str | None = None
    # The name of such an input that is known to be all ones: nothing is padded by it.
    all_there: str | None = None
    # What each mask, by name, was read to be: causal or not, and its padding's name (`masks.read_mask`).
    masks: dict[str, tuple[bool, str | None]] = field(default_factory=dict)
    # Output positions that HF's cache will see as held tensors → the site's number, and which part of it.
    held_outputs: dict[int, tuple[int, Part]] = field(default_factory=dict)
    lanes: int = 1
    # Why a decode that was to be widened runs one lane.
    one_lane: str | None = None
    # The name of the input of token ids [B, 1], in a graph of more than one lane.
    tokens: str | None = None
    # The graph's last output is the guess of the next speculative token [B, 1].
    guesses: bool = False
    # Attentions, counted in the graph's order, that a person wants left as they are.
    exact_attentions: frozenset[int] = frozenset()


Pass = Callable[[GraphModule, Context], tuple[GraphModule, PassReport]]


def value_of(node: Node) -> Any:
    """The fake value that tracing recorded for a node, whichever tracer made it."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def tag_of(node: Any) -> Tag | None:
    """The tag of a node that the passes have made; None for all others."""
    return node.meta.get("specache") if isinstance(node, Node) else None


def call_op(graph_module: GraphModule, site: Site, op: str, arguments: tuple[Any, ...]) -> Node:
    """A call of a `specache::` op at a site, tagged, where the graph's nodes are being inserted."""
    node = graph_module.graph.call_function(getattr(torch.ops.specache, op).default, arguments)
    node.meta["specache"] = Tag(site.number, op=op)
    return node


def model_layer(name: str) -> int | None:
    """The model's layer that an input's name says it is of: the first number; None where there is none."""
    found = LAYER.search(name)
    return None if found is None else int(next(filter(None, found.groups())))


def is_weight(node: Node) -> bool:
    return node.op == "placeholder" and "parameters" in node.name.lower()


def weight_layer(node: Node) -> int | None:
    """The model's layer that a node is a weight of; None for what is no weight, or in no layer."""
    return model_layer(node.name) if is_weight(node) else None


def add_input(graph_module: GraphModule, context: Context, name: str, source: Input, value: Any) -> Node:
    """The placeholder for a piece of state, made on first use, behind the graph's other inputs."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, known in zip(placeholders, context.inputs, strict=True):
        if known == source:
            return node
    with graph_module.graph.inserting_after(placeholders[-1]):
        node = graph_module.graph.placeholder(name)
    node.meta["example_value"] = node.meta["val"] = value
    context.inputs.append(source)
    return node


def state_input(graph_module: GraphModule, context: Context, site: int, field: str) -> Node:
    """The placeholder of one state tensor of one site."""
    value = context.state[site][field]
    node = add_input(graph_module, context, f"{field}_{site}", Input("state", site=site, field=field), value)
    node.meta["specache"] = Tag(site, field)
    return node


def cursor_input(graph_module: GraphModule, context: Context) -> Node:
    """The placeholder of the cursor: lengths and the copy queue's number."""
    return add_input(graph_module, context, "cursor", Input("cursor"), context.cursor)


def padding_input(graph_module: GraphModule, context: Context, site: Site) -> Node | None:
    """The placeholder of the session's padding, bool [B, 1, 1, C] (True: the token is there); None: all are."""
    if not site.padded:
        return None
    return add_input(graph_module, context, "padding", Input("padding"), context.padding)


def replace_attention(graph_module: GraphModule, site: Site, new: Node) -> None:
    """`new` stands where the site's attention stood."""
    new.meta["example_value"] = value_of(site.attention)
    site.attention.replace_all_uses_with(new)
    graph_module.graph.erase_node(site.attention)
    site.attention = new


def output_node(graph_module: GraphModule) -> Node:
    return next(iter(graph_module.graph.find_nodes(op="output")))
