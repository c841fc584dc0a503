"""Widen the one-token decode graph to two lanes: the output token and the speculative token."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specache_compile.errors import first_line

from .plan import Input, RewritePlan, Tag, tag_of
from .reading.attention_forms import argument
from .reading.find_attention import is_update
from .reading.in_place import written_inputs
from .reading.lane_rules import own_rules
from .reading.nodes import arguments_of, output_node, reached, value_of

LANES = 2
INTEGERS = (torch.int32, torch.int64)
# Functions of RoPE's angles, which are products with positions.
ANGLES = ("cos", "sin", torch.cos, torch.sin, torch.polar)


def speculate(graph_module: GraphModule, plan: RewritePlan) -> GraphModule:
    """Run T_t and the speculative token T'_(t+1) side by side; lane 1's argmax is the next one (SpeCache section 3.3).

        out = decode_attention(q, ...)         ids = stack([input_ids, speculative])
        logits = linear(hidden, head)          logits = vmap(graph)(ids, position + lane)
        return (logits,)                       return (logits[0], argmax(logits[1]))

    The graph is vmapped over a lane axis and traced again (docs/design.md explains why its literals are not edited).
    A pre-decode keeps its one lane and returns its own speculative token. A graph without token ids, positions or
    logits runs one lane, and so does one whose lanes depend on each other; the user sees the reason, `plan.one_lane`.
    """
    applies = plan.speculate and plan.selects and plan.phase.one_token
    if not applies or not plan.sites:
        return graph_module
    found = reason_for_one_lane(graph_module) or find_tokens(graph_module)
    if isinstance(found, str):
        plan.one_lane = found
        return graph_module
    ids, logits = found
    if plan.phase.before is None:
        append_speculative(graph_module, logits)
        plan.speculates = True
        return graph_module
    sources = position_sources(graph_module, ids)
    if not sources:
        plan.one_lane = "no position tensor was found"
        return graph_module
    try:
        widened = widen(graph_module, ids, logits, sources)
    except RuntimeError as error:
        if isinstance(error, GuardOnDataDependentSymNode):
            raise
        plan.one_lane = f"torch.vmap refuses its graph ({cause(error)})"
        return graph_module
    plan.inputs.append(Input("speculative"))
    plan.lanes, plan.speculates = LANES, True
    follow_sites(widened, plan)
    return widened


def reason_for_one_lane(graph_module: GraphModule) -> str | None:
    """Return why a graph cannot run two lanes, apart from what `find_tokens` and vmap need, or None.

    Under vmap a lane has no pair of the lane before it, so each attention must be an op that adds this pair.
    """
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and is_traceable_wrapper_subclass(value_of(node)):
            return "its weights are quantised in a class that torch.vmap bypasses"
        if is_update(node):
            return "an attention stays exact, so a lane would not see the token before it"
        if node.target in ("topk", torch.topk) and isinstance(value_of(node.args[0]).shape[-1], torch.SymInt):
            return "it chooses by a top-k which tokens it sees, a choice for each lane"
        if "c10d_functional" in str(node.target):
            return "it is split over several processes"
    if written_inputs(graph_module):
        return "it writes to its inputs in place (a recurrent state, or a rotary table that grows)"
    return None


def find_tokens(graph_module: GraphModule) -> tuple[Node, int] | str:
    """Return the token ids' placeholder and the output position of the logits, or a sentence about what is missing."""
    outputs = output_node(graph_module).args[0]
    embeddings = graph_module.graph.find_nodes(op="call_function", target=F.embedding)
    for embedding in embeddings:
        ids = unshaped(embedding.args[0])
        if ids.op != "placeholder" or value_of(ids).dim() != 2:
            continue
        vocabulary = value_of(embedding.args[1]).shape[0]
        for position, output in enumerate(outputs):  # type: ignore[arg-type]
            value = value_of(output) if isinstance(output, Node) else None
            if isinstance(value, Tensor) and value.dim() == 3 and value.shape[2] == vocabulary:
                return ids, position
    if embeddings:
        return "no logits over the vocabulary come out"
    return "no token ids come in (inputs_embeds, or a graph break before?)"


def unshaped(node: Node) -> Node:
    """Return the source of an embedding's index, before transformations of the token ids.

    These are views, and `where(is_picture, padding, ids)`, which replaces a picture's tokens by padding.
    """
    while node.target in ("view", "reshape", "clone", torch.where):
        chosen = (argument(node, 1, "input"), argument(node, 2, "other"))
        sources = [x for x in (chosen if node.target is torch.where else node.args[:1]) if isinstance(x, Node)]
        if not sources:
            break
        node = sources[-1]
    return node


def position_sources(graph_module: GraphModule, tokens: Node) -> list[Node]:
    """Return the integer tensors of positions: sources of cos, sin and polar, or a computed index of an embedding."""
    sources: dict[Node, None] = {}
    for node in graph_module.graph.nodes:
        if node.target in ANGLES:
            sources.update(dict.fromkeys(integer_sources(node)))
        if node.target is F.embedding and unshaped(node.args[0]) is not tokens:
            sources[positions_of(node.args[0])] = None
    return [node for node in sources if value_of(node).shape[-1:] == (1,)]


def positions_of(index: Node) -> Node:
    """Return an embedding's index, or the positions by which the index (token types) is gathered from a buffer."""
    at = index
    while at.target in ("expand", "view", "reshape"):
        at = at.args[0]  # type: ignore[assignment]
    if at.target not in ("gather", torch.gather):
        return index
    return argument(at, 2, "index")  # type: ignore[return-value]


def integer_sources(node: Node) -> list[Node]:
    """Return the nearest integer tensors on each path back from a node."""

    def is_integer(at: Node) -> bool:
        value = value_of(at)
        return isinstance(value, Tensor) and value.dtype in INTEGERS

    return [at for at in reached([node], lambda at: () if is_integer(at) else at.all_input_nodes) if is_integer(at)]


def append_speculative(graph_module: GraphModule, logits: int) -> None:
    """Append an output: argmax of the last token's logits, [B, 1]."""
    output = output_node(graph_module)
    outputs = output.args[0]
    with graph_module.graph.inserting_before(output):
        last = graph_module.graph.call_function(operator.getitem, (outputs[logits], (slice(None), -1)))  # type: ignore[index]
        speculative = graph_module.graph.call_function(torch.argmax, (last, -1, True))
    output.args = ((*outputs, speculative),)  # type: ignore[misc]
    graph_module.recompile()


def cause(error: Exception) -> str:
    """Return an error's first line without the position in torch's sources."""
    line = re.sub(r"^\S+\.(cpp|h):\d+: ", "", first_line(error))
    return line if len(line) <= 120 else f"{line[:117]}..."


def widen(graph_module: GraphModule, ids: Node, logits: int, sources: list[Node]) -> GraphModule:
    """Return the two-lane graph: a speculative token [B, 1] follows the inputs, and the next one lane 0's outputs.

    The given graph is unchanged, also if vmap fails.
    """
    token_input = graph_module.graph.find_nodes(op="placeholder").index(ids)
    graph_module, before = GraphModule(graph_module, copy.deepcopy(graph_module.graph)), graph_module
    twins = dict(zip(before.graph.nodes, graph_module.graph.nodes, strict=True))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    add_lane_to_positions(graph_module, placeholders[-1], [twins[source] for source in sources])
    own_rules(graph_module)
    fakes = [value_of(node) for node in placeholders]

    def two_lanes(*inputs: Any) -> tuple[Any, ...]:
        *arguments, speculative = inputs
        lanes = run_lanes(graph_module, arguments, token_input, speculative)
        next_speculative = lanes[logits][1][:, -1].argmax(-1, keepdim=True)
        return (*map(first_lane, lanes), next_speculative)

    with torch.no_grad(), detect_fake_mode(fakes) or contextlib.nullcontext():
        widened = make_fx(two_lanes)(*fakes, torch.empty_like(fakes[token_input]))
    *inputs, speculative_input = widened.graph.find_nodes(op="placeholder")
    rename(speculative_input, "speculative")
    for node, named in zip(inputs, placeholders, strict=True):
        rename(node, named.name)
        if (tag := tag_of(named)) is not None:
            node.meta["specache"] = tag
    widened.recompile()
    return widened


def rename(placeholder: Node, name: str) -> None:
    placeholder.target = name
    placeholder._rename(name)


def first_lane(value: Any) -> Any:
    return value[0] if isinstance(value, Tensor) else value


def add_lane_to_positions(graph_module: GraphModule, after: Node, sources: list[Node]) -> None:
    graph = graph_module.graph
    with graph.inserting_after(after):
        lane = graph.placeholder("lane")
    for source in sources:
        at = source if source.op != "placeholder" else lane
        with graph.inserting_after(at):
            moved = graph.call_function(torch.add, (source, lane))
        source.replace_all_uses_with(moved, delete_user_cb=functools.partial(operator.is_not, moved))


def run_lanes(graph_module: GraphModule, arguments: list[Any], token_input: int, speculative: Tensor) -> list[Any]:
    """Run the graph vmapped over its lanes; returns tensors [2, ...]. Other outputs, such as the ints of sliding
    layers, bypass the vmap."""
    plain: dict[int, Any] = {}

    def one_lane(ids: Tensor, lane: Tensor) -> list[Tensor]:
        given = [*arguments[:token_input], ids, *arguments[token_input + 1 :], lane]
        outputs = Interpreter(graph_module).run(*given)
        plain.update({position: value for position, value in enumerate(outputs) if not isinstance(value, Tensor)})
        return [value for value in outputs if isinstance(value, Tensor)]

    tokens = torch.stack([arguments[token_input], speculative])
    mapped = iter(torch.vmap(one_lane)(tokens, torch.arange(LANES, device=speculative.device)))
    count = len(output_node(graph_module).args[0])  # type: ignore[arg-type]
    return [plain[position] if position in plain else next(mapped) for position in range(count)]


def follow_sites(graph_module: GraphModule, plan: RewritePlan) -> None:
    """Update the sites to the new graph's nodes; attentions keep their order."""
    calls = graph_module.graph.find_nodes(op="call_function", target=torch.ops.specache.decode_attention.default)
    for site, call in zip(plan.sites, calls, strict=True):
        given = arguments_of(call)
        site.q, site.k, site.v, site.mask, site.sinks = (given[name] for name in ("q", "k", "v", "mask", "sinks"))
        site.attention = next(user for user in call.users if user.args[1] == 0)
        call.meta["specache"] = Tag(site.number)
