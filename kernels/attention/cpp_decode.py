"""A decode step's attention over the tiers as one C++ kernel, in place of `attention.decode_attention` and its halves.

In PyTorch, unpacking to float32 writes and reads every element some six times, and a step of one token is a hundred
small calls; here the codes are read once, and there is one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref
from typing import Any

import torch
from torch import Tensor

from specache_compile.kernels.codes.trellis import circle_of, is_trellis
from specache_compile.kernels.cpp.library import DTYPES, STRIDES, Step, decode_library
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT
from specache_compile.kernels.state.layout import Layout, rotation_block
from specache_compile.kernels.state.stored_tiers import StoredTiers

from .definition import attend_scored, center_shares, decode_attention, grouped_bias, score_low_bit
from .flash import DTYPES as FLASH_DTYPES
from .flash import attend_exact_rows
from .kept_logits import whole_logits


def step_of(
    q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, tiers: StoredTiers,
    layout: Layout, scale: float, softcap: float | None, **tensors: Tensor,
) -> Step:  # fmt: skip
    """The kernels' argument, which keeps the tensors that it points to."""
    batch, query_heads, lanes, d = q.shape
    codes, key_params, value_params, center = tiers[:4]
    heads, capacity = codes.shape[1], codes.shape[2]
    bias = None if mask is None else grouped_bias(mask, heads, int(cursor[LENGTH]) + 1)
    held = {
        "q": q.float().contiguous(), "k": k.contiguous(), "cursor": cursor, "bias": bias,
        "sinks": None if sinks is None else sinks.float().contiguous(), **tiers._asdict(), **tensors,
    }  # fmt: skip
    del held["center"]
    if center.shape[2]:
        query = q.float().unflatten(1, (heads, -1)) * scale
        held["shares"] = center_shares(query, key_params, center, capacity, int(cursor[LOW_BIT]))
    step = Step(
        **{name: tensor.data_ptr() for name, tensor in held.items() if tensor is not None},
        batch=batch, heads=heads, group_heads=query_heads // heads, lanes=lanes, d=d,
        capacity=capacity, row_width=codes.shape[3], window=tiers.recent.shape[2],
        group=capacity // key_params.shape[2] if layout.is_quantised else 0,
        channels=d // value_params.shape[-1] if layout.is_quantised else 0,
        top_k=tensors["slots"].shape[2] if "slots" in tensors else 0, sink_tokens=tiers.sink_index.shape[2],
        key_bits=layout.key_bits, value_bits=layout.value_bits, param_bits=8 * key_params.dtype.itemsize,
        circle=circle_of(d) if is_trellis(value_params) else 0,
        rotation=rotation_block(d) if layout.is_rotated else 0, scale=scale, softcap=softcap or 0.0,
    )  # fmt: skip
    if bias is not None:
        step.bias_strides[:STRIDES] = bias.expand(batch, heads, query_heads // heads, lanes, -1).stride()
    step.held = held
    return step


def fits(codes: Tensor, *pairs: Tensor) -> bool:
    """Whether the kernels read such tiers and pairs, all of one dtype and head size; else the definitions take over."""
    alike = all((x.dtype, x.shape[-1]) == (pairs[0].dtype, pairs[0].shape[-1]) for x in pairs)
    return codes.is_contiguous() and pairs[0].dtype in DTYPES and alike


def has_exact_rows(q: Tensor, tiers: StoredTiers, layout: Layout) -> bool:
    """Whether the low-bit tier has 16 bits, of rows that are keys and values at once."""
    return q.dtype in FLASH_DTYPES and not layout.is_quantised and tiers.recent.shape[-1] != q.shape[-1]


def library_of(q: Tensor, k: Tensor, *rest: Any) -> CDLL | None:
    """The library that a call with such arguments needs; None where the definition takes over."""
    return decode_library(k.dtype) if k.dtype in DTYPES else None


def decode_attention_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, slots: Tensor,
    slot_index: Tensor, tiers: Sequence[Tensor], layout: Sequence[int], scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention.decode_attention`, as one C++ kernel; the same arguments and results."""
    held = StoredTiers(*tiers)
    if not fits(held.codes, k, v, held.recent, slots):
        if has_exact_rows(q, held, Layout(*layout)) and not slots.shape[2] and softcap is None:
            none = q.new_full(held.codes.shape[:3], -1.0, dtype=torch.float32)
            return attend_exact_rows(q, k, v, mask, sinks, cursor, held, scale), none
        return decode_attention(q, k, v, mask, sinks, cursor, slots, slot_index, tiers, layout, scale, softcap)
    logits, _ = whole_logits(q, held.codes.shape[2])
    out, scores = (q.new_empty(shape, dtype=torch.float32) for shape in (q.shape, held.codes.shape[:3]))
    step = step_of(
        q, k, mask, sinks, cursor, held, Layout(*layout), scale, softcap,
        v=v.contiguous(), slots=slots, slot_index=slot_index, logits=logits, scores=scores, out=out,
    )  # fmt: skip
    decode_library(k.dtype).decode_attention(byref(step))
    return out.to(q.dtype), scores


def score_low_bit_fused(
    q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, tiers: Sequence[Tensor],
    layout: Sequence[int], scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`attention.score_low_bit`, as one C++ kernel; the same arguments and results."""
    held = StoredTiers(*tiers)
    if not fits(held.codes, k, held.recent):
        return score_low_bit(q, k, mask, sinks, cursor, tiers, layout, scale, softcap)
    logits, base = whole_logits(q, held.codes.shape[2])
    scores = q.new_empty(q.shape[2], *held.codes.shape[:3], dtype=torch.float32)
    step = step_of(
        q, k, mask, sinks, cursor, held, Layout(*layout), scale, softcap, logits=logits, scores=scores
    )  # fmt: skip
    decode_library(k.dtype).score_low_bit(byref(step))
    return logits, base, scores


def attend_scored_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, logits: Tensor,
    base: Tensor, chosen: Tensor, slots: Tensor, slot_index: Tensor, tiers: Sequence[Tensor], layout: Sequence[int],
    scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """`attention.attend_scored`, as one C++ kernel; the same arguments and results."""
    held = StoredTiers(*tiers)
    if not fits(held.codes, k, v, held.recent, slots):
        kept = (logits, base, chosen, slots, slot_index)
        return attend_scored(q, k, v, mask, sinks, cursor, *kept, tiers, layout, scale, softcap)
    out = q.new_empty(q.shape, dtype=torch.float32)
    step = step_of(
        q, k, mask, sinks, cursor, held._replace(center=held.center[:, :, :0]), Layout(*layout), scale, softcap,
        v=v.contiguous(), slots=slots, slot_index=slot_index, logits=logits, out=out,
    )  # fmt: skip
    decode_library(k.dtype).attend_scored(byref(step))
    return out.to(q.dtype)
