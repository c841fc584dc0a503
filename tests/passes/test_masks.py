"""Masks are classified by their values at several sizes, not by their form."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from conftest import compile_copy, greedy, greedy_unmasked, prompt, tiny_llama
from families import BY_NAME
from specache_compile.compat import cache_of, with_cache
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
SHAPES = pytest.mark.parametrize(
    ("batch", "new", "dynamic"),
    [(1, 1, False), (3, 1, True), (1, 4, True), (3, 4, True), (3, 4, False)],
    ids=["decode of a row", "decode", "extend of a row", "extend", "extend of fixed sizes"],
)


@SHAPES
def test_a_causal_mask_is_none(batch: int, new: int, dynamic: bool) -> None:
    assert reading(causal, batch, new, dynamic) == (True, None)


@SHAPES
@pytest.mark.parametrize("make", [padded, additive])
def test_padding_is_read_with_the_input_that_it_comes_from(
    make: Callable[..., Tensor], batch: int, new: int, dynamic: bool
) -> None:
    assert reading(make, batch, new, dynamic) == (True, "L_padding_")


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


@pytest.mark.slow
def test_a_model_that_makes_causal_masks_prefills_without_one() -> None:
    """Versions before 5.23 do this without `generate`; here `make` does it."""
    llama = tiny_llama()
    twin = compile_copy(llama)
    ids = prompt(40, 2)
    with torch.no_grad():
        mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
        expected = llama(ids, attention_mask=mask).logits
        torch.testing.assert_close(twin(ids, attention_mask=mask, use_cache=True).logits, expected, atol=1e-3, rtol=0)
    assert torch.equal(greedy_unmasked(twin, ids, 4), greedy_unmasked(llama, ids, 4))
    record = find_record(twin)
    assert record is not None
    prefills = [graph for graph in record.graphs if graph.phase == "prefill"]
    for graph in prefills:
        sdpa = graph.rewrites.modules["prefill"].graph.find_nodes(
            op="call_function", target=torch.nn.functional.scaled_dot_product_attention
        )
        given = any(site.mask is not None for site in graph.captured.sites)  # a mask that is an input is unknown
        assert all((node.kwargs.get("attn_mask") is None) != given for node in sdpa)
        assert given or all(node.kwargs["is_causal"] and node.kwargs["enable_gqa"] for node in sdpa)


def masks_of_prefills(model: Any) -> dict[bool, list[bool]]:
    """Return whether each SDPA has a mask, for graphs of padded prefills by whether the mask is all ones."""
    record = find_record(model)
    assert record is not None
    return {
        made.variant.unpadded: [node.kwargs.get("attn_mask") is not None for node in made.graph_module.graph.nodes
                                if node.target is torch.nn.functional.scaled_dot_product_attention]
        for graph in record.graphs
        if graph.phase == "prefill" and graph.captured.padding is not None
        for made in graph.rewrites.made.values()
    }  # fmt: skip


@pytest.mark.quick_for("full")
@pytest.mark.parametrize(("name", "exact", "all"), [("qwen3", 0, 1), ("gemma3_text", 1, 2)], ids=["full", "windows"])
def test_a_prefill_that_pads_nothing_takes_no_mask(name: str, exact: int, all: int) -> None:
    """`generate` before transformers 5.18, and direct calls, pass such masks. A left-padded batch has another graph; a
    layer with a window keeps its mask."""
    model = BY_NAME[name].one_layer.model()
    twin = compile_copy(model)
    ids, ones = prompt(40, 2), torch.ones(2, 40, dtype=torch.int64)
    left = ones.clone()
    left[1, :13] = 0
    for mask in (ones, left, ones):
        there, place = mask == 1, (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            found, expected = (
                each(ids, attention_mask=mask, position_ids=place, use_cache=True).logits for each in (twin, model)
            )
        torch.testing.assert_close(found[there], expected[there], atol=1e-3, rtol=0)
        assert torch.equal(greedy(twin, ids, 4, attention_mask=mask), greedy(model, ids, 4, attention_mask=mask))
    assert {form: sum(masks) for form, masks in masks_of_prefills(twin).items()} == {True: exact, False: all}


# Padding in lossy tiers

GROUP, ROWS = 32, 64


@functools.cache
def distances(bits: int, pad: int) -> tuple[Tensor, Tensor]:
    """Return the low-bit model's logits [rows, steps, vocabulary], and each row's distance to the uncompiled model's.

    The steps are a whole group, so that the border of a group affects each padding equally.
    """
    llama = tiny_llama()
    options = {"bits": bits, "group_size": GROUP, "residual_length": 32, "top_k": 2}
    twin = compile_copy(llama, **options)
    text = prompt(96 + GROUP, ROWS)
    ids = torch.cat([torch.zeros(ROWS, pad, dtype=torch.int64), text], 1)
    mask = torch.ones_like(ids)
    mask[:, :pad] = 0
    place = (mask.cumsum(1) - 1).clamp(min=0)

    def forced(model: Any) -> Tensor:
        cache, logits = None, []
        for start, stop in ((0, pad + 96), *((t, t + 1) for t in range(pad + 96, ids.shape[1]))):
            given = {"attention_mask": mask[:, :stop]} if pad else {}
            out = model(
                ids[:, start:stop], position_ids=place[:, start:stop], **with_cache(cache), use_cache=True, **given
            )
            cache = cache_of(out)
            logits.append(out.logits[:, -1:])
        return torch.cat(logits[1:], 1)

    with torch.no_grad():
        ours, theirs = forced(twin), forced(llama)
    return ours, (ours - theirs).abs().mean((1, 2))


@pytest.mark.quick_for
@pytest.mark.parametrize("bits", [1, 2])
def test_padding_by_whole_groups_changes_nothing(bits: int) -> None:
    torch.testing.assert_close(distances(bits, GROUP)[0], distances(bits, 0)[0], atol=1e-4, rtol=0)


@pytest.mark.quick_for
@pytest.mark.parametrize("bits", [1, 2])
def test_padding_by_part_of_a_group_is_no_further_from_the_full_cache(bits: int) -> None:
    """Over 64 paired rows, the 95 % interval of the mean difference includes zero."""
    unpadded = distances(bits, 0)[1]
    for pad in (5, 19):
        further = distances(bits, pad)[1] - unpadded
        assert further.mean() - 1.96 * further.std() / math.sqrt(ROWS) <= 0
        assert further.mean().abs() < 0.05 * unpadded.mean()
