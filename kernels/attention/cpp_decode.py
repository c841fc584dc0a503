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
from specache_compile.kernels.state.center import share_of_center, tokens_of_one
from specache_compile.kernels.state.cursor import CURSOR_SIZE, LENGTH, LOW_BIT
from specache_compile.kernels.state.layout import rotation_block
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs, takes
from specache_compile.kernels.state.page_table import PAGE, shape_of_scores

from .attention_ops import attend_scored, decode_attention, score_low_bit
from .kept_logits import whole_logits
from .query import grouped_bias


def run(kernel: str, new: AttentionInputs, read: TierInputs, skip_below: float = 0.0, **tensors: Tensor) -> None:
    """Run a kernel of cpp_decode.cpp.

    tensors: further fields of its argument (`library.FIELDS`), by name.
    """
    q, k, v, mask, sinks, cursor = new
    tiers, layout, scale, softcap = read
    (batch, query_heads, lanes, d), (_, heads, page, width) = q.shape, tiers.codes.shape
    (_, _, groups, key_rows, _), (_, _, _, value_rows, parts) = tiers.key_params.shape, tiers.value_params.shape
    group_heads, dim, pages = query_heads // heads, stored_dim(d), cursor.shape[1] - CURSOR_SIZE
    given = {**tiers._asdict(), "q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous(), "cursor": cursor}
    given |= tensors
    center, strides, group, share_tokens = given.pop("center"), (0,) * STRIDES, page // groups if groups else 0, 0
    if mask is not None:
        given["bias"] = bias = grouped_bias(mask, heads, int(cursor[:, LENGTH].max()) + 1)
        strides = bias.expand(batch, heads, group_heads, lanes, -1).stride()
    if sinks is not None:
        given["sinks"] = sinks.float().contiguous()
    if center.shape[2] and "scores" in tensors:  # `attend_scored` takes logits that have their shares
        query = q.float().unflatten(1, (heads, -1)) * scale
        tokens, share_tokens = int(cursor[:, LOW_BIT].max()), tokens_of_one(center.shape[2], group)
        given["shares"] = share_of_center(query, center, group, tokens)
    step = StepArguments(
        batch=batch, heads=heads, group_heads=group_heads, lanes=lanes, d=d, dim=dim, capacity=pages * PAGE,
        row_width=width, window=tiers.recent.shape[2], pages=pages, group=group, channels=dim // parts,
        top_k=tensors["slots"].shape[2] if "slots" in tensors else 0, sink_tokens=tiers.sink_index.shape[2],
        key_bits=layout.key_bits, value_bits=layout.value_bits, param_bits=8 * tiers.key_params.itemsize,
        key_trellis=key_rows == 1, value_trellis=value_rows == 1, share_tokens=share_tokens, bias_strides=strides,
        rotation=rotation_block(d) if layout.is_rotated else 0, scale=scale, softcap=softcap or 0.0,
        skip_below=skip_below, **{name: tensor.data_ptr() for name, tensor in given.items()},
    )  # fmt: skip
    getattr(decode_library(q.dtype), kernel)(byref(step))


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
    out, scores = q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)
    written = {"logits": logits, "scores": scores, "out": out}
    run("decode_attention", new, read, skip_below, slots=slots, slot_index=slot_index, **written)
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
    run("score_low_bit", new, read, logits=logits, scores=found)
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
    run("attend_scored", new, read, skip_below, slots=slots, slot_index=slot_index, logits=logits, out=out)
    return out
