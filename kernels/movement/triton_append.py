"""Triton: `tier_ops.append`, new pairs to the recent tier, and full groups from there to the low-bit tier.

It is limited by copy bandwidth. The device reads all lengths, so that a decode step can be captured.
"""

# k_strides are the first three strides of k [B, H, T, d] in elements, v_strides those of v; channels and tiers are
# contiguous. d channels, groups of g tokens or gv channels, capacity of C tokens, window of W tokens.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.codes.trellis import is_trellis
from specache_compile.kernels.codes.triton_levels import quantized, stored_scale
from specache_compile.kernels.codes.triton_records import ROWS_FROM, packed, place_of_params, store_words
from specache_compile.kernels.codes.triton_trellis import encode_vectors
from specache_compile.kernels.state.center import is_found
from specache_compile.kernels.state.layout import Layout, StoredTiers, rotation_block
from specache_compile.kernels.state.operands import takes
from specache_compile.kernels.state.triton_center import STEPPED_ROWS, STEPS, load_group_center, set_center
from specache_compile.kernels.state.triton_cursor import AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT, place_in_page
from specache_compile.kernels.state.triton_pairs import keep_sinks, load_pairs, sinks_among
from specache_compile.kernels.state.triton_rotate import hadamard

# Tokens per program of a copy: 16 rows of K and V keep a warp's loads 16 bytes wide.
COPY_BLOCK = 16
# Numbers of keys per warp of `quantize_groups`, which hold 128 registers a thread.
NUMBERS = 1024
# Bytes for the trellis code's numbers in one launch; at least one group per head.
SCRATCH = 32 << 20


class Group(NamedTuple):
    """What `quantize_groups` is compiled for.

    dim: D, the stored channels of d. size: g. value_group: gv. zero_point: name of a quantiser. sink_tokens: S.
    padded: there is padding. center_rows: rows of the keys' center, or 0. turned: channels that are rotated together,
    or 1. key_trellis, value_trellis: keys, values are in the trellis code.
    """

    d: int
    dim: int
    size: int
    value_group: int
    key_bits: int
    value_bits: int
    zero_point: str
    sink_tokens: int
    padded: bool
    center_rows: int
    turned: int
    key_trellis: bool
    value_trellis: bool


@triton.jit
def load_group(
    # As in `quantize_groups`: k or v with its strides; the group's tokens [g, 1], of which `start` is the first.
    new, strides, recent, center, sink_index, sink_pairs, start, tokens, channel, bh, heads, length, kind: tl.constexpr,
    WHICH: tl.constexpr, window: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Load a group's keys or values float32 [g, D], NaN after d, centered and rotated, and rounded to `kind` then.

    Those of sinks go unchanged to sink_pairs.
    """
    inside = channel < group.d
    found = load_pairs(new, strides, recent, tokens, channel, inside, bh, heads, length, WHICH, window, group.d)
    keep_sinks(
        found, tokens, channel, inside, sink_pairs + bh * (group.sink_tokens * 2 * group.d),
        sink_index + bh // heads * group.sink_tokens, WHICH=WHICH, sink_tokens=group.sink_tokens, d=group.d,
    )  # fmt: skip
    if WHICH == 0 and group.center_rows > 0:
        first, places = start, tokens - start
        if group.center_rows == STEPPED_ROWS:
            first, places = start // group.size // STEPS * STEPS, start // group.size % STEPS
        one, other, theta = load_group_center(center, bh, first, channel, inside, d=group.d, rows=group.center_rows)
        angle = places.to(tl.float32) * theta
        found -= tl.cos(angle) * one + tl.sin(angle) * other
    if group.turned > 1:
        blocks = tl.reshape(found, [group.size * group.dim // group.turned, group.turned])
        found = tl.reshape(hadamard(blocks), [group.size, group.dim])
    if (WHICH == 0 and group.center_rows > 0) or group.turned > 1:
        found = found.to(kind).to(tl.float32)
    return tl.where(inside, found, float("nan"))


@triton.jit(do_not_specialize=["heads", "columns", "done"])
def quantize_groups(
    # k and v [B, H, T, d]; padding [B, 1, 1, C] uint8, 0: not there; cursor [B, columns]; recent [B, H, W, 2, d];
    # center float32 [B, H, rows, d]; sink_index [B, 1, S] int32.
    k, v, padding, cursor, recent, center, sink_index,
    # Written: codes, key_params and value_params, in pages; sink_pairs [B, H, S, 2, d].
    # steps: memory of `encode_vectors`, float32 [B·H, groups, 33·g·D/32]; anything where no code is a trellis.
    codes, key_params, value_params, sink_pairs, steps, k_strides, v_strides,
    # Stride of the padding's rows.
    p_batch,
    # The largest number of the model's dtype; H; columns of the cursor; tokens that have left the window in earlier
    # launches.
    limit, heads, columns, done,
    window: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """One program: one group of g tokens of one head, if the group leaves the window.

    Bytes: 4·g·d read, g·w + 4·D + 4·g·D/gv written; in the trellis code `steps` too, in the cache. FLOPs: about 10 a
    number, 60 in the trellis code; and log2(turned).
    """
    g: tl.constexpr = group.size
    D: tl.constexpr = group.dim
    key_bits: tl.constexpr = group.key_bits
    value_bits: tl.constexpr = group.value_bits
    zero_point: tl.constexpr = group.zero_point  # Triton 3.6 passes no string of a tuple on
    kind: tl.constexpr = k.dtype.element_ty
    bh = tl.program_id(0).to(tl.int64)
    cursor += (bh // heads) * columns
    length, low_bit = tl.load(cursor + AT_LENGTH), tl.load(cursor + AT_LOW_BIT)
    start = low_bit + done + tl.program_id(1) * g
    if start + g > tl.load(cursor + AT_NEXT_LOW_BIT):
        return
    tokens, channel = (start + tl.arange(0, g))[:, None], tl.arange(0, D)[None, :]
    width: tl.constexpr = D * (key_bits + value_bits) // 8
    first = place_in_page(cursor, bh % heads, start, heads, start >= 0)
    places = first + tl.arange(0, g)
    steps += (bh * tl.num_programs(1) + tl.program_id(1)) * (33 * g * D // 32)

    key = load_group(
        k, k_strides, recent, center, sink_index, sink_pairs, start, tokens, channel, bh, heads, length, kind,
        WHICH=0, window=window, group=group,
    )  # fmt: skip
    if group.key_trellis:
        words, scale = encode_vectors(key, steps, group.d, 0)
        tl.store(key_params + places, stored_scale(scale, limit, key_params.dtype.element_ty))
    else:
        present = ~sinks_among(tokens, sink_index + bh // heads * group.sink_tokens, sink_tokens=group.sink_tokens)
        if group.padded:
            present = present & (tl.load(padding + (bh // heads) * p_batch + tokens) != 0)
        levels, scale, zero = quantized(key, present, 0, key_bits, zero_point, limit, key_params.dtype.element_ty)
        place = place_of_params(channel, D) if key_bits < ROWS_FROM else channel
        params = key_params + first // g * 2 * D + place
        tl.store(params, scale)
        tl.store(params + D, zero)
        words = packed(levels, key_bits, 0)
    store_words(words, codes, first, width, g, D, key_bits, 0)

    value = load_group(
        v, v_strides, recent, center, sink_index, sink_pairs, start, tokens, channel, bh, heads, length, kind,
        WHICH=1, window=window, group=group,
    )  # fmt: skip
    if group.value_trellis:
        words, scale = encode_vectors(value, steps, group.d, 1)
        swapped = places - places % 4 + places % 2 * 2 + places // 2 % 2
        tl.store(value_params + swapped, stored_scale(scale, limit, value_params.dtype.element_ty))
    else:
        parts: tl.constexpr = D // group.value_group
        value = tl.reshape(value, [g, parts, group.value_group])
        levels, scale, zero = quantized(
            value, value == value, 2, value_bits, zero_point, limit, value_params.dtype.element_ty
        )
        params = value_params + places[:, None, None] * (2 * parts) + tl.arange(0, parts)[None, :, None]
        tl.store(params, scale)
        tl.store(params + parts, zero)
        words = packed(tl.reshape(levels, [g, D]), value_bits, 1)
    store_words(words, codes, first, width, g, D, value_bits, 1)


@triton.jit(do_not_specialize=["heads", "columns", "count"])
def copy_pairs(
    # k and v [B, H, T, d]; cursor [B, columns]; recent [B, H, W, 2, d]; written: `to`, recent or a tier in pages.
    k, v, cursor, recent, to, k_strides, v_strides,
    # H, columns of the cursor, T new tokens.
    heads, columns, count,
    d: tl.constexpr, window: tl.constexpr, LEAVING: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: copy BLOCK tokens. LEAVING: those that leave the window, to a tier of 16 bits. Otherwise the new
    tokens that stay, to the ring (token t at t mod W).

    CHANNELS: d, padded. Bytes: 4·d per token read, 4·d written. No FLOPs.
    """
    bh = tl.program_id(0).to(tl.int64)
    cursor += (bh // heads) * columns
    length, next_low_bit = tl.load(cursor + AT_LENGTH), tl.load(cursor + AT_NEXT_LOW_BIT)
    first = tl.load(cursor + AT_LOW_BIT) if LEAVING else tl.maximum(length, next_low_bit)
    stop = next_low_bit if LEAVING else length + count
    tokens = (first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    there = tokens < stop
    inside = (channel < d) & there
    key = load_pairs(k, k_strides, recent, tokens, channel, inside, bh, heads, length, 0, window, d)
    value = load_pairs(v, v_strides, recent, tokens, channel, inside, bh, heads, length, 1, window, d)
    place = place_in_page(cursor, bh % heads, tokens, heads, there) if LEAVING else bh * window + tokens % window
    at = to + place * 2 * d + channel
    tl.store(at, key.to(to.dtype.element_ty), inside)
    tl.store(at + d, value.to(to.dtype.element_ty), inside)


@takes(tiers=StoredTiers, layout=Layout)
def append(
    k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, tiers: StoredTiers, layout: Layout, zero_point: str,
    frequencies: Tensor | None = None,
) -> None:  # fmt: skip
    """Run `tier_ops.append` with lengths on the device: at most T // g + 1 groups can leave the window at once."""
    if zero_point not in ("midpoint", "minimum", "middles"):
        raise NotImplementedError(f"quantiser {zero_point!r} has no CUDA kernel: `scale_and_zero` here supports three")
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    batch, heads, count, d = k.shape
    codes, key_params, value_params, center, sink_pairs, sink_index, recent = tiers
    window, strides = recent.shape[2], (k.stride()[:3], v.stride()[:3])
    common = {"heads": heads, "columns": cursor.stride(0), "window": window}

    def copy(to: Tensor, tokens: int, leaving: bool) -> None:
        copy_pairs[batch * heads, triton.cdiv(tokens, COPY_BLOCK)](
            k, v, cursor, recent, to, *strides, **common, count=count, d=d, LEAVING=leaving, BLOCK=COPY_BLOCK,
            CHANNELS=triton.next_power_of_2(d),
        )  # fmt: skip

    if not layout.is_quantised:
        copy(codes, count + window, True)
    else:
        dim, size = stored_dim(d), codes.shape[2] // key_params.shape[2]
        in_trellis = [is_trellis(params) for params in (key_params, value_params)]
        if is_found(center, frequencies, in_trellis[0]):
            set_center(k, padding, frequencies, cursor, recent, center, size)
        group = Group(
            d, dim, size, dim // value_params.shape[-1], layout.key_bits, layout.value_bits, zero_point,
            sink_index.shape[2], padding is not None, center.shape[2], rotation_block(d) if layout.is_rotated else 1,
            *in_trellis,
        )  # fmt: skip
        there = k if padding is None else padding.view(torch.uint8)
        steps, numbers = codes, 33 * size * dim // 32
        at_once = groups = count // size + 1
        if any(in_trellis):
            at_once = min(groups, max(1, SCRATCH // (4 * batch * heads * numbers)))
            steps = k.new_empty((batch * heads, at_once, numbers), dtype=torch.float32)
        for done in range(0, groups * size, at_once * size):
            quantize_groups[batch * heads, at_once](
                k, v, there, cursor, recent, center, sink_index, codes, key_params, value_params, sink_pairs, steps,
                *strides, p_batch=there.stride(0), limit=torch.finfo(k.dtype).max, done=done, **common, group=group,
                num_warps=min(max(4, size * dim // NUMBERS), 16),
            )  # fmt: skip
    copy(recent, min(count, window), False)
