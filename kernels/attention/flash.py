"""Exact attention of a chunked prefill by torch's CPU flash kernel, part by part.

Each part of the tokens returns an output and the logarithm of its softmax's sum, by which parts are merged. The kernel
rounds weights to the model's dtype before the product with the values, as `scaled_dot_product_attention` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specache_compile.kernels.movement.copy_queue import wait_for_offloads
from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.by_token import tokens_of
from specache_compile.kernels.state.cursor import length_of, runs_of
from specache_compile.kernels.state.page_table import PAGE, Pages
from specache_compile.kernels.state.stored_pairs import decoded

from .attention_ops import Partial, check_covers, extend_attention, merge, reciprocal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tokens of a part, which are copied at a time from pages.
BLOCK = 8192
# The most new tokens that read pages in place: the copy would cost more than their attention.
IN_PLACE = 16
# Tokens of a part under a mask with a row per new token, which is copied for all heads of a group.
MASKED_BLOCK = 1024

# Output [B, H, rows, d] over a part, and log Σ exp(logit) [B, H, rows], -inf for a row without visible tokens.
Part = tuple[Tensor, Tensor]


def flash(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Part:
    """Compute one part. q [B, H, rows, d]; keys, values [B, H, n, d]; mask [B|1, H|1, rows|1, n], bool or additive."""
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values))
    seen = None if mask is None else mask if mask.dtype == torch.bool else mask > -math.inf
    if mask is not None and mask.dtype != q.dtype:
        mask = q.new_zeros(mask.shape).masked_fill_(~mask, -math.inf) if mask is seen else mask.to(q.dtype)
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, attn_mask=mask, scale=scale
    )
    return out, total if seen is None else total.masked_fill(~seen.any(-1), -math.inf)


def merged(parts: Sequence[Part], sinks: Tensor | None) -> Tensor:
    """Merge parts; returns float32 [B, H, rows, d], with 0 in rows without visible tokens.

    sinks: [H, rows], logits without values; or None.
    """
    there = [Partial(out, total.unsqueeze(-1), (total > -math.inf).float().unsqueeze(-1)) for out, total in parts]
    out, _, total = merge(there, None if sinks is None else sinks.unsqueeze(-1))
    return out * reciprocal(total)


class FlashRows:
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

    def new_columns(self, length: int, columns: int) -> Tensor | None:
        """Return the mask's columns of new tokens, which follow `length` cached ones; None for a single visible token.

        If new tokens share one column or one row of the mask, they are also causal.
        """
        causal = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=self.q.device).tril()[None, None]
        if self.mask is None:
            return self.by_row(causal) if self.tokens > 1 else None
        given = self.mask[..., length : length + columns]
        if given.shape[2] == given.shape[3] == self.tokens:
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

    def sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Reshape [Hq] to [H, G·T]."""
        return None if sinks is None else sinks.float().repeat_interleave(self.tokens).view(self.heads, -1)


def pages_in_place(rows: FlashRows, host: Pages, count: int, scale: float) -> Iterator[Part]:
    """Yield the parts of the first `count` pages, whole ones of one row: runs of adjacent pages, read in place."""
    (table,) = host.table.tolist()
    for numbers, _ in runs_of([page - number for number, page in enumerate(table[:count])]):
        size = numbers.stop - numbers.start
        pages = host.pages.narrow(0, table[numbers.start], size)
        mask = rows.columns(numbers.start * PAGE, numbers.stop * PAGE)
        if mask is not None:
            mask = mask.unflatten(-1, (size, PAGE)).movedim(-2, 0).squeeze(1)
        query = rows.q.expand(size, -1, -1, -1)
        out, total = flash(query, *pages.unbind(-2), mask, scale)
        yield merged_pages(out, total)


def merged_pages(out: Tensor, total: Tensor) -> Part:
    """Merge the parts [n, H, rows, d] of n pages into one."""
    whole = total.logsumexp(0, keepdim=True)
    weights = (total - whole.masked_fill(whole == -math.inf, 0.0)).exp().unsqueeze(-1)
    return (out * weights).sum(0, keepdim=True), whole


@by_rows(0)
def extend_attention_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, host: Tensor,
    scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Compute `attention_ops.extend_attention` by torch's flash kernel; same arguments and results."""
    length, width = length_of(cursor), q.shape[-1]
    if softcap is not None or q.dtype not in DTYPES or q.dtype != k.dtype or length < 0:
        return extend_attention(q, k, v, mask, sinks, cursor, host, scale, softcap)
    wait_for_offloads(cursor)
    rows = FlashRows(q, k.shape[1], mask, length + q.shape[2])
    parts = [flash(rows.q, k, v, rows.new_columns(length, rows.tokens), scale)]
    block = BLOCK if mask is None or mask.shape[2] == 1 else MASKED_BLOCK
    first = 0
    if isinstance(host, Pages) and host.dtype == q.dtype and q.shape[0] == 1 and q.shape[2] <= IN_PLACE:
        first = length // PAGE * PAGE
        parts += pages_in_place(rows, host, first // PAGE, scale)
    for start in range(first, length, block):
        stop = min(start + block, length)
        keys, values = decoded(tokens_of(host, start, stop), q.dtype, width).unbind(-2)
        parts.append(flash(rows.q, keys, values, rows.columns(start, stop), scale))
    return rows.back(merged(parts, rows.sinks(sinks)), q.dtype)
