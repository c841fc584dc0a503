"""One decode step over tiers of random numbers, for every implementation, and its float64 reference in position order.

The tiers contain random numbers instead of our quantiser's output, in pages of any order. NaN fills all elements that
must not be read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from implementations import Way
from kept_fixture import Named, spoil
from torch import Tensor

from held_tiers import cursor_over, in_pages
from specache_compile.kernels.codes.records import (
    RECORD,
    by_token,
    fields_of,
    in_thread_order,
    param_order,
    read_levels,
    stored_dim,
)
from specache_compile.kernels.state.layout import StoredTiers
from specache_compile.kernels.state.page_table import LOW_BIT_TIER, PAGE, shape_of_scores


@dataclass(frozen=True)
class Case(Named):
    """Shapes of one decode step: `length` cached tokens, the newest R..R+g-1 of them in the recent tier."""

    length: int = 200
    lanes: int = 2
    batch: int = 2
    heads: int = 2
    ratio: int = 2
    head_dim: int = 16
    bits: int = 2
    value_bits: int | None = None
    rotate: bool = False
    trellis: bool = False
    key_trellis: bool = False
    eight: bool = False
    center: bool = False
    group: int = 32
    residual: int = 32
    top_k: int = 24
    filled: int = 20
    sink_tokens: int = 0
    mask: str = "none"
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def layout(self) -> tuple[int, int, bool]:
        return self.bits, self.value_bits or self.bits, self.rotate

    @property
    def is_possible(self) -> bool:
        """Return whether the options exist, and Triton's interpreter takes seconds."""
        rows, bits = self.heads * self.ratio * self.lanes, self.layout[:2]
        plain = not (self.trellis or self.key_trellis or self.eight or self.center or self.value_bits)
        return (
            rows <= 24 and rows * self.head_dim <= 1024 and self.filled <= self.top_k
            and (plain or self.bits < 16) and not (self.eight and 8 in bits)
            and not (self.trellis and bits[1] > 1) and not (self.key_trellis and bits[0] > 1)
        )  # fmt: skip

    def low_bit(self, length: int) -> int:
        return self.group * max(0, (length - self.residual) // self.group)


@dataclass
class Step:
    """One decode step's tensors, for the op, and for the reference in position order and float64."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    cursor: Tensor
    state: dict[str, Tensor]
    keys: Tensor
    values: Tensor
    # Like `keys`, with empty slots.
    unfetched_keys: Tensor

    def operands(self, device: torch.device) -> tuple[list[Any], tuple[Tensor, Tensor], tuple[Any, ...]]:
        """Return the operands of attentions on a device: the new tokens, the slots, and what is read."""
        given = (self.q, self.k, self.v, self.mask, self.sinks, self.cursor)
        state = {name: x.to(device) for name, x in self.state.items()}
        tiers, layout = [state[name] for name in StoredTiers._fields], [int(value) for value in self.case.layout]
        read = (tiers, layout, self.case.head_dim**-0.5, self.case.softcap)
        return [None if x is None else x.to(device) for x in given], (state["slots"], state["slot_index"]), read

    def run(self, way: Way, skip_below: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return the output and the last lane's scores. The two halves of a corrected attention run as one op, whose
        scores use low-bit pairs alone: they equal those of a step with empty slots."""
        ops, (new, slots, read) = way.ops, self.operands(way.ops.device)
        if not way.in_halves:
            out, scores = ops.decode_attention(*new, *slots, *read, skip_below)
            return out.cpu(), scores.cpu()
        logits, base, scores = ops.score_low_bit(*new, *read)
        if ops.kind == "triton":
            spoil(logits, base, int(self.cursor[0, 1]))  # no op reads them
        out = ops.attend_scored(*new, logits, base, slots[1].flip(-1), *slots, *read, skip_below)
        assert scores[-1].is_contiguous(), "`select_topk` requires this"
        return out.cpu(), scores[-1].cpu()


class Numbers:
    """Random tensors of a dtype."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=self.generator)

    def params(self, tokens: int, *shape: int, size: float, eight: bool) -> Tensor:
        """Return scales and zero points [B, H, C, 2 or 1, D]: NaN after the first tokens; in bytes, scales around a
        quarter and zero points of all possible eighths."""
        params = torch.full(shape, math.nan, dtype=self.dtype)
        params[:, :, :tokens] = self.normal(*shape[:2], tokens, *shape[3:]) * size
        if not eight:
            return params
        stored = self.bytes(*shape)
        stored[..., :1, :] = self.bytes(*stored[..., :1, :].shape, low=90, high=106)
        return stored.masked_fill(params.isnan(), 255)


def quantised(case: Case, numbers: Numbers, capacity: int) -> tuple[Tensor, ...]:
    """Return codes and parameters of a low-bit tier, and its keys and values [B, H, n, d] in float64."""
    rows, (key_bits, value_bits, _) = (case.batch, case.heads), case.layout
    low_bit, dim = case.low_bit(case.length), stored_dim(case.head_dim)
    size, group = min(dim, case.group), case.group
    codes = numbers.bytes(*rows, capacity, dim * (key_bits + value_bits) // 8)
    key_shape = (1, group) if case.key_trellis else (2, dim)
    value_shape = (1, 1) if case.trellis else (2, dim // size)
    key_params = numbers.params(
        low_bit // group, *rows, capacity // group, *key_shape, size=0.5**key_bits, eight=case.eight
    )
    value_params = numbers.params(low_bit, *rows, capacity, *value_shape, size=0.5**value_bits, eight=case.eight)
    whole = codes[:, :, : -(-low_bit // RECORD) * RECORD]
    scale, zero = read_params(key_params[:, :, : low_bit // group])
    if case.key_trellis:
        keys = (read_trellis(whole, dim, False)[:, :, :low_bit] - 1.5) * scale.flatten(2)[..., None]
    else:
        of_group, place = torch.arange(low_bit) // group, param_order(dim, key_bits).argsort()
        levels = read_levels(whole, dim, key_bits, values=False)[:, :, :low_bit]
        keys = levels.double() * scale[:, :, of_group][..., place] + zero[:, :, of_group][..., place]
    scale, zero = read_params(value_params[:, :, :low_bit])
    if case.trellis:
        values = read_trellis(whole, dim, True)[:, :, :low_bit] - 1.5
        values = values * in_thread_order(scale.squeeze(-1)).unsqueeze(-1)
    else:
        channel = torch.arange(dim) // size
        levels = read_levels(whole, dim, value_bits, values=True)[:, :, :low_bit]
        values = levels.double() * scale[..., channel] + zero[..., channel]
    keys, values = (turned(x[..., : case.head_dim]) if case.rotate else x[..., : case.head_dim] for x in (keys, values))
    return codes, key_params, value_params, keys, values


def make_step(case: Case, seed: int = 0) -> Step:
    numbers = Numbers(case.dtype, seed)
    normal, generator = numbers.normal, numbers.generator
    rows, d, n, low_bit = (case.batch, case.heads), case.head_dim, case.length, case.low_bit(case.length)
    truth = normal(*rows, n, 2, d)
    keys, values = truth.double().unbind(3)
    capacity, window = PAGE * (n // PAGE + 1), case.residual + case.group
    recent = torch.full((*rows, window, 2, d), math.nan, dtype=case.dtype)
    recent[:, :, torch.arange(low_bit, n) % window] = truth[:, :, low_bit:]
    if case.bits == 16:
        codes = torch.full((*rows, capacity, 2, d), math.nan, dtype=case.dtype)
        codes[:, :, :low_bit] = normal(*rows, low_bit, 2, d)
        stored_keys, stored_values = codes[:, :, :low_bit].double().unbind(3)
        low_bit_tier = codes.flatten(3), codes.new_empty((*rows, 0, 2, d)), codes.new_empty((*rows, 0, 2, 1))
    else:
        *low_bit_tier, stored_keys, stored_values = quantised(case, numbers, capacity)
    center = torch.zeros(*rows, 0, d)
    if case.center:
        center, waves = make_center(low_bit, normal(*rows, d).float() * 20)
        stored_keys = stored_keys + waves
    elif case.key_trellis:  # constant within a group, rotating from group to group
        center = normal(*rows, 3, d).float()
        center[:, :, 2] = 0.7 ** torch.arange(d)
        beta, gamma, theta = center.double()[:, :, :, None].unbind(2)
        angle = (torch.arange(low_bit) // case.group)[:, None] * theta
        stored_keys = stored_keys + angle.cos() * beta + angle.sin() * gamma

    # Row b's sinks begin at its token 3·b; its last sink is still empty.
    sink_index = torch.arange(case.sink_tokens).int() + 3 * torch.arange(case.batch).int().view(-1, 1, 1)
    sink_index[..., -1:] = -1
    sink_pairs = torch.full((*rows, case.sink_tokens, 2, d), math.nan, dtype=case.dtype)
    for b in range(case.batch):
        for place, token in enumerate(sink_index[b, 0].tolist()):
            if 0 <= token < low_bit:
                sink_pairs[b, :, place] = truth[b, :, token]
                stored_keys[b, :, token], stored_values[b, :, token] = keys[b, :, token], values[b, :, token]

    unfetched_keys = torch.cat([stored_keys, keys[:, :, low_bit:]], 2)
    slots = torch.full((*rows, case.top_k, 2, d), math.nan, dtype=case.dtype)
    slot_index = torch.full((*rows, case.top_k), -1, dtype=torch.int32)
    for b in range(case.batch):
        for h in range(case.heads):
            fetched = torch.randperm(low_bit, generator=generator)
            fetched = fetched[~torch.isin(fetched, sink_index[b])][: case.filled]
            places = torch.randperm(case.top_k, generator=generator)[: len(fetched)]
            slot_index[b, h, places] = fetched.int()
            slots[b, h, places] = truth[b, h, fetched]
            stored_keys[b, h, fetched], stored_values[b, h, fetched] = keys[b, h, fetched], values[b, h, fetched]
    keys[:, :, :low_bit], values[:, :, :low_bit] = stored_keys, stored_values

    # Pages in any order, except the last one; page 0 belongs to no row.
    pages = case.batch * capacity // PAGE
    table = torch.cat([torch.randperm(pages - 1, generator=generator), torch.tensor([pages - 1])]).view(case.batch, -1)
    query_heads = case.heads * case.ratio
    # As after vmap: the lanes are folded in from an outer axis.
    q, k, v = (normal(case.lanes, case.batch, heads, d).movedim(0, 2) for heads in (query_heads, *[case.heads] * 2))
    return Step(
        case,
        q=q,
        k=k,
        v=v,
        mask=make_mask(case.mask, case.batch, query_heads, case.lanes, n, 1, generator),
        sinks=normal(query_heads) if case.sinks else None,
        cursor=cursor_over(table + 1, n, low_bit, case.low_bit(n + 1)),
        state={
            **{name: in_pages(x, table + 1).pages for name, x in zip(LOW_BIT_TIER, low_bit_tier, strict=True)},
            "center": center, "sink_pairs": sink_pairs, "sink_index": sink_index, "recent": recent, "slots": slots,
            "slot_index": slot_index,
        },
        keys=keys,
        values=values,
        unfetched_keys=unfetched_keys,
    )  # fmt: skip


def make_center(tokens: int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return the center for a mean [B, H, d], and its value at each token, float64 [B, H, n, d].

    RoPE uses complex numbers, over all channels except the last two.
    """
    d = mean.shape[-1]
    half = d // 2 - 1
    frequencies = 0.7 ** torch.arange(half, dtype=torch.float64)
    pairs = torch.complex(mean[..., :half].double(), mean[..., half : 2 * half].double())
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies.float().double()
    waves = pairs.unsqueeze(2) * torch.polar(torch.ones_like(angles), angles)
    quarter, still = torch.view_as_real(pairs * 1j).unbind(-1), mean[..., 2 * half :]
    channel = torch.arange(1, half + 1)
    rows = [
        mean,
        torch.cat([*quarter, torch.zeros_like(still)], -1),
        torch.cat([frequencies, frequencies, torch.zeros(2)]).expand_as(mean),
        torch.cat([-(channel + half), channel, torch.zeros(2)]).expand_as(mean),
    ]
    still = still.double().unsqueeze(2).expand(-1, -1, tokens, -1)
    return torch.stack([row.float() for row in rows], 2), torch.cat([waves.real, waves.imag, still], -1)


def turned(x: Tensor) -> Tensor:
    """Multiply x [..., d] by each block's Hadamard matrix, whose signs are the parity of the common bits of i and j."""
    d = x.shape[-1]
    block = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if d % size == 0)
    signs = [[1 - 2 * ((i & j).bit_count() % 2) for j in range(block)] for i in range(block)]
    return (x.unflatten(-1, (-1, block)) @ (torch.tensor(signs).double() / math.sqrt(block))).flatten(-2)


def read_trellis(codes: Tensor, dim: int, values: bool) -> Tensor:
    """Return a trellis code's levels q as float64 [B, H, C, D], from each number's bit and the three before it."""
    circles = fields_of(codes, dim, 1, values).long().unflatten(-1, (-1, 32))
    b = [circles.roll(back, -1) for back in range(4)]
    return by_token((2 * (b[0] ^ b[1] ^ b[3]) + b[2]).flatten(-2), dim, 1, values).double()


def read_params(params: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and zero point as float64, for 8 bits by the formula of `params.py`; a trellis has no zero point."""
    if params.dtype != torch.uint8:
        return params.double()[..., 0, :], params.double()[..., -1, :]
    scale = (1 + (params[..., 0, :] & 7).double() / 8) * 2.0 ** ((params[..., 0, :] >> 3).double() - 15)
    return scale, params[..., -1, :].view(torch.int8).double() / 8 * scale


def make_mask(
    kind: str, batch: int, heads: int, queries: int, past: int, new: int, generator: torch.Generator
) -> Tensor | None:
    """Return a mask [B|1, Hq|1, Q|1, past + new]; padding hides each row's first tokens, more in later rows."""
    columns = past + new
    padding = torch.arange(columns) >= (torch.arange(batch) * max(past // 3, 1)).view(-1, 1, 1, 1)
    if kind == "none":
        return None
    if kind == "padding":
        return padding
    if kind == "padding each lane":
        return padding.expand(batch, 1, queries, columns).contiguous()
    if kind == "longer than the cache":
        return torch.cat([padding, torch.zeros(batch, 1, 1, 7, dtype=torch.bool)], -1)
    if kind == "random":
        seen = torch.rand(batch, heads, queries, columns, generator=generator) < 0.5
        seen[..., past:] = True
        return seen
    if kind == "position bias":
        slope = torch.linspace(0.05, 0.001, heads).view(1, heads, 1, 1)
        return slope * (torch.arange(columns) - past)
    if kind == "nothing is seen":
        return torch.zeros(batch, 1, 1, columns, dtype=torch.bool)
    dtype = getattr(torch, kind.removeprefix("additive "))
    return torch.zeros(padding.shape, dtype=dtype).masked_fill(~padding, torch.finfo(dtype).min)


def reference(
    q: Tensor, keys: Tensor, mask: Tensor | None, causal: Tensor, sinks: Tensor | None, softcap: float | None
) -> Tensor:  # fmt: skip
    """Return textbook attention's probabilities [B, Hq, Q, n] in float64; `causal` bool [Q, n]."""
    keys = keys.double().repeat_interleave(q.shape[1] // keys.shape[1], 1)
    logits = q.double() @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if mask is not None:
        logits = logits + (mask.double().log() if mask.dtype == torch.bool else mask.double())
    logits = logits.masked_fill(~causal, -math.inf)
    sink = logits.new_full((*logits.shape[:3], 1), -math.inf)
    if sinks is not None:
        sink = sinks.double().view(1, -1, 1, 1).expand_as(sink)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1].nan_to_num(0.0)


def output(probabilities: Tensor, values: Tensor) -> Tensor:
    """Return Σ p·v [B, Hq, Q, d] of probabilities [B, Hq, Q, n] and values [B, H, n, d]."""
    return probabilities @ values.double().repeat_interleave(probabilities.shape[1] // values.shape[1], 1)


def expected_of(step: Step, in_halves: bool, skip_below: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the reference's output and selection scores."""
    case, n = step.case, step.case.length
    mask = step.mask
    if mask is not None:  # both lanes' new pairs share the mask's last column
        mask = torch.cat([mask[..., :n], mask[..., n : n + 1].expand(*mask.shape[:-1], case.lanes)], -1)
    seen = (mask, torch.ones(case.lanes, n + case.lanes, dtype=torch.bool).tril(n), step.sinks, case.softcap)
    keys, values = torch.cat([step.keys, step.k.double()], 2), torch.cat([step.values, step.v.double()], 2)
    probabilities = reference(step.q, keys, *seen)
    out = output(without_small_records(step, probabilities, skip_below), values)
    if in_halves:
        probabilities = reference(step.q, torch.cat([step.unfetched_keys, step.k.double()], 2), *seen)
    scores = probabilities[:, :, -1].unflatten(1, (case.heads, case.ratio)).sum(2)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
        hidden = hidden.expand(case.batch, case.heads * case.ratio, case.lanes, -1)[:, :, -1]
        scores = scores.masked_fill(hidden.unflatten(1, (case.heads, case.ratio)).all(2), -1.0)
    selection = torch.full(shape_of_scores(step.state["codes"], step.cursor), -1.0, dtype=torch.float64)
    candidates = min(case.low_bit(n + 1), n) if in_halves or case.top_k else 0
    selection[:, :, :candidates] = scores[:, :, :candidates]
    for row, tokens in enumerate(step.state["sink_index"][:, 0].tolist()):
        selection[row, :, [token for token in tokens if token >= 0]] = -1.0
    return out, selection


def without_small_records(step: Step, probabilities: Tensor, skip_below: float) -> Tensor:
    """Return probabilities [B, Hq, Q, n] without the low-bit records whose weights are all below `skip_below`."""
    if not skip_below:
        return probabilities
    case, low_bit = step.case, step.case.low_bit(step.case.length)
    weights = probabilities[..., :low_bit].unflatten(1, (case.heads, -1)).clone()
    for b in range(case.batch):
        for h in range(case.heads):
            index = step.state["slot_index"][b, h].long()
            fetched = index[index >= 0]  # in no record
            weights[b, h][..., fetched] = 0.0
            for record in weights[b, h].split(RECORD, -1):
                record.masked_fill_(torch.tensor(bool((record < skip_below).all())), math.nan)
            weights[b, h][..., fetched] = 0.0
    left = probabilities.clone()
    left[..., :low_bit].masked_fill_(weights.isnan().flatten(1, 2), 0.0)
    return left / (left.sum(-1, keepdim=True) + 1 - probabilities.sum(-1, keepdim=True))
