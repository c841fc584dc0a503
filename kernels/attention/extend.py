"""Exact attention of a chunked prefill over the host tier, part by part: the definition, and torch's CPU flash kernel.

Each part of the tokens returns an output and the logarithm of its softmax's sum, by which parts are merged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.cursor import length_of, runs_of
from specache_compile.kernels.state.operands import AttentionInputs, takes
from specache_compile.kernels.state.page_table import PAGE, Pages, rows_of_pages, tokens_of
from specache_compile.kernels.state.stored_pairs import decoded

from .attention_ops import BLOCK, softmax
from .query import as_bias, capped, check_covers

FLASH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tokens of a part of the flash kernel, which are copied at a time from pages. A mask with a row per new token is copied
# for all heads of a group, so its parts have BLOCK tokens.
FLASH_BLOCK = 8192
# The most new tokens that read pages in place: the copy would cost more than their attention.
IN_PLACE = 16

# Output [B, H, rows, d] over a part, and log Σ exp(logit) [B, H, rows], -inf for a row without visible tokens.
Part = tuple[Tensor, Tensor]
# (rows [B, H, rows, d], keys [B, H, n, d], values, mask [B|1, H|1, rows|1, n] bool or additive) → `Part`.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Part]


@by_rows(0)
@takes(new=AttentionInputs)
def extend_attention(new: AttentionInputs, host: Pages, scale: float, softcap: float | None) -> Tensor:
    """Compute exact attention of T new tokens over the host tier, streamed in blocks, and over themselves.

    Args:
        new: a mask may have one row of padding for all T. With one row or None, new tokens are causal.
        host: all cached pairs (`page_table.py`), exact, rounded, or e4m3 codes.

    Returns: [B, Hq, T, d] in q's dtype.
    """
    return extended(functools.partial(plain, scale=scale, softcap=softcap), BLOCK, new, host)


@by_rows(0)
@takes(new=AttentionInputs)
def extend_attention_fused(new: AttentionInputs, host: Pages, scale: float, softcap: float | None) -> Tensor:
    """Compute `extend_attention` by torch's flash kernel; same arguments and results."""
    if softcap is not None or new.q.dtype not in FLASH_DTYPES or new.q.dtype != new.k.dtype:
        return extended(functools.partial(plain, scale=scale, softcap=softcap), BLOCK, new, host)
    block = FLASH_BLOCK if new.mask is None or new.mask.shape[2] == 1 else BLOCK
    return extended(functools.partial(flash, scale=scale), block, new, host)


def plain(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Part:
    """Compute one part in float32."""
    logits = capped((q.float() * scale) @ keys.float().mT, softcap)
    logits = logits if mask is None else logits + as_bias(mask)
    return softmax(logits) @ values.float(), logits.logsumexp(-1)


def flash(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Part:
    """Compute one part. The kernel rounds weights to the model's dtype before the product with the values, as
    `scaled_dot_product_attention` does."""
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values))
    seen = None if mask is None else mask if mask.dtype == torch.bool else mask > -math.inf
    if mask is not None and mask.dtype != q.dtype:
        mask = q.new_zeros(mask.shape).masked_fill_(~mask, -math.inf) if mask is seen else mask.to(q.dtype)
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, attn_mask=mask, scale=scale
    )
    return out, total if seen is None else total.masked_fill(~seen.any(-1), -math.inf)


def merged(one: Part, other: Part) -> Part:
    """Merge two parts; outputs are float32, and 0 in rows without visible tokens."""
    totals = torch.stack(torch.broadcast_tensors(one[1], other[1]), -1)
    first, second = softmax(totals).unsqueeze(-2).unbind(-1)
    return one[0] * first + other[0] * second, torch.logaddexp(one[1], other[1])


def extended(attend: Attend, block: int, new: AttentionInputs, host: Pages) -> Tensor:
    """Attend over all parts: the new tokens, then blocks of the host tier with at most `block` tokens."""
    q, k, v, mask, sinks, cursor = new
    length, padding = max(length_of(cursor), 0), max(-length_of(cursor), 0)
    if padding >= q.shape[2]:  # all new tokens are padding, and torch's kernel divides by the number of rows
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    q, k, v = (x[:, :, padding:] for x in (q, k, v))
    heads, tokens = k.shape[1], length + q.shape[2]
    rows = Rows(q, heads, mask, tokens)
    if host.dtype == q.dtype and q.shape[2] <= IN_PLACE and length >= PAGE:
        masks = [mask] * len(q) if mask is None or len(mask) == 1 else mask.split(1)
        each_row = [Rows(one, heads, seen, tokens) for one, seen in zip(q.split(1), masks, strict=True)]
        given = zip(each_row, rows_of_pages(host), k.split(1), v.split(1), strict=True)
        return rows.back(torch.cat([over_pages(attend, *row, length, sinks) for row in given]), q.dtype)
    part = attend(rows.q, k, v, rows.new_columns(length, length))
    for start in range(0, length, block):
        stop = min(start + block, length)
        keys, values = decoded(tokens_of(host, start, stop).to(q.device), q.dtype, q.shape[-1]).unbind(-2)
        part = merged(part, attend(rows.q, keys, values, rows.columns(start, stop)))
    if sinks is not None:
        part = merged(part, (torch.zeros_like(part[0]), rows.sinks(sinks)))
    out = rows.back(part[0], q.dtype)
    return torch.nn.functional.pad(out, (0, 0, padding, 0)) if padding else out


def over_pages(
    attend: Attend, rows: Rows, host: Pages, k: Tensor, v: Tensor, length: int, sinks: Tensor | None
) -> Tensor:
    """Attend over one row's pages in place, adjacent ones as one batch; the last page's tokens are copied before the
    new ones. Returns the output [B, H, rows, d]."""
    (table,), whole = host.table.tolist(), length // PAGE
    rest = tokens_of(host, whole * PAGE, length)
    keys, values = (torch.cat([rest[..., which, :], x], 2) for which, x in enumerate((k, v)))
    parts = [attend(rows.q, keys, values, rows.new_columns(whole * PAGE, length))]
    for numbers, _ in runs_of([page - number for number, page in enumerate(table[:whole])]):
        size = numbers.stop - numbers.start
        keys, values = host.pages.narrow(0, table[numbers.start], size).unbind(-2)
        mask = rows.columns(numbers.start * PAGE, numbers.stop * PAGE)
        mask = None if mask is None else mask.unflatten(-1, (size, PAGE)).movedim(-2, 0).squeeze(1)
        parts.append(attend(rows.q.expand(size, -1, -1, -1), keys, values, mask))
    outs, totals = (torch.cat(part) for part in zip(*parts, strict=True))
    totals = totals if sinks is None else torch.cat([totals, rows.sinks(sinks)[None]])
    weights = totals.softmax(0).nan_to_num_(0.0)[: len(outs), ..., None]  # NaN: a row without visible tokens
    return (outs * weights).sum(0, keepdim=True)


class Rows:
    """Reshapes a query [B, Hq, T, d] to rows [B, H, G·T, d] of its KV heads, and masks accordingly."""

    def __init__(self, q: Tensor, heads: int, mask: Tensor | None, tokens: int) -> None:
        """tokens: the number of tokens that the mask must cover."""
        if mask is not None:
            check_covers(mask, tokens)
        self.q, self.mask = q.unflatten(1, (heads, -1)).flatten(2, 3), mask
        self.heads, self.group, self.tokens = heads, q.shape[1] // heads, q.shape[2]

    def columns(self, start: int, stop: int) -> Tensor | None:
        """Return the columns start..stop of the mask [B|1, Hq|1, T|1, n] as [B|1, H|1, G·T|1, stop - start]."""
        return None if self.mask is None else self.by_row(self.mask[..., start:stop])

    def new_columns(self, first: int, length: int) -> Tensor | None:
        """Return the mask's columns from `first` on, of which new tokens follow `length` cached ones; None if all are
        visible.

        If new tokens share one row of the mask, they are also causal.
        """
        cached = length - first
        causal = torch.ones(self.tokens, cached + self.tokens, dtype=torch.bool, device=self.q.device).tril(cached)
        causal = causal[None, None]
        if self.mask is None:
            return self.by_row(causal) if self.tokens > 1 else None
        given = self.mask[..., first : length + self.tokens]
        if given.shape[2] == self.tokens:
            return self.by_row(given)
        both = given & causal if given.dtype == torch.bool else given.masked_fill(~causal, -math.inf)
        return self.by_row(both)

    def by_row(self, mask: Tensor) -> Tensor:
        heads, tokens = mask.shape[1:3]
        if heads == tokens == 1:
            return mask
        split = mask.unflatten(1, (self.heads, self.group)) if heads > 1 else mask.unsqueeze(2)
        return split.expand(-1, -1, self.group, self.tokens, -1).flatten(2, 3)

    def back(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """Reshape rows back to [B, Hq, T, d]."""
        return out.unflatten(2, (self.group, self.tokens)).flatten(1, 2).to(dtype).contiguous()

    def sinks(self, sinks: Tensor) -> Tensor:
        """Reshape [Hq] to [H, G·T]."""
        return sinks.float().repeat_interleave(self.tokens).view(self.heads, -1)
