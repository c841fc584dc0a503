"""Triton: the FP8 cache's decode step, in three launches that a CUDA graph can contain."""

# write_pairs     (B·H, T / 16)   the new pairs, as e4m3 codes (`triton_copy`)
# attend_rows     (B·H, splits)   attention over the codes and the step's own pair, which is exact (`triton_plain`)
# merge_splits    (B·Hq)          the output (`triton_decode`)

from __future__ import annotations

import torch
from torch import Tensor

from specache_compile.kernels.decode.triton_decode import merged
from specache_compile.kernels.decode.triton_plain import attend
from specache_compile.kernels.movement.triton_copy import write_through
from specache_compile.kernels.state.layout import Layout, StoredTiers
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs, takes

WHOLE = Layout(16, 16, 0)


def keep_fp8(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, fp8_codes: Tensor) -> None:
    """Compute `fp8.keep_fp8`; the device reads the length."""
    write_through(k, v, cursor, fp8_codes)


@takes(new=AttentionInputs)
def fp8_attention(new: AttentionInputs, fp8_codes: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Compute `extend_attention` of one new token over e4m3 pairs; the device reads the length."""
    q, k, v = (x.contiguous() for x in new[:3])
    none = q.new_empty((0, 0, 0))
    read = TierInputs(StoredTiers(fp8_codes.flatten(3), k, v, none, none, none, none), WHOLE, scale, softcap)
    sums = attend(new._replace(q=q), read)
    return merged(new, WHOLE, sums, None, q.new_empty(q.shape[:3], dtype=torch.float32))
