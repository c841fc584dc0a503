"""What one rewrite makes of a graph: the phase, the recipe, the state at hand, and what the passes tell each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from .phase import Phase
from .reading.nodes import value_of
from .reading.sites import Part, Site
from .recipe import Call, RecipeOf


@dataclass(frozen=True)
class Input:
    """Where a graph input comes from at run time: the caller's argument, or the session's state."""

    source: Literal["argument", "cursor", "padding", "state", "guess"]
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
class Plan:
    """One run of the pipeline over one graph. Behind `inputs` stands what the passes find out and leave to others."""

    phase: Phase
    sites: list[Site]
    # Whether pairs are selected for the next step, and whether a second lane selects them.
    selects: bool
    speculate: bool
    hit_rate: bool
    recipe: RecipeOf
    # Fakes in the graph's own fake mode: a layer's state tensors by field, the cursor, the session's padding.
    state: Sequence[dict[str, Any]]
    cursor: Any
    padding: Any
    # Where each of the graph's inputs comes from.
    inputs: list[Input]
    # Output positions that HF's cache will see as held tensors → the site's number, and which part of it.
    held_outputs: dict[int, tuple[int, Part]] = field(default_factory=dict)
    lanes: int = 1
    # Why a decode that was to be widened runs one lane.
    one_lane: str | None = None
    # The graph's last output is the guess of the next speculative token [B, 1].
    guesses: bool = False


Pass = Callable[[GraphModule, Plan], tuple[GraphModule, PassReport]]


def tag_of(node: Any) -> Tag | None:
    """The tag of a node that the passes have made; None for all others."""
    return node.meta.get("specache") if isinstance(node, Node) else None


def call_op(graph_module: GraphModule, site: Site, op: str, arguments: tuple[Any, ...]) -> Node:
    """A call of a `specache::` op at a site, tagged, where the graph's nodes are being inserted."""
    node = graph_module.graph.call_function(getattr(torch.ops.specache, op).default, arguments)
    node.meta["specache"] = Tag(site.number, op=op)
    return node


def with_tiers(op: str, state: Mapping[str, Node], settings: tuple[Any, ...]) -> dict[str, Any] | None:
    """State tensors and settings by the operands of an op that takes `tiers` and `layout`: what its schema does not
    name goes into the list. None for any other op."""
    names = {argument.name for argument in getattr(torch.ops.specache, op).default._schema.arguments}
    if "tiers" not in names:
        return None
    listed = [node for field, node in state.items() if field not in names]
    return {**state, "tiers": listed, "layout": [int(value) for value in settings]}


def call_by_name(graph_module: GraphModule, site: Site, op: str, given: Mapping[str, Any]) -> Node:
    """`call_op` with those of `given` that the op's schema names; every one that has no default must be there."""
    schema = getattr(torch.ops.specache, op).default._schema.arguments
    named = [argument.name for argument in schema if argument.name in given or not argument.has_default_value()]
    return call_op(graph_module, site, op, tuple(given[name] for name in named))


def add_input(graph_module: GraphModule, plan: Plan, name: str, source: Input, value: Any) -> Node:
    """The placeholder for a piece of state, made on first use, behind the graph's other inputs."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, known in zip(placeholders, plan.inputs, strict=True):
        if known == source:
            return node
    with graph_module.graph.inserting_after(placeholders[-1]):
        node = graph_module.graph.placeholder(name)
    node.meta["example_value"] = node.meta["val"] = value
    plan.inputs.append(source)
    return node


def state_input(graph_module: GraphModule, plan: Plan, site: int, field: str) -> Node:
    """The placeholder of one state tensor of one site."""
    value = plan.state[site][field]
    node = add_input(graph_module, plan, f"{field}_{site}", Input("state", site=site, field=field), value)
    node.meta["specache"] = Tag(site, field)
    return node


def cursor_input(graph_module: GraphModule, plan: Plan) -> Node:
    """The placeholder of the cursor: lengths and the copy queue's number."""
    return add_input(graph_module, plan, "cursor", Input("cursor"), plan.cursor)


def padding_input(graph_module: GraphModule, plan: Plan, site: Site) -> Node | None:
    """The placeholder of the session's padding, bool [B, 1, 1, C] (True: the token is there); None: all are."""
    if site.padding is None:
        return None
    return add_input(graph_module, plan, "padding", Input("padding"), plan.padding)


def frequencies_input(graph_module: GraphModule, plan: Plan, site: Site, call: Call) -> tuple[Node | None, ...]:
    """Of a call that takes RoPE's frequencies: the input that holds them, or None where the site has none."""
    if not call.turned or not plan.state[site.number][call.turned].shape[2]:
        return ()
    inputs = graph_module.graph.find_nodes(op="placeholder")
    return (next((node for node in inputs if node.name == site.frequencies), None),)


def replace_attention(graph_module: GraphModule, site: Site, new: Node) -> None:
    """`new` stands where the site's attention stood."""
    new.meta["example_value"] = value_of(site.attention)
    site.attention.replace_all_uses_with(new)
    graph_module.graph.erase_node(site.attention)
    site.attention = new
