"""The selection from kept logits, interpreted without a GPU, against float64 scores in a stable order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kept_fixture import Named

from specache_compile.kernels.movement import triton_select_logits as select
from specache_compile.kernels.state.cursor import CURSOR_SIZE, LOW_BIT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = 2


@dataclass(frozen=True)
class Case(Named):
    """Kept logits of a step.

    spread: standard deviation of the logits, in log2 units; 0 for equal logits.
    lengths: low-bit tokens of each row of the batch.
    hidden: share of the tokens that are hidden from all query heads and lanes, or from each of them separately if
        apart.
    """

    spread: float = 3.0
    lengths: tuple[int, ...] = (768, 576)
    capacity: int = 768
    k: int = 64
    queries: int = 4
    lanes: int = 1
    hidden: float = 0.0
    apart: bool = False
    dtype: torch.dtype = torch.float16


class Kept:
    """Logits [B, H, G·lanes, C] as a kernel keeps them, with their log-sum-exp, and lane 0's scores in float64."""

    def __init__(self, case: Case, bias: Tensor | None = None) -> None:
        self.case = case
        batch, rows = len(case.lengths), case.queries * case.lanes
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(batch, HEADS, rows, case.capacity, generator=generator, dtype=torch.float64) * case.spread
        hidden = torch.rand(batch, HEADS, rows, case.capacity, generator=generator) < case.hidden
        whole = whole.masked_fill(hidden if case.apart else hidden[:, :, :1], -math.inf)
        whole = whole if bias is None else whole + bias / math.log(2)
        base = whole.unflatten(-1, (-1, 16)).amax(-1).clamp_min(torch.finfo(torch.float32).min).float()
        offsets = (whole.unflatten(-1, (-1, 16)) - base.double().unsqueeze(-1)).to(case.dtype)
        self.whole = (offsets.double() + base.double().unsqueeze(-1)).flatten(-2)
        self.known = torch.arange(case.capacity) < torch.tensor(case.lengths)[:, None, None, None]
        natural = self.whole.masked_fill(~self.known, -math.inf) * math.log(2)
        lse = (natural.logsumexp(-1) / math.log(2)).float()
        self.lse = lse.masked_fill(lse == -math.inf, math.inf)
        # Rows are filled up to an even number.
        filled = torch.cat([offsets, offsets[:, :, :1]][: 1 + rows % 2], 2)
        bases = torch.cat([base, base[:, :, :1]][: 1 + rows % 2], 2)
        filled = filled.flatten(-2).masked_fill(~self.known, math.nan)  # undefined after the last token
        self.logits = filled.reshape(batch, HEADS, -1, 2, case.capacity // 64, 8, 8).permute(0, 1, 4, 3, 5, 2, 6)
        self.logits = self.logits.contiguous().to(DEVICE)
        self.base = bases.reshape(batch, HEADS, -1, 2, case.capacity // 64, 4).permute(0, 1, 4, 3, 5, 2)
        self.base = self.base.contiguous().to(DEVICE)

    @property
    def by_token(self) -> Tensor:
        """The kept logits [B, H, rows, C]."""
        return self.logits.permute(0, 1, 5, 3, 2, 4, 6).flatten(4).flatten(2, 3).cpu()

    def scores(self, visible: Tensor | None = None) -> Tensor:
        """Return float64 [B, H, C]; -1 for tokens that are no candidates, or not visible [B, H, C]."""
        logits = self.whole[:, :, :: self.case.lanes]
        scores = (logits - self.lse[:, :, :: self.case.lanes, None].double()).exp2().sum(2)
        there = (logits > -math.inf).any(2) & self.known[:, :, 0]
        return scores.masked_fill(~(there if visible is None else there & visible), -1.0)

    def selected(self, mask: Tensor | None = None) -> Tensor:
        case = self.case
        cursor = torch.zeros(len(case.lengths), CURSOR_SIZE + case.capacity // 256, dtype=torch.int64)
        cursor[:, LOW_BIT] = torch.tensor(case.lengths)
        lse = self.lse.reshape(len(case.lengths), HEADS * case.queries, case.lanes).to(DEVICE)
        chosen = torch.full((len(case.lengths), HEADS, case.k), 7, dtype=torch.int32, device=DEVICE)
        select.select(self.logits, self.base, lse, mask, cursor.to(DEVICE), chosen)
        select.hide(self.logits, chosen)
        return chosen.cpu()


def best(scores: Tensor, k: int) -> Tensor:
    """Return the k tokens of largest score in ascending order, then -1; among equal scores the older ones."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    tokens = order.indices.masked_fill(order.values < 0, scores.shape[-1])[..., :k].sort(-1).values
    tokens = torch.nn.functional.pad(tokens, (0, max(0, k - scores.shape[-1])), value=scores.shape[-1])
    return tokens.masked_fill(tokens == scores.shape[-1], -1).int()


QUICK = [
    Case(),
    Case(spread=0.0, k=50, lengths=(768,)),
    Case(hidden=0.97, k=40, lengths=(768,)),
    Case(hidden=0.7, apart=True, queries=2, lanes=2, lengths=(256,), capacity=256),
    Case(hidden=0.999, apart=True, queries=3, lengths=(128,), capacity=256),
    Case(lengths=(32, 0, 96), capacity=256, queries=1),
    Case(capacity=8192, lengths=(7968,), queries=1, spread=0.0),
]
SLOW = [
    Case(spread=40.0),
    Case(spread=0.5, k=50),
    Case(hidden=0.9),
    Case(k=1),
    Case(k=3, queries=1),
    Case(k=300),
    Case(queries=3, lanes=2),
    Case(queries=8, lanes=2, lengths=(256,), capacity=256),
    Case(dtype=torch.float32, spread=1.0),
    Case(capacity=8192, lengths=(8192,), queries=1, spread=1.0),
    Case(capacity=8192, lengths=(7968, 4096), queries=2, hidden=0.5, apart=True),
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_best_tokens_are_selected_from_kept_logits(case: Case) -> None:
    kept = Kept(case)
    before, scores = kept.by_token, kept.scores()
    chosen = kept.selected()
    assert torch.equal(chosen, best(scores, case.k))
    # The selected tokens' logits are hidden in all rows, and no others.
    hidden = torch.zeros(*scores.shape[:2], case.capacity + 1, dtype=torch.bool)
    hidden.scatter_(2, chosen.long() % (case.capacity + 1), True)
    expected = before.masked_fill(hidden[:, :, None, :-1], -math.inf)
    assert torch.equal(kept.by_token.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


def test_a_long_context_is_selected_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "MOST_BLOCKS", 16)
    case = Case(k=20, lengths=(480,), capacity=512, queries=1)
    kept = Kept(case)
    scores = kept.scores()
    chosen = kept.selected()
    assert torch.equal(chosen, best(scores, case.k))
    hidden = (kept.by_token == -math.inf).all(2)
    assert torch.equal(hidden.nonzero()[:, 2].view(1, HEADS, case.k).int(), chosen)


def test_an_additive_mask_hides_tokens_by_large_numbers() -> None:
    case = Case(queries=2, lengths=(256, 96), capacity=256, hidden=0.1, k=40)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.rand(2, HEADS * case.queries, 1, case.capacity + 1, generator=generator) < 0.9
    hidden[0, :, :, 32:64] = True  # a block whose base is of hidden tokens
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -40_000.0)  # finite in half precision, and hidden
    rows = mask[..., : case.capacity].reshape(2, HEADS, case.queries, case.capacity)
    kept = Kept(case, rows)
    scores = kept.scores((rows > -10_000).any(2))
    assert 0 < (scores[0] >= 0).sum(-1).max() < case.k, "fewer candidates than slots"
    assert torch.equal(kept.selected(mask.to(DEVICE)), best(scores, case.k))


def test_tokens_whose_score_underflows_are_candidates() -> None:
    case = Case(spread=0.0, lengths=(128,), capacity=256, k=12)
    far = torch.full((1, HEADS, 1, case.capacity), -300.0)
    far[..., 100:110] = 0.0
    assert Kept(case, far).selected()[0].tolist() == [[0, 1, *range(100, 110)]] * HEADS
