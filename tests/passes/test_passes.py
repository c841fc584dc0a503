"""Each pass on a small graph: the resulting text, its counts, and the graphs that it leaves alone."""

from __future__ import annotations

import operator
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphs import BATCH, DIM, HEADS, PAST, GraphBuilder, attention, decode_graph, found, plan_for, text
from specache_compile.lowering.lower import trust_indices
from specache_compile.passes.clean_up import clean_up
from specache_compile.passes.overlap import is_copy, is_wait, overlap
from specache_compile.passes.own_cache import own_cache
from specache_compile.passes.phase import DECODE, PREFILL
from specache_compile.passes.plan import Input, RewritePlan
from specache_compile.passes.prefetch import prefetch
from specache_compile.passes.reading import find_attention as reasons
from specache_compile.passes.reading.find_attention import find_attention, frequencies_of
from specache_compile.passes.reading.known_sizes import fill_in_sizes
from specache_compile.passes.reading.lane_rules import own_rules, product, rows_times
from specache_compile.passes.reading.nodes import output_node
from specache_compile.passes.rewrite_attention import rewrite_attention
from specache_compile.passes.speculate import run_lanes
from specache_compile.passes.store_pairs import store


def products_graph(batch: int) -> GraphModule:
    """A rotary table's product and its double, linear layers of both kinds, and a product of vectors."""
    builder = GraphBuilder()
    x, frequencies = builder.input("x", batch, 1, DIM), builder.input("frequencies", batch, 6, 1)
    weight, bias = builder.input("weight", DIM, DIM), builder.input("bias", DIM)
    angles = builder.call(torch.matmul, (batch, 6, DIM), frequencies, x)
    both = builder.call(torch.cat, (batch, 6, 2 * DIM), (angles, angles), dim=-1)
    hidden = builder.call(F.linear, (batch, 1, DIM), x, weight, bias)
    rows = builder.call(torch.flatten, (batch, DIM), hidden, 0, 1)
    out = builder.call(torch.addmm, (batch, DIM), bias, rows, weight)
    return builder.finish(both, hidden, out, builder.call(torch.matmul, (DIM,), weight, bias))


def run(graph_module: GraphModule, plan: RewritePlan, *passes: Any) -> GraphModule:
    for step in passes:
        graph_module = step(graph_module, plan)
        graph_module.graph.lint()
    return graph_module


class TestSnapshots(expecttest.TestCase):
    def test_own_cache(self) -> None:
        graph_module, plan = decode_graph()
        self.assertExpectedInline(
            text(run(graph_module, plan, own_cache)),
            """\
cat = cat([past_k0, k0])
cat_1 = cat([past_v0, v0])
scaled_dot_product_attention = scaled_dot_product_attention(q0, cat, cat_1)
matmul = matmul(scaled_dot_product_attention, scaled_dot_product_attention)
return (matmul, None, None)
""",
        )
        assert plan.held_outputs == {1: (0, "keys"), 2: (0, "values")}

    def test_fill_in_sizes(self) -> None:
        builder = GraphBuilder()
        past, new = builder.input("past", 1, HEADS, PAST, DIM), builder.input("new", 1, HEADS, 1, DIM)
        size = builder.call(torch.Tensor.size, (), past)
        size.meta["example_value"] = torch.Size((1, HEADS, PAST, DIM))
        length, total = builder.call(operator.getitem, (), size, 2), builder.graph.call_function(operator.add)
        total.args = (length, 1)
        length.meta["example_value"], total.meta["example_value"] = PAST, PAST + 1
        positions = builder.call(torch.arange, (PAST + 1,), total)
        graph_module = builder.finish(builder.call(torch.cat, (1, HEADS, PAST + 1, DIM), [past, new], -2), positions)
        assert fill_in_sizes(graph_module) == 2
        assert not size.users
        self.assertExpectedInline(
            text(graph_module),
            """\
size = size(past)
arange = arange(41)
cat = cat([past, new], -2)
return (cat, arange)
""",
        )

    def test_trust_indices(self) -> None:
        """Indices from sizes, from an input, and a slice; and a table that is no padding."""
        builder = GraphBuilder()
        padding, ids = builder.input("padding", 3, PAST), builder.input("ids", 3)
        ids.meta["example_value"] = ids.meta["example_value"].long()
        table = builder.input("table", 3, PAST)
        padding.meta["example_value"] = padding.meta["example_value"].bool()
        row, column = builder.call(torch.arange, (3,), 3), builder.call(torch.arange, (3,), 3)
        for made in (row, column):
            made.meta["example_value"] = made.meta["example_value"].long()
        looked_up = [
            (padding, (row, column)),
            (padding, (ids, column)),
            (padding, (row, slice(None))),
            (table, (row, column)),
        ]
        graph_module = builder.finish(*(builder.call(operator.getitem, (3,), *both) for both in looked_up))
        trust_indices(graph_module)
        self.assertExpectedInline(
            text(graph_module),
            """\
arange = arange(3)
arange_1 = arange(3)
getitem = aten._unsafe_index.Tensor(padding, [arange, arange_1])
getitem_1 = getitem(padding, (ids, arange_1))
getitem_2 = getitem(padding, (arange, slice(None, None, None)))
getitem_3 = getitem(table, (arange, arange_1))
return (getitem, getitem_1, getitem_2, getitem_3)
""",
        )

    def test_rewrite_attention_and_store(self) -> None:
        graph_module, plan = decode_graph()
        self.assertExpectedInline(
            text(run(graph_module, plan, own_cache, rewrite_attention, store)),
            """\
decode_attention_default = specache.decode_attention.default(q0, k0, v0, None, None, cursor, slots_0, slot_index_0, [codes_0, key_params_0, value_params_0, center_0, sink_pairs_0, sink_index_0, recent_0], [1, 1, 1], 0.25, None, 0.0)
getitem = getitem(decode_attention_default, 0)
matmul = matmul(getitem, getitem)
append_default = specache.append.default(k0, v0, None, cursor, codes_0, key_params_0, value_params_0, center_0, sink_pairs_0, sink_index_0, recent_0, 1, 1, True, middles)
offload_default = specache.offload.default(k0, v0, None, cursor, host_0)
return (matmul, None, None)
""",  # noqa: E501
        )
        assert [source.source for source in plan.inputs] == ["argument"] * 3 + ["cursor"] + ["state"] * 10

    def test_prefetch_and_overlap(self) -> None:
        graph_module, plan = decode_graph(layers=2)
        passes = (own_cache, rewrite_attention, store, prefetch)
        graph_module = run(graph_module, plan, *passes, overlap)
        launches = [n for n in graph_module.graph.nodes if n.op == "call_function" and "getitem" not in n.name]
        self.assertExpectedInline(
            "\n".join(f"{n.name}{n.args if is_wait(n) else ''}" for n in launches),
            """\
offload_default
offload_default_1
wait_default(q0, cursor, slots_0, slot_index_0, selected_0)
decode_attention_default
select_topk_default
prefetch_default
append_default
matmul
wait_default_1(q1, cursor, slots_1, slot_index_1, selected_1)
decode_attention_default_1
select_topk_default_1
prefetch_default_1
append_default_1
matmul_1""",
        )

    def test_a_prefill_keeps_its_attention_and_stores(self) -> None:
        builder = GraphBuilder()
        out, keys, values = attention(builder, 0, 40, 0)
        graph_module = builder.finish(out, keys, values)
        plan = plan_for(builder, PREFILL, graph_module)
        self.assertExpectedInline(
            text(run(graph_module, plan, own_cache, rewrite_attention, store, clean_up)),
            """\
scaled_dot_product_attention = scaled_dot_product_attention(q0, k0, v0)
append_default = specache.append.default(k0, v0, None, cursor, codes_0, key_params_0, value_params_0, center_0, sink_pairs_0, sink_index_0, recent_0, 1, 1, True, middles)
offload_default = specache.offload.default(k0, v0, None, cursor, host_0)
return (scaled_dot_product_attention, None, None)
""",  # noqa: E501
        )


def refusal(update: str = "cat", held: bool = True, **changes: Any) -> str:
    builder = GraphBuilder()
    out, keys, values = attention(builder, 0, 1, PAST, update)
    for name, value in changes.items():
        out.kwargs = {**out.kwargs, name: value}
    outputs = (out, keys, values)
    graph_module = builder.finish(*outputs)
    before = text(graph_module)
    read = found(builder, graph_module) if held else find_attention(graph_module)
    assert text(graph_module) == before, "finding must not change the graph"
    assert read.sites == ()
    return read.left_alone[0].reason


def test_find_attention_refuses_what_no_tier_op_expresses() -> None:
    assert "no concatenation of past and new ones: use DynamicCache" in refusal(update="add")
    assert "uncompiled model" in refusal(held=False)
    assert "dropout" in refusal(dropout_p=0.1)


def test_find_attention_refuses_a_past_that_is_read_elsewhere() -> None:
    builder = GraphBuilder()
    out, keys, values = attention(builder, 0, 1, PAST)
    past = keys.args[0][0]
    other = builder.call(torch.neg, (BATCH, HEADS, PAST, DIM), past)
    read = found(builder, builder.finish(out, keys, values, other))
    assert "read elsewhere" in read.left_alone[0].reason


def test_find_attention_refuses_a_graph_that_replaces_an_inputs_memory() -> None:
    builder = GraphBuilder()
    out, keys, values = attention(builder, 0, 1, PAST)
    builder.graph.call_method("set_", (builder.input("weight", 3), builder.input("packed", 3)))
    read = found(builder, builder.finish(out, keys, values))
    assert read.sites == ()
    assert "packed in its first call" in read.left_alone[0].reason


NEWEST = (slice(None), slice(None), slice(-8, None), slice(None))


@pytest.mark.parametrize(
    ("function", "more", "reason"),
    [(operator.getitem, (NEWEST,), "WINDOW"), (torch.round, (), "KEPT_CHANGED"), (None, (), "NOT_KEPT")],
)
def test_find_attention_leaves_alone_what_its_cache_does_not_keep_unchanged(
    function: Any, more: tuple[Any, ...], reason: str
) -> None:
    """A window keeps the newest tokens; other caches keep values computed from keys and values, or nothing."""
    builder = GraphBuilder()
    out, *pairs = attention(builder, 0, 1, PAST)
    kept = [builder.call(function, (BATCH, HEADS, PAST + 1, DIM), pair, *more) for pair in pairs if function]
    assert found(builder, builder.finish(out, *kept)).left_alone[0].reason == vars(reasons)[reason]


@pytest.mark.parametrize(("size", "expected"), [(DIM // 2, "vector"), (DIM // 4, "vector"), (DIM, None)])
def test_frequencies_are_a_vector_that_fits_the_channels_and_no_length(size: int, expected: str | None) -> None:
    builder = GraphBuilder()
    length = builder.graph.placeholder("length")
    length.meta["example_value"] = PAST
    vector, keys = builder.input("vector", size), builder.input("keys", PAST, DIM)
    positions = builder.call(torch.arange, (PAST,), length)
    angles = builder.call(torch.outer, (PAST, size), positions, vector)
    turned = builder.call(torch.mul, (PAST, DIM), keys, builder.call(torch.cos, (PAST, size), angles))
    assert frequencies_of(turned, DIM) == expected


@pytest.mark.parametrize("step", [own_cache, rewrite_attention, store, prefetch, overlap])
def test_a_pass_leaves_a_graph_without_sites_as_it_is(step: Any) -> None:
    builder = GraphBuilder()
    x = builder.input("x", 3)
    graph_module = builder.finish(builder.call(torch.neg, (3,), x))
    before = text(graph_module)
    assert text(run(graph_module, plan_for(builder, DECODE), step)) == before


def test_lanes_of_a_batch_that_is_a_symbol() -> None:
    """The batch stays a symbol. On torch 2.11 vmap's rules for products fail, and torch.matmul makes it constant."""
    graph_module = products_graph(batch=3)
    x, guess = torch.randn(3, 1, DIM), torch.randn(3, 1, DIM)
    rest = [torch.randn(3, 6, 1), torch.randn(DIM, DIM), torch.randn(DIM)]
    expected = [torch.stack(pair) for pair in zip(graph_module(x, *rest), graph_module(guess, *rest), strict=True)]
    assert own_rules(graph_module) == 4
    add_unused_lane(graph_module)

    def two_lanes(x: torch.Tensor, guess: torch.Tensor, *rest: torch.Tensor) -> list[Any]:
        return run_lanes(graph_module, [x, *rest], 0, guess)

    fakes = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = [fakes.from_tensor(tensor) for tensor in (x, guess, rest[0])]
    static = [fakes.from_tensor(tensor, static_shapes=True) for tensor in rest[1:]]
    batch = symbolic[0].shape[0]
    with fakes:
        widened = make_fx(two_lanes)(*symbolic, *static)
    assert isinstance(batch, torch.SymInt)
    assert batch.node.maybe_as_int() is None
    torch.testing.assert_close(widened(x, guess, *rest), expected)
    products = [str(node.target) for node in widened.graph.nodes if "mm" in str(node.target)]
    assert sorted(products) == ["aten.addmm.default", "aten.addmm.default", "aten.bmm.default"]


def add_unused_lane(graph_module: GraphModule) -> None:
    """Add the input that positions would use."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    with graph_module.graph.inserting_after(placeholders[-1]):
        graph_module.graph.placeholder("lane")
    graph_module.recompile()


@pytest.mark.parametrize(("x_dim", "weight_dim"), [(0, None), (1, None), (0, 0), (1, 0), (None, 0)])
def test_products_under_vmap(x_dim: int | None, weight_dim: int | None) -> None:
    """Lanes of rows, of an expert's weights, or of both give the results of single lanes."""
    x, weight, bias = torch.randn(2, 2, 4, DIM), torch.randn(2, 6, DIM), torch.randn(2, 6)
    matrices = torch.randn(5, 2, 6, DIM)  # one axis more than a lane of x
    dims = (x_dim, weight_dim, weight_dim)

    def both(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows_times(x, weight, bias), product(x, weight.mT), product(x, matrices.mT)

    given = [tensor if dim is not None else tensor[0] for tensor, dim in zip((x, weight, bias), dims, strict=True)]
    lanes = [
        both(*(tensor if dim is None else tensor.select(dim, lane) for tensor, dim in zip(given, dims, strict=True)))
        for lane in range(2)
    ]
    expected = tuple(torch.stack(pair) for pair in zip(*lanes, strict=True))
    torch.testing.assert_close(torch.vmap(both, dims)(*given), expected)


def test_clean_up_drops_dead_nodes_and_inputs_but_nothing_that_writes() -> None:
    builder = GraphBuilder()
    x, unused = builder.input("x", 3), builder.input("unused", 3)
    builder.call(torch.neg, (3,), unused)
    graph_module = builder.finish(builder.call(torch.neg, (3,), x))
    plan = plan_for(builder, DECODE)
    run(graph_module, plan, clean_up)
    assert plan.inputs == [Input("argument", argument=0)]
    graph_module, plan = decode_graph()
    graph_module = run(graph_module, plan, own_cache, rewrite_attention, store, prefetch)
    copies = [n.target for n in graph_module.graph.nodes if is_copy(n) or is_wait(n)]
    run(graph_module, plan, clean_up)
    assert [n.target for n in graph_module.graph.nodes if is_copy(n) or is_wait(n)] == copies
    assert output_node(graph_module).args[0][1:] == (None, None)
