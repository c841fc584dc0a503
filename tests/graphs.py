"""Small graphs in the form that Dynamo captures, and their text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import specache_compile  # noqa: F401  (registers the ops)
from specache_compile.methods import METHODS
from specache_compile.methods.field import LayerShape
from specache_compile.methods.specache import FIELDS, SpecacheOptions
from specache_compile.passes.phase import DECODE, Phase
from specache_compile.passes.plan import Input, RewritePlan
from specache_compile.passes.reading.find_attention import find_attention
from specache_compile.passes.reading.sites import Found

BATCH, HEADS, PAST, DIM = 1, 2, 40, 8


class GraphBuilder:
    """A graph of torch calls over fakes, in the form that Dynamo captures."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()
        self.inputs: list[str] = []

    def value(self, *shape: int) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape)

    def input(self, name: str, *shape: int) -> Node:
        body = next((node for node in self.graph.nodes if node.op != "placeholder"), self.graph._root)
        with self.graph.inserting_before(body):
            node = self.graph.placeholder(name)
        node.meta["example_value"] = self.value(*shape)
        self.inputs.append(name)
        return node

    def call(self, target: Any, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["example_value"] = self.value(*shape)
        return node

    def finish(self, *outputs: Any) -> GraphModule:
        self.graph.output(tuple(outputs))
        return GraphModule(torch.nn.Module(), self.graph)


def attention(
    builder: GraphBuilder, layer: int, tokens: int, past: int, update: str = "cat"
) -> tuple[Node, Node, Node]:
    """Add inputs q, k and v, the cache update and SDPA; returns out, keys, values."""
    q = builder.input(f"q{layer}", BATCH, 2 * HEADS, tokens, DIM)
    new = [builder.input(f"{name}{layer}", BATCH, HEADS, tokens, DIM) for name in "kv"]
    cached = []
    for name, pair in zip("kv", new, strict=True):
        if past:
            before = builder.input(f"past_{name}{layer}", BATCH, HEADS, past, DIM)
        else:
            before = builder.call(torch.tensor, (0,), [])
        if update == "cat":
            cached.append(builder.call(torch.cat, (BATCH, HEADS, past + tokens, DIM), [before, pair], dim=-2))
        else:
            cached.append(builder.call(torch.add, (BATCH, HEADS, past + tokens, DIM), before, pair))
    out = builder.call(
        F.scaled_dot_product_attention, (BATCH, 2 * HEADS, tokens, DIM), q, *cached,
        attn_mask=None, dropout_p=0.0, scale=0.25, is_causal=not past, enable_gqa=True,
    )  # fmt: skip
    return out, cached[0], cached[1]


def found(builder: GraphBuilder, graph_module: GraphModule) -> Found:
    """Return the sites of a graph whose pasts are held."""
    return find_attention(graph_module, frozenset(name for name in builder.inputs if name.startswith("past")))


def plan_for(builder: GraphBuilder, phase: Phase, graph_module: GraphModule | None = None) -> RewritePlan:
    """Return a plan for a graph with its sites, or for no graph without sites."""
    sites = [] if graph_module is None else list(found(builder, graph_module).sites)
    options = SpecacheOptions(bits=1, key_code="levels", group_size=32, top_k=4)
    layer = LayerShape(HEADS, DIM, torch.float32, torch.device("cpu"))
    with builder.mode:
        state = [
            {f.name: torch.empty(f.shape(options, layer, BATCH, 256), dtype=f.dtype(options, layer)) for f in FIELDS}
            for _ in sites
        ]
        cursor = torch.empty(BATCH, 4, dtype=torch.int64)
    inputs = [Input("argument", argument=i) for i in range(len(builder.inputs))]
    recipe = partial(METHODS["specache"].recipe, options)
    return RewritePlan(phase, sites, True, False, recipe, state, cursor, None, inputs)


def decode_graph(layers: int = 1) -> tuple[GraphModule, RewritePlan]:
    builder = GraphBuilder()
    outputs: list[Node] = []
    for layer in range(layers):
        out, keys, values = attention(builder, layer, 1, PAST)
        outputs += [builder.call(torch.matmul, (BATCH, 2 * HEADS, 1, DIM), out, out), keys, values]
    graph_module = builder.finish(*outputs)
    return graph_module, plan_for(builder, DECODE, graph_module)


def text(graph_module: GraphModule) -> str:
    """Return one line per node: name, target, arguments; state is shortened."""
    lines = []
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            target = node.target
            name = str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__
            lines.append(f"{node.name} = {name}({', '.join(map(str, node.args))})")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
    return "\n".join(lines) + "\n"
