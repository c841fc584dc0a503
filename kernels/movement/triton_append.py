"""Triton: `tier_ops.append`, new pairs to the recent tier, and full groups from there to the low-bit tier.

It is limited by copy bandwidth. The device reads all lengths, so that a decode step can be captured.
"""

# copy_groups       (B·H, tokens / 16, d / block)   the pairs that leave the window, centered and rotated
# quantize_groups   (B·H, groups)                   their codes and parameters
# write_pairs       (B·H, T / 16)                   `triton_copy`: the new pairs that stay in the window
#
# k_strides are the first three strides of k [B, H, T, d] in elements, v_strides those of v; channels and tiers are
# contiguous. d channels, groups of g tokens or gv channels, capacity of C tokens, window of W tokens.

from __future__ import annotations

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
from specache_compile.kernels.state.triton_pairs import hadamard, keep_sinks, load_pairs, sinks_among

from .triton_copy import write_through

# Tokens per program of `copy_groups`; it divides every group size.
BLOCK = 16
# Numbers of keys per warp of `quantize_groups`, which hold 128 registers a thread.
NUMBERS = 1024
# Bytes for the pairs that leave in one launch, and for the trellis code's numbers; at least one group per head.
SCRATCH = 32 << 20


@triton.jit(do_not_specialize=["heads", "columns", "done"])
def copy_groups(
    # k and v [B, H, T, d]; cursor [B, columns]; recent [B, H, W, 2, d]; center float32 [B, H, CENTERED, d], unused if
    # keys are not centered; sink_index [B, 1, S] int32. Written: pairs, a ring [B, H, room, 2, d] or a low-bit tier of
    # 16 bits in pages; sink_pairs [B, H, S, 2, d].
    k, v, cursor, recent, center, sink_index, pairs, sink_pairs, k_strides, v_strides,
    # H; columns of the cursor; tokens that have left the window in earlier launches.
    heads, columns, done,
    d: tl.constexpr, window: tl.constexpr, group: tl.constexpr, room: tl.constexpr, block: tl.constexpr,
    sink_tokens: tl.constexpr, TURNED: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK tokens of one head that leave the window, `block` channels of keys and values. Token t goes to
    t mod room of the ring, or if room is 0 to its place in the tier. sink_tokens: S, whose pairs go unchanged to
    sink_pairs. TURNED: rotate the pairs. CENTERED: rows of the center, which is subtracted from the keys first; 0 for
    none.

    Bytes a pair: 4·d read, 4·d written. FLOPs: 2·d·log2(block) if TURNED.
    """
    bh = tl.program_id(0).to(tl.int64)
    cursor += (bh // heads) * columns
    length = tl.load(cursor + AT_LENGTH)
    start = tl.load(cursor + AT_LOW_BIT) + done + tl.program_id(1) * BLOCK
    if start >= tl.load(cursor + AT_NEXT_LOW_BIT):
        return
    tokens = (start + tl.arange(0, BLOCK))[:, None]
    channel = (tl.program_id(2) * block + tl.arange(0, block))[None, :]
    inside = channel < d
    key = load_pairs(k, k_strides, recent, tokens, channel, inside, bh, heads, length, 0, window, d)
    value = load_pairs(v, v_strides, recent, tokens, channel, inside, bh, heads, length, 1, window, d)
    keep_sinks(
        key, value, tokens, channel, inside, sink_pairs + bh * (sink_tokens * 2 * d),
        sink_index + bh // heads * sink_tokens, sink_tokens=sink_tokens, d=d,
    )  # fmt: skip
    if CENTERED:
        # A group is a multiple of blocks.
        first, places = start // group * group, tokens - start // group * group
        if CENTERED == STEPPED_ROWS:
            first, places = start // group // STEPS * STEPS, start // group % STEPS
        one, other, theta = load_group_center(center, bh, first, channel, inside, d=d, rows=CENTERED)
        angle = places.to(tl.float32) * theta
        key -= tl.cos(angle) * one + tl.sin(angle) * other
    if TURNED:
        key, value = hadamard(key), hadamard(value)
    place = bh * room + tokens % room if room > 0 else place_in_page(cursor, bh % heads, tokens, heads, tokens >= 0)
    at = pairs + place * 2 * d + channel
    tl.store(at, key.to(pairs.dtype.element_ty), inside)
    tl.store(at + d, value.to(pairs.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["heads", "columns", "done"])
def quantize_groups(
    # pairs [B, H, room, 2, d], the output of `copy_groups`; padding [B, 1, 1, C] uint8, 0: not there; cursor
    # [B, columns]; sink_index [B, 1, S] int32.
    pairs, padding, cursor, sink_index,
    # Written: codes, key_params and value_params, in pages.
    # steps: memory of `encode_vectors`, float32 [B·H, groups, 33·g·D/32]; anything where no code is a trellis.
    codes, key_params, value_params, steps,
    # Stride of the padding's rows.
    p_batch,
    # The largest number of the model's dtype; H; columns of the cursor; tokens that have left the window in earlier
    # launches.
    limit, heads, columns, done,
    d: tl.constexpr, D: tl.constexpr, room: tl.constexpr, group: tl.constexpr, value_group: tl.constexpr,
    key_bits: tl.constexpr, value_bits: tl.constexpr, zero_point: tl.constexpr, sink_tokens: tl.constexpr,
    PADDED: tl.constexpr, KEY_TRELLIS: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """One program: one group of g tokens of one head, if the group leaves the window.

    D: d, padded. zero_point: name of a quantiser. sink_tokens: S. PADDED: there is padding. KEY_TRELLIS, TRELLIS: keys,
    values are in the trellis code.
    Bytes: 4·g·d read, g·w + 4·D + 4·g·D/gv written; in the trellis code `steps` too, in the cache. FLOPs: about 10 a
    number, 60 in the trellis code.
    """
    bh = tl.program_id(0).to(tl.int64)
    cursor += (bh // heads) * columns
    start = tl.load(cursor + AT_LOW_BIT) + done + tl.program_id(1) * group
    if start + group > tl.load(cursor + AT_NEXT_LOW_BIT):
        return
    tokens, channel = (start + tl.arange(0, group))[:, None], tl.arange(0, D)[None, :]
    inside = channel < d
    width: tl.constexpr = D * (key_bits + value_bits) // 8
    first = place_in_page(cursor, bh % heads, start, heads, start >= 0)
    places = first + tl.arange(0, group)
    steps += (bh * tl.num_programs(1) + tl.program_id(1)) * (33 * group * D // 32)
    pairs += (bh * room + tokens % room) * 2 * d + channel

    key = tl.load(pairs, inside, float("nan")).to(tl.float32)
    if KEY_TRELLIS:
        words, scale = encode_vectors(key, steps, d, 0)
        tl.store(key_params + places, stored_scale(scale, limit, key_params.dtype.element_ty))
    else:
        present = ~sinks_among(tokens, sink_index + bh // heads * sink_tokens, sink_tokens=sink_tokens)
        if PADDED:
            present = present & (tl.load(padding + (bh // heads) * p_batch + tokens) != 0)
        levels, scale, zero = quantized(key, present, 0, key_bits, zero_point, limit, key_params.dtype.element_ty)
        place = place_of_params(channel, D) if key_bits < ROWS_FROM else channel
        params = key_params + first // group * 2 * D + place
        tl.store(params, scale)
        tl.store(params + D, zero)
        words = packed(levels, key_bits, 0)
    store_words(words, codes, first, width, group, D, key_bits, 0)

    value = tl.load(pairs + d, inside, float("nan")).to(tl.float32)
    if TRELLIS:
        words, scale = encode_vectors(value, steps, d, 1)
        swapped = places - places % 4 + places % 2 * 2 + places // 2 % 2
        tl.store(value_params + swapped, stored_scale(scale, limit, value_params.dtype.element_ty))
    else:
        parts: tl.constexpr = D // value_group
        value = tl.reshape(value, [group, parts, value_group])
        levels, scale, zero = quantized(
            value, value == value, 2, value_bits, zero_point, limit, value_params.dtype.element_ty
        )
        params = value_params + places[:, None, None] * (2 * parts) + tl.arange(0, parts)[None, :, None]
        tl.store(params, scale)
        tl.store(params + parts, zero)
        words = packed(tl.reshape(levels, [group, D]), value_bits, 1)
    store_words(words, codes, first, width, group, D, value_bits, 1)


@takes(tiers=StoredTiers, layout=Layout)
def append(
    k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, tiers: StoredTiers, layout: Layout, zero_point: str,
    frequencies: Tensor | None = None,
) -> None:  # fmt: skip
    """Run `tier_ops.append` with lengths on the device: at most T // g + 1 groups can leave the window at once."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    batch, heads, count, d = k.shape
    codes, key_params, value_params, center, sink_pairs, sink_index, recent = tiers
    window, sink_tokens = recent.shape[2], sink_index.shape[2]
    if zero_point not in ("midpoint", "minimum", "middles"):
        raise NotImplementedError(f"quantiser {zero_point!r} has no branch in `triton_levels.scale_and_zero`")
    # Without quantisation any step that divides every group size is correct.
    group = codes.shape[2] // key_params.shape[2] if layout.is_quantised else BLOCK
    common = {"heads": heads, "columns": cursor.stride(0), "d": d, "group": group, "sink_tokens": sink_tokens}

    def copy(pairs: Tensor, tokens: int, done: int, room: int) -> None:
        """Launch `copy_groups` for so many tokens after the first `done`."""
        block = rotation_block(d) if layout.is_rotated else triton.next_power_of_2(d)
        copy_groups[batch * heads, triton.cdiv(tokens, BLOCK), triton.cdiv(d, block)](
            k, v, cursor, recent, center, sink_index, pairs, sink_pairs, k.stride()[:3], v.stride()[:3], done=done,
            **common, window=window, room=room, block=block, TURNED=layout.is_rotated,
            CENTERED=center.shape[2] * layout.is_quantised, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip

    if not layout.is_quantised:
        copy(codes, count + window, 0, 0)
    else:
        dim, in_trellis = stored_dim(d), [is_trellis(params) for params in (key_params, value_params)]
        there = k if padding is None else padding.view(torch.uint8)
        if is_found(center, frequencies, in_trellis[0]):
            set_center(k, padding, frequencies, cursor, recent, center, group)
        groups = count // group + 1
        fit = max(1, SCRATCH // (batch * heads * group * 2 * dim * k.element_size()))
        # Groups of one launch: a power of two, so that few kernels are compiled.
        step = min(1 << fit.bit_length() - 1, triton.next_power_of_2(groups))
        pairs, steps = k.new_empty((batch, heads, step * group, 2, d)), codes
        if any(in_trellis):
            steps = k.new_empty((batch * heads, step, 33 * group * dim // 32), dtype=torch.float32)
        for done in range(0, groups * group, step * group):
            copy(pairs, step * group, done, step * group)
            quantize_groups[batch * heads, step](
                pairs, there, cursor, sink_index, codes, key_params, value_params, steps, p_batch=there.stride(0),
                limit=torch.finfo(k.dtype).max, done=done, **common, D=dim, room=step * group,
                value_group=dim // value_params.shape[-1], key_bits=layout.key_bits, value_bits=layout.value_bits,
                zero_point=zero_point, PADDED=padding is not None, KEY_TRELLIS=in_trellis[0], TRELLIS=in_trellis[1],
                num_warps=min(max(4, group * dim // NUMBERS), 16),
            )  # fmt: skip
    write_through(k, v, cursor, recent, ring=window)
