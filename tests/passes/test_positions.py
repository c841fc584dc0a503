"""Decode graphs whose results depend on token positions, and graphs whose results do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import SymInt
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphs import GraphBuilder
from specache_compile.passes.reading.positions import has_no_positions

DECODE = torch.ops.specache.decode_attention.default


def add_input(builder: GraphBuilder, name: str, value: Any) -> Node:
    node = builder.input(name, 1)
    node.meta["example_value"] = value
    return node


def integers(builder: GraphBuilder, *shape: int, dtype: torch.dtype = torch.int64) -> Any:
    with builder.mode:
        return torch.empty(shape, dtype=dtype)


def graph(where: str) -> tuple[GraphModule, Node]:
    """Return a token's attention, with a possible position at `where`."""
    builder = GraphBuilder()
    ids = add_input(builder, "ids", integers(builder, 1, 1))
    cursor = add_input(builder, "cursor", integers(builder, 1, 4))
    tiers = [builder.input(name, 1, 2, 8, 4) for name in ("slots", "codes")]
    hidden = builder.call(torch.embedding, (1, 2, 1, 4), builder.input("table", 9, 4), ids)
    mask = add_input(builder, "mask", integers(builder, 1, 8))
    kept = builder.call(torch.bitwise_not, (1, 1, 1, 8), mask)
    kept.meta["example_value"] = integers(builder, 1, 1, 1, 8, dtype=torch.bool)
    if where == "a bias":
        kept = builder.call(torch.mul, (1, 1, 1, 8), mask, 0.5)
    elif where == "queries":
        hidden = builder.call(torch.add, (1, 2, 1, 4), hidden, add_input(builder, "position", integers(builder, 1, 1)))
    elif where == "queries, by way of others":
        hidden = builder.call(torch.add, (1, 2, 1, 4), hidden, mask)
    elif where in ("a length", "the rows"):
        length = add_input(builder, "length", FakeTensorMode(shape_env=ShapeEnv()).shape_env.create_unbacked_symint())
        assert isinstance(length.meta["example_value"], SymInt)
        if where == "the rows":
            ids.meta["example_value"] = torch.empty((length.meta["example_value"], 1), device="meta", dtype=torch.int64)
        hidden = builder.call(torch.add, (1, 2, 1, 4), hidden, length)
    elif where == "a write":
        builder.call(torch.Tensor.copy_, (1, 2, 1, 4), tiers[0], mask)
    query = hidden if where == "queries" else builder.call(torch.neg, (1, 2, 1, 4), hidden)
    out = builder.call(DECODE, (1, 2, 1, 4), query, query, query, kept, None, cursor, *tiers)
    return builder.finish(out), ids


@pytest.mark.parametrize("where", ["a mask of truth values", "the rows"])
def test_what_is_no_position(where: str) -> None:
    assert has_no_positions(*graph(where))


@pytest.mark.parametrize("where", ["a bias", "queries", "queries, by way of others", "a length", "a write"])
def test_what_may_be_a_position(where: str) -> None:
    assert not has_no_positions(*graph(where))
