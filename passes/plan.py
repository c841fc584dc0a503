"""The plan of one rewrite: the graph's phase, recipe and state, and the results that passes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from .phase import Phase
from .reading.nodes import value_of
from .reading.sites import Part, Site
from .recipe import OpCall, Recipe, check_names, operands


@dataclass(frozen=True)
class Input:
    """Where a graph input comes from at run time.

    source: "argument" for the caller's arguments, else the kind of the session's tensor.
    argument: position among the caller's arguments, for "argument".
    site, field: number of the layer and name of its state tensor, for "state".
    """

    source: Literal["argument", "cursor", "padding", "state", "speculative"]
    argument: int = -1
    site: int = -1
    field: str = ""

    @property
    def place(self) -> tuple[int, int | str]:
        """Among the caller's arguments (0), the session's other tensors (1) and the state of each layer (2 and more),
        with the key there."""
        if self.source == "argument":
            return 0, self.argument
        return (2 + self.site, self.field) if self.source == "state" else (1, self.source)


@dataclass(frozen=True)
class Tag:
    """Marks a node that a pass inserted: a state tensor of a site, or an op call at a site.

    site: the site's number.
    field: the state tensor's name; "" for a call.
    """

    site: int
    field: str = ""


@dataclass
class RewritePlan:
    """One run of the pipeline over one graph. Passes write the fields from `inputs` on.

    selects: the step selects pairs for the next step.
    speculate: a second lane selects them.
    recipe: a function from a site's number to the method's recipe.
    state: the state tensors of each layer by field. They, cursor and padding are fakes in the graph's fake mode.
    padding: the session's padding; None where its stores take none.
    inputs: the source of each graph input.
    held_outputs: positions of outputs that HF's cache receives as held tensors → site number, and keys or values.
    lanes: number of tokens that run side by side.
    one_lane: the reason why a decode runs one lane although two were requested.
    counts_positions: the graph counts positions from the cache's length.
    speculates: the graph's last output is the next speculative token [B, 1].
    """

    phase: Phase
    sites: list[Site]
    selects: bool
    speculate: bool
    recipe: Callable[[int], Recipe]
    state: Sequence[dict[str, Any]]
    cursor: Any
    padding: Any
    inputs: list[Input]
    held_outputs: dict[int, tuple[int, Part]] = field(default_factory=dict)
    lanes: int = 1
    one_lane: str | None = None
    counts_positions: bool = False
    speculates: bool = False


Pass = Callable[[GraphModule, RewritePlan], GraphModule]


def tag_of(node: Any) -> Tag | None:
    """Return the tag of a node that a pass inserted; None for all others."""
    return node.meta.get("specache") if isinstance(node, Node) else None


def call_op(graph_module: GraphModule, site: Site, op: str, given: Mapping[str, Any]) -> Node:
    """Insert a tagged call of a `specache::` op for a site at the graph's insertion point."""
    node = graph_module.graph.call_function(getattr(torch.ops.specache, op).default, operands(op, given))
    node.meta["specache"] = Tag(site.number)
    return node


def call_of(graph_module: GraphModule, plan: RewritePlan, site: Site, call: OpCall, given: Mapping[str, Any]) -> Node:
    """Insert a recipe's call, with the given operands, the site's state tensors and the recipe's settings."""
    check_names(call)
    state = {operand: state_input(graph_module, plan, site.number, field) for operand, field in call.state.items()}
    turned = {}
    if call.turned and plan.state[site.number][call.turned].shape[2]:
        inputs = graph_module.graph.find_nodes(op="placeholder")
        turned["frequencies"] = next((node for node in inputs if node.name == site.turned_by), None)
    return call_op(graph_module, site, call.op, {**given, **state, **call.settings, **turned})


def add_input(graph_module: GraphModule, plan: RewritePlan, name: str, source: Input, value: Any) -> Node:
    """Return the placeholder for a piece of state; the first use adds it after the graph's other inputs."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, known in zip(placeholders, plan.inputs, strict=True):
        if known == source:
            return node
    with graph_module.graph.inserting_after(placeholders[-1]):
        node = graph_module.graph.placeholder(name)
    node.meta["example_value"] = node.meta["val"] = value
    plan.inputs.append(source)
    return node


def state_input(graph_module: GraphModule, plan: RewritePlan, site: int, field: str) -> Node:
    """Return the placeholder of one site's state tensor."""
    value = plan.state[site][field]
    node = add_input(graph_module, plan, f"{field}_{site}", Input("state", site=site, field=field), value)
    node.meta["specache"] = Tag(site, field)
    return node


def session_input(graph_module: GraphModule, plan: RewritePlan, name: Literal["cursor", "padding"]) -> Node:
    """Return the placeholder of one of the session's tensors, as in `RewritePlan`."""
    return add_input(graph_module, plan, name, Input(name), getattr(plan, name))


def padding_input(graph_module: GraphModule, plan: RewritePlan, site: Site) -> Node | None:
    """Return the placeholder of the session's padding, bool [B, 1, 1, C], True for real tokens; else None."""
    return None if site.padding is None or plan.padding is None else session_input(graph_module, plan, "padding")


def replace_attention(graph_module: GraphModule, site: Site, new: Node) -> None:
    """Replace the site's attention by `new`."""
    new.meta["example_value"] = value_of(site.attention)
    site.attention.replace_all_uses_with(new)
    graph_module.graph.erase_node(site.attention)
    site.attention = new
