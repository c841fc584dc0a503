"""The pairs of a whole cache by token."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from held_tiers import in_pages
from specache_compile.evaluation.baselines import kcache
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state import page_table, stored_pairs
from specache_compile.kernels.state.page_table import Pages

pytestmark = pytest.mark.pairwise

ROWS, HEADS, CAPACITY, CHANNELS = 2, 3, 1024, 4
# Within one page, at its borders, over several pages.
RANGES = [(0, 1), (5, 200), (0, 256), (250, 256), (255, 257), (256, 768), (3, 1024), (0, 1024)]
NOTHING = [(256, 256), (9, 9), (1024, 1024)]


@pytest.fixture
def pairs() -> Tensor:
    count = ROWS * HEADS * CAPACITY * 2 * CHANNELS
    return torch.arange(count, dtype=torch.float32).view(ROWS, HEADS, CAPACITY, 2, CHANNELS)


def whole(pages: Pages) -> Tensor:
    """Return all tokens [B, H, C, 2, d]."""
    return page_table.tokens_of(pages, 0, CAPACITY)


def shuffled(pairs: Tensor) -> Pages:
    """Return the pairs in pages in any order."""
    pages = in_pages(pairs)
    order = torch.randperm(len(pages.pages), generator=torch.Generator().manual_seed(0))
    return Pages(pages.pages[order.argsort()], order[pages.table])


@pytest.mark.parametrize(("start", "stop"), [*RANGES, *NOTHING])
def test_tokens_are_found_and_put_wherever_they_lie(pairs: Tensor, start: int, stop: int) -> None:
    host = shuffled(pairs)
    assert host.shape == pairs.shape
    assert torch.equal(page_table.tokens_of(host, start, stop), pairs[:, :, start:stop])
    page_table.put(host, start, -pairs[:, :, start:stop])
    expected = pairs.clone()
    expected[:, :, start:stop] *= -1
    assert torch.equal(whole(host), expected)


@pytest.mark.parametrize("dtype", [torch.float32, stored_pairs.ROUNDED], ids=str)
@pytest.mark.parametrize(("start", "stop"), [*RANGES, (0, 0)])
def test_staged_pairs_go_to_the_hosts_tokens(
    pairs: Tensor, start: int, stop: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = CHANNELS if dtype == torch.float32 else stored_pairs.rounded_width(CHANNELS)
    new = pairs[:1, :, start:stop]
    expected = torch.zeros(1, HEADS, CAPACITY, 2, width, dtype=dtype)
    host = in_pages(expected.clone())
    expected[:, :, start:stop] = stored_pairs.stored(new, dtype, width)
    copy = Tensor.copy_

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert not non_blocking or source.is_contiguous()
        return copy(target, source)

    for name in ("stream_of", "torch.cuda.current_stream", "torch.cuda.stream"):
        monkeypatch.setattr(f"{copy_stream.__name__}.{name}", mock.MagicMock())
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(Tensor, "copy_", copied)
    copy_stream.Staging(torch.device("cpu")).send(*new.unbind(3), start, host)
    assert torch.equal(whole(host), expected)


@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_a_run_is_of_one_page(pairs: Tensor, start: int, stop: int) -> None:
    """So a run never crosses the border of a registration."""
    edges = [start]
    for page, begin, end in page_table.runs(shuffled(pairs[:1]), start, stop):
        assert begin // 256 == (end - 1) // 256
        (view,) = page_table.views(page, begin, end)
        assert torch.equal(view, pairs[:1, :, begin:end])
        assert begin == edges[-1]
        edges.append(end)
    assert edges[-1] == stop
    assert len(set(edges)) == len(edges)


def test_values_are_picked_for_each_query_head(pairs: Tensor) -> None:
    index = torch.tensor([0, 255, 256, 999]).expand(ROWS, HEADS, 5, 4)
    expected = pairs[:, :, [0, 255, 256, 999], 1].unsqueeze(2).expand(-1, -1, 5, -1, -1)
    assert torch.equal(kcache.values_of(shuffled(pairs), index, CAPACITY), expected)
