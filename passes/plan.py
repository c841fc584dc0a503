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
    """Where a graph input comes from at run time.

    source: the caller's arguments, or what of the session's.
    argument: the argument's position, for "argument".
    site, field: the layer's number and the name of its state tensor, for "state".
    """

    source: Literal["argument", "cursor", "padding", "state", "guess", "counted"]
    argument: int = -1
    site: int = -1
    field: str = ""


@dataclass(frozen=True)
class PassReport:
    """What one pass did.

    name: the pass's.
    counts: numbers by what they count.
    remarks: for a person.
    seconds: that the pass took.
    """

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Tag:
    """What a node is that the passes have made: a state tensor of a site, or the call of an op there.

    site: the site's number.
    field: the state tensor's name; "" for a call.
    op: the op's name; "" for a state tensor.
    """

    site: int
    field: str = ""
    op: str = ""


@dataclass
class Plan:
    """One run of the pipeline over one graph. From `inputs` on: what the passes find out, and leave to others.

    selects: pairs are selected for the next step.
    speculate: a second lane selects them.
    hit_rate: the hit rate is measured.
    recipe: the method's, of each site.
    state: each layer's state tensors by field; as cursor and padding, fakes in the graph's own fake mode.
    padding: the session's; None where its stores take none.
    counted: [lanes, B, 1, 1] float32 of a widened decode, 0 for a lane that its row is only filled up with, else 1.
    inputs: where each of the graph's inputs comes from.
    held_outputs: output positions that HF's cache will see as held tensors → the site's number, and which part of it.
    lanes: tokens that run side by side.
    one_lane: why a decode that was to be widened runs one lane.
    counts_positions: positions are counted from the cache's length in the graph.
    guesses: the graph's last output is the guess of the next speculative token [B, 1].
    """

    phase: Phase
    sites: list[Site]
    selects: bool
    speculate: bool
    hit_rate: bool
    recipe: RecipeOf
    state: Sequence[dict[str, Any]]
    cursor: Any
    padding: Any
    inputs: list[Input]
    held_outputs: dict[int, tuple[int, Part]] = field(default_factory=dict)
    lanes: int = 1
    one_lane: str | None = None
    counts_positions: bool = False
    guesses: bool = False
    counted: Any = None


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
    """State tensors and settings by the operands of an op that takes `tiers` and `layout`; None for any other op.

    State tensors that the op's schema does not name go into the list `tiers`.
    """
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
    if site.padding is None or plan.padding is None:
        return None
    return add_input(graph_module, plan, "padding", Input("padding"), plan.padding)


def frequencies_input(graph_module: GraphModule, plan: Plan, site: Site, call: Call) -> tuple[Node | None, ...]:
    """What a call that takes RoPE's frequencies ends with: their input, or None where the site is turned by none.

    () for any other call.
    """
    if not call.turned or not plan.state[site.number][call.turned].shape[2]:
        return ()
    turned_by, inputs = site.turned_by, graph_module.graph.find_nodes(op="placeholder")
    return (next((node for node in inputs if node.name == turned_by), None),)


def replace_attention(graph_module: GraphModule, site: Site, new: Node) -> None:
    """`new` stands where the site's attention stood."""
    new.meta["example_value"] = value_of(site.attention)
    site.attention.replace_all_uses_with(new)
    graph_module.graph.erase_node(site.attention)
    site.attention = new


def counted_input(graph_module: GraphModule, plan: Plan) -> Node:
    return add_input(graph_module, plan, "counted", Input("counted"), plan.counted)
