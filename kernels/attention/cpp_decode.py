"""`attention_ops.decode_attention` and its halves as one C++ kernel.

In PyTorch, unpacking to float32 writes and reads every element about six times, in a hundred small calls per step.
The kernel reads the codes once, in one call.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.cpp.library import DTYPES, STRIDES, StepArguments, decode_library
from specache_compile.kernels.state.center import share_of_center, share_of_groups, tokens_of_one
from specache_compile.kernels.state.cursor import CURSOR_SIZE, LENGTH, LOW_BIT
from specache_compile.kernels.state.layout import rotation_block
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs, takes
from specache_compile.kernels.state.page_table import PAGE, shape_of_scores

from .attention_ops import attend_scored, decode_attention, score_low_bit
from .kept_logits import whole_logits
from .query import grouped_bias


def step_of(new: AttentionInputs, read: TierInputs, top_k: int, **tensors: Tensor) -> StepArguments:
    """Return the kernels' argument, which keeps its new tensors alive; the caller keeps the others."""
    q, k, _, mask, sinks, cursor = new
    tiers, layout, scale, softcap = read
    codes, key_params, value_params, center, sink_pairs, sink_index, recent = tiers
    (batch, query_heads, lanes, d), (_, heads, page, width) = q.shape, codes.shape
    q, k, dim, pages = q.contiguous(), k.contiguous(), stored_dim(d), cursor.shape[1] - CURSOR_SIZE
    (_, _, groups, key_rows, _), (_, _, _, value_rows, parts) = key_params.shape, value_params.shape
    step = StepArguments(
        batch=batch, heads=heads, group_heads=query_heads // heads, lanes=lanes, d=d, dim=dim, capacity=pages * PAGE,
        row_width=width, window=recent.shape[2], pages=pages, group=page // groups if groups else 0,
        channels=dim // parts, top_k=top_k, sink_tokens=sink_index.shape[2], key_bits=layout.key_bits,
        value_bits=layout.value_bits, param_bits=8 * key_params.itemsize, key_trellis=key_rows == 1,
        value_trellis=value_rows == 1, rotation=rotation_block(d) if layout.is_rotated else 0, scale=scale,
        softcap=softcap or 0.0, q=q.data_ptr(), k=k.data_ptr(), cursor=cursor.data_ptr(),
        codes=codes.data_ptr(), key_params=key_params.data_ptr(), value_params=value_params.data_ptr(),
        sink_pairs=sink_pairs.data_ptr(), sink_index=sink_index.data_ptr(), recent=recent.data_ptr(),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )  # fmt: skip
    step.held = [q, k]
    if mask is not None:
        bias = grouped_bias(mask, heads, int(cursor[:, LENGTH].max()) + 1)
        strides = bias.expand(step.batch, step.heads, step.group_heads, step.lanes, -1).stride()
        step.bias, step.bias_strides[:STRIDES] = bias.data_ptr(), strides
        step.held.append(bias)
    if sinks is not None:
        sinks = sinks.float().contiguous()
        step.sinks = sinks.data_ptr()
        step.held.append(sinks)
    if center.shape[2] and "scores" in tensors:  # `attend_scored` takes logits that have their shares
        query = q.float().unflatten(1, (heads, -1)) * scale
        tokens, step.share_tokens = int(cursor[:, LOW_BIT].max()), tokens_of_one(center.shape[2], step.group)
        if step.share_tokens > 1:
            shares = share_of_groups(query, center, tokens // step.group)
        else:
            shares = share_of_center(query, center, step.group, tokens)
        step.shares = shares.data_ptr()
        step.held.append(shares)
    return step


def fits(codes: Tensor, q: Tensor, *pairs: Tensor) -> bool:
    """Return whether the kernels support these tiers, query and pairs (of one dtype); else the definitions run."""
    return q.dtype in DTYPES and codes.is_contiguous() and all(x.dtype == q.dtype for x in pairs)


@takes(new=AttentionInputs, read=TierInputs)
def decode_attention_fused(
    new: AttentionInputs, slots: Tensor, slot_index: Tensor, read: TierInputs, skip_below: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute `attention_ops.decode_attention` in one C++ kernel; same arguments and results."""
    held, q = read.tiers, new.q
    if not fits(held.codes, *new[:3], held.recent, slots):
        return decode_attention(*new, slots, slot_index, *read, skip_below)
    shape = shape_of_scores(held.codes, new.cursor)
    logits = q.new_empty((*q.shape[:3], shape[2]), dtype=torch.float32)
    out, scores, v = q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32), new.v.contiguous()
    step = step_of(
        new, read, slots.shape[2], v=v, slots=slots, slot_index=slot_index, logits=logits, scores=scores, out=out
    )
    step.skip_below = skip_below
    decode_library(q.dtype).decode_attention(byref(step))
    return out, scores


@takes(new=AttentionInputs, read=TierInputs)
def score_low_bit_fused(new: AttentionInputs, read: TierInputs, scores: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_ops.score_low_bit` in one C++ kernel; same arguments and results."""
    held, q = read.tiers, new.q
    if not fits(held.codes, q, new.k, held.recent):
        return score_low_bit(*new, *read, scores)
    shape = shape_of_scores(held.codes, new.cursor)
    logits, base = whole_logits(q, shape[2])
    found = q.new_empty((q.shape[2], *shape), dtype=torch.float32)
    step = step_of(new, read, 0, logits=logits, scores=found)
    decode_library(q.dtype).score_low_bit(byref(step))
    return logits, base, found


@takes(new=AttentionInputs, read=TierInputs)
def attend_scored_fused(
    new: AttentionInputs, logits: Tensor, base: Tensor, chosen: Tensor, slots: Tensor, slot_index: Tensor,
    read: TierInputs, skip_below: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `attention_ops.attend_scored` in one C++ kernel; same arguments and results."""
    held, q = read.tiers, new.q
    if not fits(held.codes, *new[:3], held.recent, slots):
        return attend_scored(*new, logits, base, chosen, slots, slot_index, *read, skip_below)
    out, v = q.new_empty(q.shape), new.v.contiguous()
    step = step_of(new, read, slots.shape[2], v=v, slots=slots, slot_index=slot_index, logits=logits, out=out)
    step.skip_below = skip_below
    decode_library(q.dtype).attend_scored(byref(step))
    return out
