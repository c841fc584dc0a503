"""Skipped values (`skip_below`) against float64 attention without the skipped tokens, and against the error bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from held_tiers import adjacent, cursor_over, empty_state
from specache_compile.kernels.attention.attention_ops import low_bit_keys, low_bit_values
from specache_compile.kernels.op import registered
from specache_compile.kernels.state.page_table import LOW_BIT_TIER, rows_read
from specache_compile.kernels.state.stored_tiers import StoredTiers
from specache_compile.methods.field import LayerShape
from specache_compile.methods.specache import SpecacheOptions

TOKENS, HEADS, RATIO, DIM, RECORD = 600, 2, 2, 64, 64
TABLE = adjacent(1, 1024)
OPTIONS = SpecacheOptions(rotate=False, sink_tokens=0, top_k=8)
OPS = [op.name for op in registered() if op.name.startswith(("decode_attention", "attend_scored"))]


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    """A step over keys of which every third record is small, so that its weights are small beside the others'."""
    torch.manual_seed(0)
    layer = LayerShape(HEADS, DIM, torch.float32, torch.device("cpu"))
    state = empty_state(OPTIONS, layer, 1, 1024)
    k, v = torch.randn(2, 1, HEADS, TOKENS, DIM).unbind(0)
    k = torch.where(torch.arange(TOKENS)[:, None] // RECORD % 3 == 1, 0.05 * k, k)
    cursor = cursor_over(TABLE, next_low_bit=OPTIONS.low_bit_length(TOKENS))
    torch.ops.specache.append(
        k, v, None, cursor, *(state[name] for name in StoredTiers._fields), *OPTIONS.layout, "middles"
    )
    cursor[:, 0], cursor[:, 1] = TOKENS, OPTIONS.low_bit_length(TOKENS)
    tiers = [state[name] for name in StoredTiers._fields]
    q = torch.randn(1, HEADS * RATIO, 1, DIM) * 4
    new_k, new_v = torch.randn(2, 1, HEADS, 1, DIM).unbind(0)
    return {"q": q, "k": new_k, "v": new_v, "keys": k, "values": v, "cursor": cursor, "tiers": tiers, "state": state}


def run(step: dict[str, Any], op: str, skip_below: float) -> Tensor:
    """Return the output of an op, of which `attend_scored` reads the logits of `score_low_bit`."""
    ops, layout = torch.ops.specache, list(OPTIONS.layout)
    cursor, state, pairs = step["cursor"], step["state"], [step[name] for name in "qkv"]
    slots = state["slots"], state["slot_index"].fill_(-1)
    last = (step["tiers"], layout, DIM**-0.5, None)
    if op.startswith("decode_attention"):
        return getattr(ops, op)(*pairs, None, None, cursor, *slots, *last, skip_below)[0]
    score = getattr(ops, op.replace("attend_scored", "score_low_bit"))
    logits, base, _ = score(*pairs, None, None, cursor, *last)
    return getattr(ops, op)(*pairs, None, None, cursor, logits, base, slots[1], *slots, *last, skip_below)


def rows_of(step: dict[str, Any]) -> StoredTiers:
    """Return the tiers with the low-bit tier's pages in one piece."""
    tiers = StoredTiers(*step["tiers"])
    return tiers._replace(**{name: rows_read(getattr(tiers, name), TABLE) for name in LOW_BIT_TIER})


def reference(step: dict[str, Any], skip_below: float) -> tuple[Tensor, int]:
    """Return the attention in float64 without the records of small weights, and their number."""
    low_bit = OPTIONS.low_bit_length(TOKENS)
    tiers = rows_of(step)
    exact = slice(low_bit, TOKENS)
    keys, values = (
        torch.cat([low(tiers, OPTIONS.layout, DIM, 0, low_bit), step[whole][:, :, exact], step[new]], 2).double()
        for low, whole, new in ((low_bit_keys, "keys", "k"), (low_bit_values, "values", "v"))
    )
    query = step["q"].double().view(HEADS, RATIO, DIM) * DIM**-0.5
    weights = (query @ keys[0].mT).softmax(-1)  # [H, G, n]
    skipped = 0
    for head in range(HEADS):
        for first in range(0, low_bit, RECORD):
            record = weights[head, :, first : min(first + RECORD, low_bit)]
            if skip_below and (record < skip_below).all():
                record.zero_()
                skipped += 1
    out = weights @ values[0] / weights.sum(-1, keepdim=True)
    return out.view(1, HEADS * RATIO, 1, DIM), skipped


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("skip_below", [0.0, 1e-3, 1e-2])
def test_records_of_small_weights_are_left_out(step: dict[str, Any], op: str, skip_below: float) -> None:
    expected, skipped = reference(step, skip_below)
    assert (skipped > 0) == (skip_below > 0)
    assert skipped < 2 * OPTIONS.low_bit_length(TOKENS) // RECORD
    torch.testing.assert_close(run(step, op, skip_below).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_what_is_left_is_normalised_however_little_it_is(step: dict[str, Any], op: str) -> None:
    """The new token alone is left, with a weight that float32 cannot tell from 0 beside the others'."""
    low_bit, state = OPTIONS.low_bit_length(TOKENS), step["state"]
    cursor = cursor_over(TABLE, low_bit, low_bit, low_bit)
    few = {**step, "cursor": cursor, "q": torch.zeros_like(step["q"]), "k": torch.zeros_like(step["k"])}
    few["q"][..., 0], few["k"][..., 0] = 100.0, -100.0
    keys = state["key_params"].clone()
    state["key_params"].zero_()
    out = run(few, op, 0.9)
    state["key_params"].copy_(keys)
    torch.testing.assert_close(out, step["v"].repeat_interleave(RATIO, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_the_error_is_within_its_bound(step: dict[str, Any], op: str) -> None:
    whole, skip_below = reference(step, 0.0)[0], 1e-3
    largest = low_bit_values(rows_of(step), OPTIONS.layout, DIM, 0, 512).abs().max()
    error = (run(step, op, skip_below).double() - whole).abs().max()
    assert 0 < error < 2 * OPTIONS.low_bit_length(TOKENS) * skip_below * largest
