"""Triton: `tier_ops.append`, new pairs to the recent tier, and full groups from there to the low-bit tier.

It is limited by copy bandwidth. The device reads all lengths, so that a decode step can be captured.
"""

# store_groups   (B·H, groups)   the codes and parameters of the pairs that leave the window, centered and rotated
# write_pairs    (B·H, T / 16)   `triton_copy`: the new pairs that stay in the window
#
# k_strides are the first three strides of k [B, H, T, d] in elements, v_strides those of v; channels and tiers are
# contiguous. d channels, groups of g tokens or gv channels, capacity of C tokens, window of W tokens.

from __future__ import annotations

from collections import namedtuple

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
from specache_compile.kernels.state.triton_center import group_centers, set_center
from specache_compile.kernels.state.triton_cursor import AT_LENGTH, AT_LOW_BIT, AT_NEXT_LOW_BIT, place_in_page
from specache_compile.kernels.state.triton_pairs import hadamard, keep_sinks, load_pairs, sinks_among

from .triton_copy import write_through

# Tokens per program if nothing is quantised; it divides every group size.
BLOCK = 16
# Numbers of keys per warp of `store_groups`: 16 a thread, or in the trellis code a circle.
NUMBERS, IN_CIRCLES = 512, 1024
# Bytes for the trellis code's numbers in one launch; at least one group per head.
SCRATCH = 32 << 20


# What `store_groups` is compiled for. dim, group, value_group: D, g and gv. window, sink_tokens: W and S. key_bits: 16
# if pairs are not quantised. zero_point: name of a quantiser. turned: channels that are rotated together, or 1.
# center_rows: rows of the keys' center, or 0.
Form = namedtuple(
    "Form",
    "d dim group value_group window sink_tokens key_bits value_bits zero_point turned center_rows "
    "key_trellis value_trellis",
)


@triton.jit
def leaving(
    # k or v and its strides; recent, center, sink_pairs and sink_index as in `store_groups`.
    new, strides, recent, center, sink_pairs, sink_index,
    # The group's first token; the KV head's index in [B, H]; H; the cached tokens. WHICH: 0 for keys, 1 for values.
    start, bh, heads, length, WHICH: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Return a group's keys or values [g, D] that leave the window, in float32, as they are stored: centered, rotated,
    and rounded to their dtype; NaN in padded channels. Pairs of sinks go unchanged to sink_pairs."""
    D: tl.constexpr = form.dim
    tokens, channel = (start + tl.arange(0, form.group))[:, None], tl.arange(0, D)[None, :]
    inside = channel < form.d
    x = load_pairs(new, strides, recent, tokens, channel, inside, bh, heads, length, WHICH, form.window, form.d)
    sink_at = sink_pairs + (bh * (form.sink_tokens * 2) + WHICH) * form.d
    sink_row = sink_index + bh // heads * form.sink_tokens
    keep_sinks(x, tokens, channel, inside, sink_at, sink_row, sink_tokens=form.sink_tokens, d=form.d)
    if WHICH == 0 and form.center_rows > 0:
        x -= group_centers(center, bh, start, channel, d=form.d, group=form.group, rows=form.center_rows)
    x = hadamard(x, form.turned).to(new.dtype.element_ty).to(tl.float32)
    return tl.where(inside, x, float("nan"))


@triton.jit(do_not_specialize=["heads", "columns", "done"])
def store_groups(
    # k and v [B, H, T, d]; padding [B, 1, 1, C] uint8, 0: not there, or None; cursor int64 [B, columns]; recent
    # [B, H, W, 2, d]; center float32 [B, H, center_rows, d]; sink_index [B, 1, S] int32.
    k, v, padding, cursor, recent, center, sink_index,
    # Written: codes, key_params and value_params, in pages; sink_pairs [B, H, S, 2, d].
    codes, key_params, value_params, sink_pairs,
    # Memory of `encode_vectors`, float32 [B·H, groups, 33·g·D/32]; anything where no code is a trellis.
    steps,
    # p_batch: stride of the padding's rows. limit: the largest number of the model's dtype. H; columns of the cursor;
    # groups that have left the window in earlier launches.
    k_strides, v_strides, p_batch, limit, heads, columns, done,
    form: tl.constexpr,
):  # fmt: skip
    """One program: one group of g tokens of one head, if the group leaves the window.

    Bytes of a group: 4·g·d read, g·w + 4·D + 4·g·D/gv written; in the trellis code `steps` too, in the cache. FLOPs:
    about 10 a number, 60 in the trellis code, and 2·log2(turned).
    """
    D: tl.constexpr = form.dim
    group: tl.constexpr = form.group
    zero_point: tl.constexpr = form.zero_point
    width: tl.constexpr = D * (form.key_bits + form.value_bits) // 8
    bh = tl.program_id(0).to(tl.int64)
    batch = bh // heads
    cursor += batch * columns
    length, stop = tl.load(cursor + AT_LENGTH), tl.load(cursor + AT_NEXT_LOW_BIT)
    steps += (bh * tl.num_programs(1) + tl.program_id(1)) * (33 * group * D // 32)
    channel = tl.arange(0, D)[None, :]
    start = tl.load(cursor + AT_LOW_BIT) + (done + tl.program_id(1)) * group
    if start >= stop:
        return
    first = place_in_page(cursor, bh % heads, start, heads, start >= 0)
    places = first + tl.arange(0, group)
    pairs = codes + places[:, None] * (2 * form.d) + channel  # if they are not quantised

    key = leaving(k, k_strides, recent, center, sink_pairs, sink_index, start, bh, heads, length, 0, form)
    if form.key_bits == 16:
        tl.store(pairs, key.to(codes.dtype.element_ty), channel < form.d)
    elif form.key_trellis:
        words, scale = encode_vectors(key, steps, form.d, 0)
        tl.store(key_params + places, stored_scale(scale, limit, key_params.dtype.element_ty))
        store_words(words, codes, first, width, group, D, 1, 0)
    else:
        tokens = (start + tl.arange(0, group))[:, None]
        sink_row = sink_index + batch * form.sink_tokens
        present = ~sinks_among(tokens, sink_row, sink_tokens=form.sink_tokens)
        if padding is not None:
            present = present & (tl.load(padding + batch * p_batch + tokens) != 0)
        levels, scale, zero = quantized(key, present, 0, form.key_bits, zero_point, limit, key_params.dtype.element_ty)
        params = key_params + first // group * 2 * D
        params += place_of_params(channel, D) if form.key_bits < ROWS_FROM else channel
        tl.store(params, scale)
        tl.store(params + D, zero)
        store_words(packed(levels, form.key_bits, 0), codes, first, width, group, D, form.key_bits, 0)

    value = leaving(v, v_strides, recent, center, sink_pairs, sink_index, start, bh, heads, length, 1, form)
    if form.value_bits == 16:
        tl.store(pairs + form.d, value.to(codes.dtype.element_ty), channel < form.d)
    elif form.value_trellis:
        words, scale = encode_vectors(value, steps, form.d, 1)
        swapped = places - places % 4 + places % 2 * 2 + places // 2 % 2
        tl.store(value_params + swapped, stored_scale(scale, limit, value_params.dtype.element_ty))
        store_words(words, codes, first, width, group, D, 1, 1)
    else:
        parts: tl.constexpr = D // form.value_group
        value = tl.reshape(value, [group, parts, form.value_group])
        levels, scale, zero = quantized(
            value, value == value, 2, form.value_bits, zero_point, limit, value_params.dtype.element_ty
        )
        params = value_params + places[:, None, None] * (2 * parts) + tl.arange(0, parts)[None, :, None]
        tl.store(params, scale)
        tl.store(params + parts, zero)
        words = packed(tl.reshape(levels, [group, D]), form.value_bits, 1)
        store_words(words, codes, first, width, group, D, form.value_bits, 1)


@takes(tiers=StoredTiers, layout=Layout)
def append(
    k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, tiers: StoredTiers, layout: Layout, zero_point: str,
    frequencies: Tensor | None = None,
) -> None:  # fmt: skip
    """Run `tier_ops.append` with lengths on the device: at most T // g + 1 groups can leave the window at once."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    batch, heads, count, d = k.shape
    codes, key_params, value_params, center, sink_pairs, sink_index, recent = tiers
    window, dim, steps, is_quantised = recent.shape[2], stored_dim(d), codes, layout.is_quantised
    if zero_point not in ("midpoint", "minimum", "middles"):
        raise NotImplementedError(f"quantiser {zero_point!r} has no branch in `triton_levels.scale_and_zero`")
    # Without quantisation the group size is unknown; any step that divides it is correct.
    group = codes.shape[2] // key_params.shape[2] if is_quantised else BLOCK
    groups = programs = count // group + 1 if is_quantised else triton.cdiv(count + window, BLOCK)
    in_trellis = [is_quantised and is_trellis(params) for params in (key_params, value_params)]
    padding = None if padding is None else padding.view(torch.uint8)
    if is_quantised and is_found(center, frequencies, in_trellis[0]):
        set_center(k, padding, frequencies, cursor, recent, center, group)
    if any(in_trellis):
        numbers = 33 * group * dim // 32
        programs = min(groups, max(1, SCRATCH // (batch * heads * numbers * 4)))
        steps = k.new_empty((batch * heads, programs, numbers), dtype=torch.float32)
    form = Form(
        d=d, dim=dim, group=group, value_group=dim // value_params.shape[-1], window=window,
        sink_tokens=sink_index.shape[2], key_bits=layout.key_bits, value_bits=layout.value_bits, zero_point=zero_point,
        turned=rotation_block(d) if layout.is_rotated else 1, center_rows=center.shape[2] * is_quantised,
        key_trellis=in_trellis[0], value_trellis=in_trellis[1],
    )  # fmt: skip
    warps = group * dim // (IN_CIRCLES if any(in_trellis) else NUMBERS)
    for done in range(0, groups, programs):
        store_groups[batch * heads, programs](
            k, v, padding, cursor, recent, center, sink_index, codes, key_params, value_params, sink_pairs, steps,
            k.stride()[:3], v.stride()[:3], p_batch=0 if padding is None else padding.stride(0),
            limit=torch.finfo(k.dtype).max, heads=heads, columns=cursor.stride(0), done=done, form=form,
            num_warps=min(max(4, warps), 16),
        )  # fmt: skip
    write_through(k, v, cursor, recent, ring=window)
