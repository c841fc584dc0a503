"""`attention_ops.decode_attention` and its halves as one C++ kernel.

In PyTorch, unpacking to float32 writes and reads every element about six times, in a hundred small calls per step.
The kernel reads the codes once, in one call.
"""

from __future__ import annotations

from ctypes import CDLL, byref
from typing import Any

import torch
from torch import Tensor

from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.codes.trellis import is_trellis
from specache_compile.kernels.cpp.library import DTYPES, STRIDES, StepArguments, decode_library
from specache_compile.kernels.state.center import share_of_center, share_of_groups, tokens_of_one
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT
from specache_compile.kernels.state.layout import rotation_block
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs, takes
from specache_compile.kernels.state.page_table import PAGE, shape_of_scores

from .attention_ops import attend_scored, decode_attention, grouped_bias, score_low_bit
from .kept_logits import whole_logits


def step_of(new: AttentionInputs, read: TierInputs, **tensors: Tensor) -> StepArguments:
    """Return the kernels' argument, which keeps its tensors alive.

    tensors: further fields, by name.
    """
    tiers, layout, scale, softcap = read
    given = {**new._asdict(), **tiers._asdict(), **tensors}
    mask, sinks, center = (given.pop(name) for name in ("mask", "sinks", "center"))
    for name in ("q", "k", "v"):
        given[name] = given[name].contiguous()
    codes, key_params, (batch, query_heads, lanes, d) = tiers.codes, tiers.key_params, new.q.shape
    _, heads, capacity = shape_of_scores(codes, new.cursor)
    group = codes.shape[2] // key_params.shape[2] if layout.is_quantised else 0
    step = StepArguments(
        batch=batch, heads=heads, group_heads=query_heads // heads, lanes=lanes, d=d, dim=stored_dim(d),
        capacity=capacity, row_width=codes.shape[3], window=tiers.recent.shape[2], pages=capacity // PAGE, group=group,
        channels=stored_dim(d) // tiers.value_params.shape[4] if layout.is_quantised else 0,
        top_k=given["slots"].shape[2] if "slots" in given else 0, sink_tokens=tiers.sink_index.shape[2],
        key_bits=layout.key_bits, value_bits=layout.value_bits, param_bits=8 * key_params.element_size(),
        key_trellis=is_trellis(key_params), value_trellis=is_trellis(tiers.value_params),
        rotation=rotation_block(d) if layout.is_rotated else 0, scale=scale, softcap=softcap or 0.0,
    )  # fmt: skip
    if mask is not None:
        bias = given["bias"] = grouped_bias(mask, heads, int(new.cursor[:, LENGTH].max()) + 1)
        step.bias_strides[:STRIDES] = bias.expand(batch, heads, step.group_heads, lanes, -1).stride()
    if sinks is not None:
        given["sinks"] = sinks.float().contiguous()
    if center.shape[2]:
        query = new.q.float().unflatten(1, (heads, -1)) * scale
        tokens, step.share_tokens = int(new.cursor[:, LOW_BIT].max()), tokens_of_one(center.shape[2], group)
        if step.share_tokens > 1:
            given["shares"] = share_of_groups(query, center, tokens // group)
        else:
            given["shares"] = share_of_center(query, center, group, tokens)
    for name, tensor in given.items():
        setattr(step, name, tensor.data_ptr())
    step.held = given
    return step


def fits(codes: Tensor, q: Tensor, *pairs: Tensor) -> bool:
    """Return whether the kernels support these tiers, query and pairs (of one dtype); else the definitions run."""
    return q.dtype in DTYPES and codes.is_contiguous() and all(x.dtype == q.dtype for x in pairs)


def library_of(q: Tensor, k: Tensor, *rest: Any) -> CDLL | None:
    """Return the library for a call with these arguments; None if the definition runs."""
    return decode_library(k.dtype) if k.dtype in DTYPES else None


@takes(new=AttentionInputs, read=TierInputs)
def decode_attention_fused(
    new: AttentionInputs, slots: Tensor, slot_index: Tensor, read: TierInputs, skip_below: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute `attention_ops.decode_attention` in one C++ kernel; same arguments and results."""
    held, q = read.tiers, new.q
    if not fits(held.codes, *new[:3], held.recent, slots):
        return decode_attention(*new, slots, slot_index, *read, skip_below)
    shape = shape_of_scores(held.codes, new.cursor)
    logits, _ = whole_logits(q, shape[2])
    out, scores = q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)
    step = step_of(new, read, slots=slots, slot_index=slot_index, logits=logits, scores=scores, out=out)
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
    step = step_of(new, read, logits=logits, scores=found)
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
    out = q.new_empty(q.shape)
    read = read._replace(tiers=held._replace(center=held.center[:, :, :0]))
    step = step_of(new, read, slots=slots, slot_index=slot_index, logits=logits, out=out)
    step.skip_below = skip_below
    decode_library(q.dtype).attend_scored(byref(step))
    return out
