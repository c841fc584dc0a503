"""Triton: the FP8 cache's decode step, in three launches that a CUDA graph can contain."""

# store_codes     (B·H, T / 16)   the new pairs, as e4m3 codes
# attend_rows     (B·H, splits)   attention over the codes and the step's own pair, which is exact (`triton_plain`)
# merge_splits    (B·Hq)          the output (`triton_decode`)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.codes.triton_levels import ROUND
from specache_compile.kernels.decode.triton_decode import merged
from specache_compile.kernels.decode.triton_plain import attend_pairs
from specache_compile.kernels.state.layout import Layout, StoredTiers
from specache_compile.kernels.state.operands import AttentionInputs, TierInputs, takes
from specache_compile.kernels.state.stored_pairs import FP8
from specache_compile.kernels.state.triton_cursor import AT_LENGTH, place_in_page

LARGEST, SMALLEST_NORMAL = tl.constexpr(torch.finfo(FP8).max), tl.constexpr(2.0**-6)
# Codes of numbers below the smallest normal one count in these.
STEPS = tl.constexpr(2.0**9)
TOKEN_BLOCK = 16
WHOLE = Layout(16, 16, 0)


@triton.jit
def to_e4m3(x):
    """Return the code of the nearest number to float32 x, with even mantissa in a tie, at most ±448; NaN stays NaN."""
    size = tl.where(x == x, tl.minimum(tl.abs(x), LARGEST), 0.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (127 - 7) * 8
    small = ((size * STEPS + ROUND) - ROUND).to(tl.int32)
    code = tl.where(size < SMALLEST_NORMAL, small, normal)
    code = tl.where(x == x, code, 0x7F) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit(do_not_specialize=["heads", "count", "columns"])
def store_codes(
    # k and v [B, H, T, d] with contiguous channels; cursor int64 [B, columns]; written: codes uint8 [P, H, 256, 2, d].
    k, v, cursor, codes,
    k_batch, k_head, k_token, v_batch, v_head, v_token,
    # H, T, columns of the cursor.
    heads, count, columns,
    d: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK new tokens of one head. Bytes per token: the pair read, 2·d written."""
    bh = tl.program_id(0).to(tl.int64)
    batch, head = bh // heads, bh % heads
    token, channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, CHANNELS)[None, :]
    there = (token < count) & (channel < d)
    key = tl.load(k + batch * k_batch + head * k_head + token * k_token + channel, there, 0.0)
    value = tl.load(v + batch * v_batch + head * v_head + token * v_token + channel, there, 0.0)
    row = cursor + batch * columns
    at = codes + place_in_page(row, head, tl.load(row + AT_LENGTH) + token, heads, token < count) * (2 * d) + channel
    tl.store(at, to_e4m3(key.to(tl.float32)), there)
    tl.store(at + d, to_e4m3(value.to(tl.float32)), there)


def keep_fp8(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, fp8_codes: Tensor) -> None:
    """Compute `fp8.keep_fp8`; the device reads the length."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    batch, heads, count, d = k.shape
    store_codes[batch * heads, triton.cdiv(count, TOKEN_BLOCK)](
        k, v, cursor, fp8_codes,
        k_batch=k.stride(0), k_head=k.stride(1), k_token=k.stride(2),
        v_batch=v.stride(0), v_head=v.stride(1), v_token=v.stride(2),
        heads=heads, count=count, columns=cursor.stride(0),
        d=d, CHANNELS=stored_dim(d), BLOCK=TOKEN_BLOCK, num_warps=4,
    )  # fmt: skip


@takes(new=AttentionInputs)
def fp8_attention(new: AttentionInputs, fp8_codes: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Compute `extend_attention` of one new token over e4m3 pairs; the device reads the length."""
    q, k, v = (x.contiguous() for x in new[:3])
    none = q.new_empty((0, 0, 0))
    read = TierInputs(StoredTiers(fp8_codes.flatten(3), k, v, none, none, none, none), WHOLE, scale, softcap)
    sums = attend_pairs(new._replace(q=q), read)
    return merged(new, WHOLE, sums, None, q.new_empty(q.shape[:3], dtype=torch.float32))
