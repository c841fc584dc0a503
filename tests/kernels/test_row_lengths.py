"""Rows of different lengths: every op gives each row of a batch the result of that row alone.

This covers definitions, C++ and Triton (on a GPU if there is one, else interpreted).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from implementations import KINDS, Ops
from torch import Tensor

from held_tiers import adjacent, empty_state, untouched
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.kernels.state.cursor import host_record
from specache_compile.kernels.state.layout import StoredTiers
from specache_compile.kernels.state.sinks import find_sinks
from specache_compile.methods.field import LayerShape, LayerState
from specache_compile.methods.specache import SpecacheOptions
from specache_compile.runtime.state import fields_of

HEADS, QUERIES, DIM, LANES, TOP_K = 2, 2, 32, 2, 8
# Prompts with an empty low-bit tier, with some tokens in it, and with almost a window more, so that a step moves only
# one row's group. Then the number of steps.
PROMPTS, STEPS = (7, 150, 94), 4
EVERY = range(3)
LENGTHS = tuple(prompt + STEPS for prompt in PROMPTS)
OPTIONS = {
    "rotated": SpecacheOptions(bits=1.5, group_size=32, residual_length=32, top_k=TOP_K, sink_tokens=3),
    "centered": SpecacheOptions(
        setting="paper", bits=2, center="always", value_code="levels", group_size=32, residual_length=32, top_k=TOP_K
    ),
    "keys in a trellis": SpecacheOptions(bits=1, group_size=32, residual_length=32, top_k=TOP_K, sink_tokens=3),
    "16 bits": SpecacheOptions(bits=16, group_size=32, residual_length=32, top_k=TOP_K),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Ops:
    return Ops(request.param)


@functools.cache
def pairs(row: int, dim: int = DIM) -> Tensor:
    """Return all pairs [1, H, n, 2, d] of a row; keys have a mean, for centering."""
    generator = torch.Generator().manual_seed(row)
    found = torch.randn(1, HEADS, LENGTHS[row] + 1, 2, dim, generator=generator)
    found[:, :, :, 0] += 3 * torch.randn(dim, generator=torch.Generator().manual_seed(9))
    return found


def cursor_of(
    options: SpecacheOptions, lengths: Sequence[int], tokens: Sequence[int], new: int, device: Any,
    table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the cursor of a step of `new` tokens, some of which are real in each row. table: None for a page each."""
    rows = [
        [length + count - new, options.low_bit_length(length), options.low_bit_length(length + count)]
        for length, count in zip(lengths, tokens, strict=True)
    ]
    table = adjacent(len(rows), 256) if table is None else table
    cursor = torch.cat([torch.tensor(rows), table], 1).to(device)
    if cursor.is_cuda:
        host_record(cursor).lengths = tuple(row[0] for row in rows)
    return cursor


def empty(kind: Ops, options: SpecacheOptions, rows: int) -> LayerState:
    shape = LayerShape(HEADS, DIM, torch.float32, kind.device)
    state = empty_state(options, shape, rows, 256)
    state["host"].view(torch.uint8).fill_(0x7F)  # elements that no op stores must stay so
    return state


def filled(kind: Ops, options: SpecacheOptions, rows: Sequence[int]) -> LayerState:
    """Return a layer's state for these rows, after a left-padded prompt and steps of one token."""
    state = empty(kind, options, len(rows))
    longest = max(PROMPTS[row] for row in rows)
    frequencies = (0.9 ** torch.arange(DIM // 2)).to(kind.device)
    at = [0 for _ in rows]
    for step in range(1 + STEPS):
        new = longest if not step else 1
        counts = [PROMPTS[row] if not step else 1 for row in rows]
        padded = [
            torch.nn.functional.pad(pairs(row)[:, :, n : n + count], (0, 0, 0, 0, new - count, 0), value=torch.nan)
            for row, n, count in zip(rows, at, counts, strict=True)
        ]
        k, v = torch.cat(padded).to(kind.device).unbind(3)
        cursor = cursor_of(options, at, counts, new, kind.device)
        for place, (n, count) in enumerate(zip(at, counts, strict=True)):
            index = state["sink_index"][place : place + 1]
            find_sinks(index, None, options.low_bit_length(n), n + count)
        settings = (*options.layout, options.zero_point, frequencies)
        kind.append(k, v, None, cursor, *(state[name] for name in StoredTiers._fields), *settings)
        kind.offload(k, v, None, cursor, state["host"])
        at = [n + count for n, count in zip(at, counts, strict=True)]
    for place, row in enumerate(rows):  # some slots, of which the first is empty
        low_bit = options.low_bit_length(LENGTHS[row])
        tokens = torch.randperm(max(low_bit, 1), generator=torch.Generator().manual_seed(row))[: TOP_K - 1]
        tokens = tokens[tokens < low_bit]
        state["slot_index"][place, :, 1 : 1 + len(tokens)] = tokens.int().to(kind.device)
        state["slots"][place, :, 1 : 1 + len(tokens)] = pairs(row)[0, :, tokens].to(kind.device)
    return state


def alone(options: SpecacheOptions, state: LayerState, row: int) -> LayerState:
    fields = fields_of(options, LayerShape(HEADS, DIM, torch.float32, state["codes"].device))
    return {f.name: (state[f.name][row : row + 1] if f.by_row else state[f.name]).clone() for f in fields}


def equal(kind: Ops, ours: Any, theirs: Any) -> None:
    if kind.kind != "triton" or not ours.is_floating_point():
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    else:
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


# Triton's interpreter is slow.
ON_CPU = tuple(f"{what}-{layout}" for what in KINDS[:2] for layout in ("rotated", "centered", "16 bits"))


@pytest.mark.quick_for(*ON_CPU, "triton-centered")
@every_option
def test_a_row_is_stored_as_it_is_alone(kind: Ops, options: SpecacheOptions) -> None:
    """Bit for bit, and without the left padding."""
    together = filled(kind, options, EVERY)
    for row in EVERY:
        ours, theirs = alone(options, together, row), filled(kind, options, [row])
        for name, tensor in theirs.items():
            assert torch.equal(ours[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def query(row: int, lanes: int = LANES) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [1, Hq, lanes, d], k and v [1, H, lanes, d]."""
    generator = torch.Generator().manual_seed(50 + row)
    q = torch.randn(1, HEADS * QUERIES, lanes, DIM, generator=generator)
    return q, *torch.randn(2, 1, HEADS, lanes, DIM, generator=generator)


def attended(kind: Ops, options: SpecacheOptions, state: LayerState, rows: Sequence[int]) -> dict[str, Tensor]:
    """Return all attentions' results for these rows and one new token, batch first; logits only of the low-bit tier."""
    q, k, v = (torch.cat(parts).to(kind.device) for parts in zip(*map(query, rows), strict=True))
    cursor = cursor_of(options, [LENGTHS[row] for row in rows], [1 for _ in rows], 1, kind.device)
    read = ([state[name] for name in StoredTiers._fields], [int(x) for x in options.layout], DIM**-0.5, None)
    slots = (state["slots"], state["slot_index"])
    out, scores = kind.decode_attention(q, k, v, None, None, cursor, *slots, *read)
    logits, base, selection = kind.score_low_bit(q, k, v, None, None, cursor, *read)
    second = kind.attend_scored(q, k, v, None, None, cursor, logits, base, slots[1].flip(-1), *slots, *read)
    exact = kind.extend_attention(q, k, v, None, None, cursor, state["host"], DIM**-0.5, None)
    found = {"decode": out, "scores": scores, "selection": selection.movedim(1, 0), "corrected": second}
    return found if options.bits_on_host < 16 else {**found, "extend": exact}


@pytest.mark.quick_for(*ON_CPU, "triton-centered")
@every_option
def test_a_rows_attention_equals_that_of_the_row_alone(kind: Ops, options: SpecacheOptions) -> None:
    state = filled(kind, options, EVERY)
    together = attended(kind, options, state, EVERY)
    for row in EVERY:
        for name, expected in attended(kind, options, alone(options, state, row), [row]).items():
            equal(kind, together[name][row : row + 1], expected)


@pytest.mark.parametrize("kind", KINDS[:2], indirect=True)
def test_a_correction_copies_the_same_pairs_as_for_each_row_alone(kind: Ops) -> None:
    options = OPTIONS["rotated"]
    state, scores = filled(kind, options, EVERY), torch.rand(1, len(EVERY), HEADS, 256)
    separate = [alone(options, state, row) for row in EVERY]

    def correct(state: LayerState, rows: slice) -> Tensor:
        written = (state["slots"], state["slot_index"], state["corrected"])
        own = cursor_of(options, LENGTHS[rows], [1 for _ in EVERY][rows], 1, "cpu")
        return kind.correct(scores[:, rows].contiguous(), own, state["host"], *written, *[None] * 4)

    together = correct(state, slice(None))
    for row in EVERY:
        assert torch.equal(together[row], correct(separate[row], slice(row, row + 1))[0])
        assert torch.equal(state["slots"][row], separate[row]["slots"][0])
        low_bit = options.low_bit_length(LENGTHS[row])
        best = scores[0, row, :, :low_bit].topk(min(TOP_K, low_bit)).indices.sort(-1).values
        chosen, index = together[row].sort(-1).values, state["slot_index"][row]
        assert torch.equal(chosen[:, TOP_K - best.shape[-1] :], best.int())
        assert torch.equal(chosen, index.sort(-1).values)
        exact = pairs(row)[0].gather(1, index.long().clamp(0)[..., None, None].expand(-1, -1, 2, DIM))
        step = exact.abs().amax(-1, keepdim=True) / 254  # half of a rounded number's
        assert ((state["slots"][row] - exact).abs() <= step * 1.001)[index >= 0].all()


def test_a_definition_is_called_once_where_rows_are_alike() -> None:
    calls: list[int] = []

    @tiers.by_rows()
    def op(k: Tensor, cursor: Tensor, host: Tensor) -> None:
        calls.append(k.shape[0])

    run: Callable[[list[int]], None] = lambda lengths: op(  # noqa: E731
        torch.zeros(len(lengths), 1), torch.tensor([[n, 0, 0, 0] for n in lengths]), torch.zeros(1, 1, 256)
    )
    run([5, 5, 5])
    run([5, 5, 7])
    assert calls == [3, 2, 1]


IN_PAGES = ("codes", "key_params", "value_params", "host")


@every_option
def test_a_padding_row_touches_page_0_alone(kind: Ops, options: SpecacheOptions) -> None:
    """A row without tokens and pages, next to a real row."""
    state = empty(kind, options, 8)
    for name in IN_PAGES:
        state[name].view(torch.uint8).fill_(0x7F)
    k, v = (torch.full((2, HEADS, 1, DIM), 1.0, device=kind.device) for _ in range(2))
    table = torch.tensor([[0, 0], [4, 3]])
    cursor = cursor_of(options, [0, 0], [1, 1], 1, kind.device, table)
    rows = {name: tensor if name in IN_PAGES else tensor[:2] for name, tensor in state.items()}
    settings = (*options.layout, options.zero_point, None)
    kind.append(k, v, None, cursor, *(rows[name] for name in StoredTiers._fields), *settings)
    kind.offload(k, v, None, cursor, rows["host"])
    assert {page for page in range(8) if not untouched(state["host"][page])} == {0, 4}
    assert all(untouched(state[name]) for name in IN_PAGES[:3])
