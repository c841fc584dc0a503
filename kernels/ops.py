"""Declarations of the tiers' `specache::` ops; baselines declare their ops next to their methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .attention import attention_ops as attention
from .attention import cpp_decode, extend
from .attention.kept_logits import based_logits, whole_logits
from .cpp.library import decode_library, tiers_library
from .movement import cpp_tiers
from .movement import tier_ops as tiers
from .op import Op, fake_nothing, fake_of_query, register
from .state.operands import AttentionInputs, TierInputs, takes
from .state.page_table import shape_of_scores


@takes(new=AttentionInputs, read=TierInputs)
def fake_decode_attention(
    new: AttentionInputs, slots: Tensor, slot_index: Tensor, read: TierInputs, skip_below: float = 0.0
) -> tuple[Tensor, Tensor]:
    scores = shape_of_scores(read.tiers.codes, new.cursor)
    return new.q.new_empty(new.q.shape), new.q.new_empty(scores, dtype=torch.float32)


@takes(new=AttentionInputs, read=TierInputs)
def fake_score_low_bit(new: AttentionInputs, read: TierInputs, scores: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    q, shape = new.q, shape_of_scores(read.tiers.codes, new.cursor)
    if q.device.type == "cpu":
        return *whole_logits(q, shape[2]), q.new_empty((q.shape[2], *shape), dtype=torch.float32)
    scored = (q.shape[2], *shape) if scores else (0,)
    return *based_logits(q, new.k.shape[1], shape[2]), q.new_empty(scored, dtype=torch.float32)


def fake_correct(scores: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(slot_index)


def compile_decode(q: Tensor) -> object:
    return decode_library(q.dtype)


def compile_tiers(first: Any) -> object:
    """Compile the tiers' C++, which has one build for all dtypes."""
    return tiers_library()


# The last operands of all decode attentions: the state tensors (`StoredTiers`) and the layout of codes (`Layout`).
READ = "Tensor[] tiers, int[] layout, float scale, float? softcap"
SKIP = "float skip_below=0.0"
NEW = "Tensor? mask, Tensor? sinks, Tensor cursor"
SLOTS = "Tensor slots, Tensor slot_index"


def lanes_of(tensor: Tensor, lane_dim: int) -> Tensor:
    """Fold a mapped lane axis into the token axis: [lanes, B, H, 1, x] → [B, H, lanes, x]."""
    return tensor.movedim(lane_dim, 2).flatten(2, 3)


def widened_decode_attention(
    info: Any, in_dims: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any
) -> Any:
    """Vmap rule of `decode_attention`: a mapped axis becomes the lanes; the selection scores are not mapped.

    All lanes share the tiers, and any query, key or value that is not mapped; a mask may have one row for all lanes.
    """
    if any(dim is not None for dim in tree_leaves(in_dims[4:])):
        raise NotImplementedError("decode_attention: vmap maps q, k, v and mask; all lanes share the sinks and tiers")
    folded = [
        x.expand(-1, -1, info.batch_size, -1) if dim is None else lanes_of(x, dim)
        for x, dim in zip((q, k, v), in_dims[:3], strict=True)
    ]
    if mask is not None and in_dims[3] is not None:
        mask = lanes_of(mask, in_dims[3])
    out, scores = torch.ops.specache.decode_attention(*folded, mask, *rest)
    return (out.movedim(2, 0).unsqueeze(3), scores), (0, None)


DECLARED = (
    Op(
        f"decode_attention(Tensor q, Tensor k, Tensor v, {NEW}, {SLOTS}, {READ}, {SKIP}) -> (Tensor, Tensor)",
        attention.decode_attention, fake_decode_attention, ".decode.triton_scored:decode_attention",
        fused=cpp_decode.decode_attention_fused, library=compile_decode,
        lanes=widened_decode_attention, is_work=True,
    ),
    Op(
        f"score_low_bit(Tensor q, Tensor k, Tensor v, {NEW}, {READ}, bool scores=True) -> (Tensor, Tensor, Tensor)",
        attention.score_low_bit, fake_score_low_bit, ".decode.triton_scored:score_low_bit",
        fused=cpp_decode.score_low_bit_fused, library=compile_decode, is_work=True,
    ),
    Op(
        "correct(Tensor scores, Tensor cursor, Tensor host, Tensor(a!) slots, Tensor(b!) slot_index, "
        "Tensor(c!) corrected, Tensor q, Tensor logits, Tensor base, Tensor? mask) -> Tensor",
        tiers.correct, fake_correct, ".movement.copy_stream:correct",
        fused=cpp_tiers.correct_fused, library=compile_tiers,
    ),
    Op(
        f"attend_scored(Tensor q, Tensor k, Tensor v, {NEW}, Tensor(a!) logits, Tensor base, Tensor chosen, {SLOTS}, "
        f"{READ}, {SKIP}) -> Tensor",
        attention.attend_scored, fake_of_query, ".decode.triton_scored:attend_scored",
        fused=cpp_decode.attend_scored_fused, library=compile_decode, is_work=True,
    ),
    Op(
        "extend_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor host, "
        "float scale, float? softcap) -> Tensor",
        extend.extend_attention, fake_of_query, ".attention.triton_extend:extend_attention",
        fused=extend.extend_attention_fused, is_work=True,
        reads_host=True, capturable=False,
    ),
    Op(
        "select_topk(Tensor scores, Tensor(a!) selected) -> ()",
        tiers.select_topk, fake_nothing, ".movement.triton_select:select_topk",
        fused=cpp_tiers.select_topk_fused, library=compile_tiers, early=0,
    ),
    Op(
        "prefetch(Tensor selected, Tensor cursor, Tensor host, Tensor(a!) slots, Tensor(b!) slot_index, "
        "Tensor(c!) fetched) -> ()",
        tiers.prefetch, fake_nothing, ".movement.copy_stream:prefetch",
        fused=cpp_tiers.prefetch_fused, library=compile_tiers, copies=True, early=1,
    ),
    Op(
        "wait(Tensor after, Tensor cursor, Tensor(a!) slots, Tensor(b!) slot_index, Tensor(c!) selected) -> ()",
        tiers.wait, fake_nothing, ".movement.copy_stream:wait",
        is_wait=True,
    ),
    Op(
        "offload(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) host) -> ()",
        tiers.offload, fake_nothing, ".movement.copy_stream:offload",
        fused=cpp_tiers.offload_fused, library=compile_tiers, copies=True, early=2,
    ),
    Op(
        "append(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) codes, "
        "Tensor(b!) key_params, Tensor(c!) value_params, Tensor(d!) center, Tensor(e!) sink_pairs, Tensor sink_index, "
        "Tensor(f!) recent, int key_bits, int value_bits, bool rotate, str zero_point, Tensor? frequencies=None) -> ()",
        tiers.append, fake_nothing, ".movement.triton_append:append",
        fused=cpp_tiers.append_fused, library=compile_tiers, early=3,
    ),
)  # fmt: skip


for _op in DECLARED:
    register(_op)
