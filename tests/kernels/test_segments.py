"""The pairs of a whole cache by token, in segments and contiguous."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from held_tiers import in_order, in_segments
from specache_compile.evaluation.baselines import kcache
from specache_compile.kernels.movement import copy_stream, cpp_tiers
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.kernels.state import segments
from specache_compile.kernels.state.cursor import LENGTH, new_cursor

pytestmark = pytest.mark.pairwise

ROWS, HEADS, CAPACITY, CHANNELS = 2, 3, 1024, 4
# Within one segment, at its borders, over several segments.
RANGES = [(0, 1), (5, 200), (0, 256), (250, 256), (255, 257), (256, 768), (3, 1024), (0, 1024)]
NOTHING = [(256, 256), (9, 9), (1024, 1024)]


@pytest.fixture
def pairs() -> Tensor:
    count = ROWS * HEADS * CAPACITY * 2 * CHANNELS
    return torch.arange(count, dtype=torch.float32).view(ROWS, HEADS, CAPACITY, 2, CHANNELS)


def test_a_segment_is_256_contiguous_tokens_of_all_heads(pairs: Tensor) -> None:
    host = in_segments(pairs)
    assert tuple(host.shape) == segments.segmented(ROWS, HEADS, CAPACITY, CHANNELS)
    assert torch.equal(host[1, 0, 2, 3], pairs[0, 2, 259])
    assert all(segment.is_contiguous() for segment in host)
    assert segments.places_of(host) == segments.places_of(pairs) == CAPACITY


@pytest.mark.parametrize(("start", "stop"), [*RANGES, *NOTHING])
def test_tokens_are_found_and_put_wherever_they_lie(pairs: Tensor, start: int, stop: int) -> None:
    host = in_segments(pairs)
    assert torch.equal(segments.tokens_of(host, start, stop), pairs[:, :, start:stop])
    assert segments.tokens_of(pairs, start, stop).data_ptr() == pairs[:, :, start:stop].data_ptr()
    segments.put(host, start, -pairs[:, :, start:stop])
    expected = pairs.clone()
    expected[:, :, start:stop] *= -1
    assert torch.equal(in_order(host), expected)


@pytest.mark.parametrize(("start", "stop"), RANGES)
@pytest.mark.parametrize("segmented", [True, False])
def test_staged_pairs_are_contiguous_pieces_that_go_to_the_hosts_runs(
    pairs: Tensor, start: int, stop: int, segmented: bool
) -> None:
    host = torch.zeros_like(in_segments(pairs) if segmented else pairs)
    new = pairs[:, :, start:stop]
    buffer = torch.full((new.numel(),), -1.0)
    staged = copy_stream.stage(*new.unbind(3), start, host, buffer)
    assert all(piece.is_contiguous() for piece in staged)
    assert (buffer >= 0).all()
    for piece, (target, _, _) in zip(staged, segments.runs(host, start, stop), strict=True):
        copy_stream.copy_across(piece, target)
    expected = torch.zeros_like(pairs)
    expected[:, :, start:stop] = new
    assert torch.equal(in_order(host) if segmented else host, expected)


@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_a_run_is_of_one_segment(pairs: Tensor, start: int, stop: int) -> None:
    """So a run never crosses the border of a registration."""
    edges = [start]
    for view, begin, end in segments.runs(in_segments(pairs), start, stop):
        assert begin // 256 == (end - 1) // 256
        assert torch.equal(view, pairs[:, :, begin:end])
        assert begin == edges[-1]
        edges.append(end)
    assert edges[-1] == stop
    assert len(set(edges)) == len(edges)


@pytest.mark.parametrize("refill", [tiers.refill, "C++"], ids=["reference", "C++"])
def test_a_fetch_brings_the_pairs_of_the_tokens(pairs: Tensor, refill: object) -> None:
    selected = torch.tensor([3, 255, 256, 700, 1023, -1], dtype=torch.int32).repeat(ROWS, HEADS, 1)
    index, moved = torch.full_like(selected, -1), torch.zeros(1, dtype=torch.int64)
    slots = torch.zeros(ROWS, HEADS, 6, 2, CHANNELS)
    if refill == "C++":
        cpp_tiers.prefetch_fused(
            selected, torch.zeros(ROWS, 4, dtype=torch.int64), in_segments(pairs), slots, index, moved
        )
    else:
        tiers.refill(selected, in_segments(pairs), slots, index, moved)
    assert torch.equal(index.sort(-1).values, selected.sort(-1).values)
    for place, token in enumerate(index[0, 0].tolist()):
        assert torch.equal(slots[:, :, place], pairs[:, :, token] if token >= 0 else torch.zeros(ROWS, HEADS, 2, 4))
    assert moved.item() == 5 * ROWS * HEADS * 2 * CHANNELS * 4


@pytest.mark.parametrize("first", [0, 250, 256, 1020])
def test_new_pairs_are_written_by_their_tokens(pairs: Tensor, first: int) -> None:
    host, new = in_segments(pairs), -torch.rand(ROWS, HEADS, 4, 2, CHANNELS)
    cursor = new_cursor(host.device, ROWS)
    cursor[:, LENGTH] = first
    cpp_tiers.write_pairs(*new.unbind(3), cursor, host)()
    expected = pairs.clone()
    expected[:, :, first : first + 4] = new
    assert torch.equal(in_order(host), expected)


def test_values_are_picked_for_each_query_head(pairs: Tensor) -> None:
    index = torch.tensor([0, 255, 256, 999]).expand(ROWS, HEADS, 5, 4)
    expected = pairs[:, :, [0, 255, 256, 999], 1].unsqueeze(2).expand(-1, -1, 5, -1, -1)
    assert torch.equal(kcache.values_of(in_segments(pairs), index, CAPACITY), expected)
