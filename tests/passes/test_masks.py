"""Masks are classified by their values at several sizes, not by their form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from transformers import LlamaForCausalLM

from conftest import compile_copy, greedy, left_padding, prompt, step
from families import BY_NAME
from specache_compile.compat import cache_of
from specache_compile.passes.reading.masks import read_mask
from specache_compile.passes.reading.nodes import output_node
from specache_compile.runtime.records import find_record

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

PAST = 9


def positions(x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions of the new tokens [1, 1, T, 1] and of all tokens [1, 1, 1, n]; x [B, T], past [B, n - T]."""
    q = torch.arange(x.shape[1]) + past.shape[1]
    return q[None, None, :, None], torch.arange(past.shape[1] + x.shape[1])[None, None, None]


def causal(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    q, kv = positions(x, past)
    return (kv <= q).expand(x.shape[0], -1, -1, -1)


def padded(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])[:, None, None, None]
    return causal(x, past, padding) & padding.bool()[rows, positions(x, past)[1]]


def additive(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    return torch.where(padded(x, past, padding), 0.0, torch.finfo(torch.float32).min)


def window(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    """A window of 64 tokens, which is purely causal at the test's sizes."""
    q, kv = positions(x, past)
    return causal(x, past, padding) & (kv > q - 64)


def window_from_the_end(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    """A window like `window` for the last token, whose first token is a size."""
    return causal(x, past, padding) & (positions(x, past)[1] >= past.shape[1] - 64)


def chunks(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    q, kv = positions(x, past)
    return causal(x, past, padding) & (kv // 50 == q // 50)


def blocks(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    """Sixteen blocks of 64 tokens: a window of 1,024, a number that is not in the graph."""
    q, kv = positions(x, past)
    return causal(x, past, padding) & (q // 64 - kv // 64 < 16)


def scaled(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    q, kv = positions(x, past)
    return causal(x, past, padding) & ((q - kv) * 0.25 < 64)


def hidden_in_place(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    return causal(x, past, padding).clone().logical_and_(padding.bool()[:, None, None, :])


def hidden_by_a_view(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    mask = causal(x, past, padding).clone()
    mask[..., : padding.shape[1]] = mask[..., : padding.shape[1]] & padding.bool()[:, None, None, :]
    return mask


def both_ways(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    q, kv = positions(x, past)
    return (kv <= q) | (kv >= 0)


def distance(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    """ALiBi's bias: visibility is causal, with unequal weights."""
    q, kv = positions(x, past)
    return torch.where(kv <= q, (kv - q) * 0.5, -math.inf)


def of_the_first_row(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    return causal(x, past, padding) & padding.bool()[:1, None, None, :].expand(x.shape[0], -1, -1, -1)


def of_the_tokens(x: Tensor, past: Tensor, padding: Tensor) -> Tensor:
    return causal(x, past, padding) & (torch.cat([past, x], 1) > 0)[:, None, None, :]


def reading(make: Callable[..., Tensor], batch: int, new: int, dynamic: bool) -> tuple[bool, str | None]:
    """Return the result of `read_mask` for the mask of `make`, in the graph that Dynamo captures."""
    found: list[tuple[bool, Node | None]] = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        found.append(read_mask(output_node(graph_module).args[0][0]))  # type: ignore[index]
        return graph_module

    inputs = (torch.ones(batch, new).long(), torch.ones(batch, PAST).long(), torch.ones(batch, PAST + new).long())
    torch.compile(make, backend=backend, dynamic=dynamic)(*inputs)
    causal, padding = found[0]
    return causal, None if padding is None else str(padding.target)


UNREADABLE = [
    window, window_from_the_end, chunks, blocks, scaled, hidden_in_place, hidden_by_a_view, distance, of_the_tokens,
]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "new", "dynamic"),
    [(1, 1, False), (3, 1, True), (1, 4, True), (3, 4, True), (3, 4, False)],
    ids=["decode of a row", "decode", "extend of a row", "extend", "extend of fixed sizes"],
)
@pytest.mark.parametrize(("make", "padding"), [(causal, None), (padded, "L_padding_"), (additive, "L_padding_")])
def test_a_causal_mask_is_read_with_the_input_that_padding_comes_from(
    make: Callable[..., Tensor], padding: str | None, batch: int, new: int, dynamic: bool
) -> None:
    assert reading(make, batch, new, dynamic) == (True, padding)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("make", UNREADABLE)
def test_a_mask_beyond_causality_and_padding_stays(make: Callable[..., Tensor], batch: int, new: int) -> None:
    assert reading(make, batch, new, dynamic=True) == (False, None)


def test_a_mask_that_shows_the_future_stays_one() -> None:
    assert reading(both_ways, 2, 4, dynamic=True) == (False, None)
    assert reading(both_ways, 2, 1, dynamic=True) == (True, None), "one token has no future"


def test_padding_of_another_row_stays_a_mask() -> None:
    assert reading(of_the_first_row, 3, 4, dynamic=True) == (False, None)


def masks_of_prefills(model: Any) -> dict[bool, list[bool]]:
    """Return whether each SDPA has a mask, for graphs of padded prefills by whether the mask is all ones."""
    record = find_record(model)
    return {
        made.variant.unpadded: [node.kwargs.get("attn_mask") is not None for node in made.graph_module.graph.nodes
                                if node.target is torch.nn.functional.scaled_dot_product_attention]
        for graph in record.graphs
        if graph.captured.phase.name == "prefill" and graph.captured.padding is not None
        for made in graph.rewrites.made.values()
    }  # fmt: skip


@pytest.mark.quick_for("full")
@pytest.mark.parametrize(("name", "exact", "all"), [("qwen3", 0, 1), ("gemma3_text", 1, 2)], ids=["full", "windows"])
def test_a_prefill_that_pads_nothing_takes_no_mask(name: str, exact: int, all: int) -> None:
    """`generate` before transformers 5.18, and direct calls, pass such masks. A left-padded batch has another graph; a
    layer with a window keeps its mask."""
    model = BY_NAME[name].one_layer.model()
    twin = compile_copy(model)
    ids = prompt(40, 2)
    for hidden in (0, 13, 0):
        mask = left_padding(ids, 0, hidden)
        there, place = mask == 1, (mask.cumsum(1) - 1).clamp(min=0)
        found, expected = (step(each, ids, attention_mask=mask, position_ids=place).logits for each in (twin, model))
        torch.testing.assert_close(found[there], expected[there], atol=1e-3, rtol=0)
        assert torch.equal(greedy(twin, ids, 4, attention_mask=mask), greedy(model, ids, 4, attention_mask=mask))
    assert {form: sum(masks) for form, masks in masks_of_prefills(twin).items()} == {True: exact, False: all}


@pytest.mark.parametrize("pad", [5, 32])
def test_left_padding_changes_nothing_in_lossy_tiers(llama: LlamaForCausalLM, pad: int) -> None:
    """By whole groups, and by a part of one: each sequence has its own length, and padding is not stored."""
    twin, text, logits = compile_copy(llama, top_k=2), prompt(128, 2), []
    for front in (0, pad):
        ids = torch.cat([torch.zeros(2, front, dtype=torch.int64), text], 1)
        mask = left_padding(ids, front, front)
        place, cache, steps = (mask.cumsum(1) - 1).clamp(min=0), None, []
        for start, stop in ((0, front + 96), *((t, t + 1) for t in range(front + 96, front + 128))):
            given = {"attention_mask": mask[:, :stop], "position_ids": place[:, start:stop]}
            out = step(twin, ids[:, start:stop], cache, **given)
            cache = cache_of(out)
            steps.append(out.logits[:, -1])
        logits.append(torch.stack(steps))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
