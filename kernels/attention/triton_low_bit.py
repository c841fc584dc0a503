"""Triton: attention over one split's share of the low-bit tier, whole or by halves, for `triton_decode.attend_tiers`.

Instructions per stored number are the limit, not bytes: an H200 has 3.5 of them before 60 % of its bandwidth is out of
reach (tools/compile_kernels.py counts them). The comment below explains the design, and has a worked example.
"""

# - The products are K·qᵀ and Vᵀ·wᵀ. A tensor core instruction has eight columns for the few query rows, and takes the
#   unpacked codes from registers, so that only packed codes pass through shared memory.
# - One AND unpacks two numbers (`fields_of`, `numbers`). q and the weights are multiplied by the scales; zero points
#   are a separate product.
# - A program has one warp: several warps would unpack the same codes, or synchronise for every tile's maximum.
#
# Unpacked codes come in a permuted order, which q and the sums use too. They are multiplied by powers of two, by which
# q's scales and the sums are divided. If keys and values have different bits, each has separate planes, widths and
# fields.
# Worked example: d = 16 channels, keys and values of 2 bits, groups of g = 4 tokens, gv = 8 channels:
#
#     planes = 4         codes in a byte: plane p of byte j is channel 4·p + j (`quantize.pack`)
#     plane_width = 4    bytes of a token's key, and of its value after it
#     halves = 2         bytes in an element, if loaded as int16; width = 2 elements of a key, and as many of a value:
#                        stride = 4 from one token to the next
#     fields = 8         codes in an element, planes · halves: field f is plane f % 4 of byte f // 4
#
#     With a capacity of C = 8 tokens, head 3's tile 1 starts at token 3 · 8 + 1 · 4 = 28, so at element
#     28 · stride = 112 of the codes. The key of its token i is 4 · i elements further, the value 2 more. Its key scales
#     are those of group 3 · 8 / 4 + 1 = 7, so at number 7 · 2 · d = 224, and its key zeros 16 further.
#
#     One token's key by channel, by byte, and as a word (element 1 above element 0):
#         codes              1   0   2   3   2   1   0   3   3   3   1   0   0   2   1   1
#         bytes           0x39 0xb4 0x52 0x4f
#         word            0x4f52b439
#     One AND (with a shift from field 4 on) leaves one field of both elements of a word. Field 1 has channels 4 and 6:
#     0x4f52b439 & 0x000c000c = 0x00000008, so 2 · 4 in the lower half, channel 4, and 0 · 4 in the upper, channel 6.
#     All fields are the 16 columns of a product's left side (`key_columns`), each number its code · 4**plane:
#         field              0   0   1   1   2   2   3   3   4   4   5   5   6   6   7   7
#         element            0   1   0   1   0   1   0   1   0   1   0   1   0   1   0   1
#         channel            0   2   4   6   8  10  12  14   1   3   5   7   9  11  13  15
#         number             1   2   8   0  48  16   0  64   0   3   4  12  48   0 128  64
#     A key is code · s + z, so a logit is Σ number · (q · s / 4**plane) + Σ q · z: two products. q's columns have the
#     same channels, and in the first product (`lifted`) the inverse of number's power of two. All tokens of a group
#     share the second. 8-bit z counts eighths of s: Σ eighths · 4**plane · (q · s / 4**plane) / 8.
#
#     Values are unpacked in parts that share one scale per token: SPAN = gcd(plane_width, gv) bytes of `shared` = 2
#     planes. Their words hold two tokens' elements; a part's fields are the rows of a product's left side
#     (`value_rows`):
#         part               0   0   0   0   0   0   0   0   1   1   1   1   1   1   1   1
#         part's channel     0   2   4   6   1   3   5   7   8  10  12  14   9  11  13  15
#     A sum is Σ w · (code · s + z) = Σ number · (w · s) / 4**plane + Σ w · z. The first is summed over a part's rows,
#     and divided after the last tile; the second is one sum per group of channels. In a trellis z is -3/2 · s.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specache_compile.kernels.codes.triton_levels import DROPPED, EIGHTH, read_scale, read_zero
from specache_compile.kernels.codes.triton_trellis import load_expanded, load_expanded_words
from specache_compile.kernels.state.triton_center import STEPPED_ROWS
from specache_compile.kernels.state.triton_cursor import place_in_page

from .triton_softmax import biased, capped, exponential, grown, shown

SLOT_BLOCK = tl.constexpr(64)
# The base of a tile without visible tokens: the smallest finite number.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# The fewest rows of a product's left side, as in a tensor core instruction.
FEWEST_LEFT = tl.constexpr(16)
# Bases per step of the search for the highest.
BASE_BLOCK = tl.constexpr(64)
# The ratio of a bfloat16 and a float16 with the same exponent bits.
BIASES_APART = tl.constexpr(2.0**112)


@triton.jit
def either(one, other):
    return one | other


@triton.jit
def bits_of(index, first, group: tl.constexpr):
    """Return int32 [group / 32], a bit per token from `first` on, set for the tokens in `index` [n].

    Each entry of `index` sets its bit; comparing all pairs of tokens would cost as much as a whole product.
    """
    word, place = tl.arange(0, group // 32), index - first
    here = (place >> 5)[:, None] == word[None, :]
    return tl.reduce(tl.where(here, (1 << (place & 31))[:, None], 0), 0, either)


@triton.jit
def fetched_tokens(slot_index, first, top_k: tl.constexpr, group: tl.constexpr):
    """Return `bits_of` the tokens in the slots."""
    found = tl.zeros([group // 32], tl.int32)
    if top_k > 0:  # else `slot_index` is unused, of any type
        for start in range(0, top_k, SLOT_BLOCK):
            slot = start + tl.arange(0, SLOT_BLOCK)
            found |= bits_of(tl.load(slot_index + slot, slot < top_k, -1), first, group=group)
    return found


@triton.jit
def set_in(bits, group: tl.constexpr):
    """Convert the result of `bits_of` to bool [group]."""
    return tl.reshape(((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0, [group])


@triton.jit
def fields_of(packed, first: tl.constexpr, planes: tl.constexpr, bits: tl.constexpr):
    """Unpack [A, B] to int32 [A, B / 2, F]; each half has a code of one of two adjacent elements. int32 [A, B / 2] has
    pairs already.

    A field is a plane of a byte: the planes from `first` on of an element's low byte, then of its high byte, if any. A
    code keeps its position in its byte, so that a field costs one AND.
    """
    if packed.dtype == tl.int32:
        fields: tl.constexpr = 2 * planes
        half: tl.constexpr = packed.shape[1]
        pairs = packed
    else:
        fields: tl.constexpr = packed.dtype.primitive_bitwidth // 8 * planes
        half: tl.constexpr = packed.shape[1] // 2
        even, odd = tl.split(tl.reshape(packed, [packed.shape[0], half, 2]))
        pairs = (even.to(tl.int32) & 0xFFFF) | (odd.to(tl.int32) << 16)
    found = ()
    for field in tl.static_range(fields):
        levels = 0x10001 * ((1 << bits) - 1) << (first + field % planes) * bits
        found = found + ((pairs >> (field // planes * 8)) & levels,)
    for step in tl.static_range(1, 5):
        if fields >> step > 0:
            joined = ()
            for at in tl.static_range(fields >> step):
                joined = joined + (tl.join(found[at], found[at + (fields >> step)]),)
            found = joined
    return tl.reshape(found[0], [packed.shape[0], half, fields])


@triton.jit
def numbers(pairs, kind: tl.constexpr):
    """Return int32 [...] as [..., 2] in `kind`: each half, below 256, times the smallest number of a 16-bit kind.

    This needs no conversion: a float without exponent bits is its mantissa times that number, and tensor cores support
    subnormals. The exponent's lowest bit, a bfloat16's eighth bit, fits this formula too.
    """
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return halves.to(tl.float32) if kind == tl.float32 else halves.to(kind, bitcast=True)


@triton.jit
def key_columns(fields: tl.constexpr, planes: tl.constexpr, plane_width: tl.constexpr, WIDTH: tl.constexpr):
    """Return channel, plane and element of each column of unpacked keys, int32 [fields · WIDTH].

    Two adjacent elements, then two fields are innermost, since a thread holds four adjacent columns of a product's left
    side: each thread unpacks its own columns.
    """
    order = tl.arange(0, fields * WIDTH)
    field, element = tl.zeros_like(order), order
    if fields > 1:
        field = order // (2 * WIDTH) * 2 + order // 2 % 2
        element = order // 4 % (WIDTH // 2) * 2 + order % 2
    return field % planes * plane_width + element * (fields // planes) + field // planes, field % planes, element


@triton.jit
def unpacked_keys(packed, planes: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr):
    """Return a tile's key codes [group, fields · WIDTH] in `kind` and `key_columns`' order, times 2**(plane · bits)."""
    found = fields_of(packed, 0, planes, bits)
    group: tl.constexpr = found.shape[0]
    half: tl.constexpr = found.shape[1]
    fields: tl.constexpr = found.shape[2]
    INNER: tl.constexpr = 2 if fields > 1 else 1
    found = tl.permute(tl.reshape(found, [group, half, fields // INNER, INNER]), (0, 2, 1, 3))
    return tl.reshape(numbers(found, kind), [group, 2 * half * fields])


@triton.jit
def unpacked_values(packed, first: tl.constexpr, shared: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr):
    """Unpack a part's value codes [PIECE, group] to [fields · PIECE, group] in `kind` and `value_rows`' order, times
    2**(plane · bits). The part has `shared` planes from `first` on."""
    found = tl.permute(fields_of(packed, first, shared, bits), (2, 0, 1))
    return tl.reshape(numbers(found, kind), [found.shape[0] * found.shape[1], 2 * found.shape[2]])


@triton.jit
def value_rows(
    part: tl.constexpr, shared: tl.constexpr, runs: tl.constexpr, halves: tl.constexpr, plane_width: tl.constexpr,
    SPAN: tl.constexpr, PIECE: tl.constexpr, WORDED: tl.constexpr,
):  # fmt: skip
    """Return channel, plane and element in the span of each row of a part's unpacked values, int32
    [shared · halves · PIECE]. WORDED: elements are in `load_expanded_words`' order."""
    order = tl.arange(0, shared * halves * PIECE)
    plane = part % runs * shared + order // PIECE % shared
    element = order % PIECE
    if WORDED:
        HALF: tl.constexpr = PIECE // 2
        element = tl.where(element % HALF < SPAN // 4, element // HALF * (SPAN // 4) + element % HALF, SPAN)
    return plane * plane_width + part // runs * SPAN + element * halves + order // PIECE // shared, plane, element


@triton.jit
def load_keys(
    tile_codes, group: tl.constexpr, width: tl.constexpr, stride: tl.constexpr, WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Load a tile's key codes as [group, WIDTH] elements, or as [group, WIDTH / 2] words of two elements."""
    token = tl.arange(0, group)[:, None]
    if WORDS:
        words = tile_codes.to(tl.pointer_type(tl.int32), bitcast=True)
        pair = tl.arange(0, WIDTH // 2)[None, :]
        codes = tl.load(words + token * (stride // 2) + pair, pair < width // 2, 0)
    else:
        element = tl.arange(0, WIDTH)[None, :]
        codes = tl.load(tile_codes + token * stride + element, element < width, 0)
    return codes


@triton.jit
def key_params_in(scale, zero, kind: tl.constexpr):
    """Convert a key's scale and zero point to `kind`, exactly for 8 bits, where the zero point counts eighths of a
    scale. A conversion via float32 would cost as much as unpacking the codes."""
    if scale.dtype == tl.uint8:
        if kind == tl.bfloat16:  # move exponent and mantissa bits to a bfloat16's positions
            scale = (scale.to(tl.int16) << DROPPED - 3).to(tl.bfloat16, bitcast=True) * BIASES_APART
        else:
            scale = (scale.to(tl.int16) << DROPPED).to(tl.float16, bitcast=True)
        zero = zero.to(tl.int8, bitcast=True)
    return scale.to(kind), zero.to(kind)


@triton.jit
def in_key_columns(x, d: tl.constexpr, planes: tl.constexpr, halves: tl.constexpr):
    """Permute x [d] from the channels' order to `key_columns`' order."""
    x = tl.reshape(x, [planes // 2, 2, d // planes // halves // 2, 2, halves])
    return tl.reshape(tl.permute(x, (4, 0, 2, 1, 3)), [d])


@triton.jit
def load_key_params(params, d: tl.constexpr, planes: tl.constexpr, halves: tl.constexpr, kind: tl.constexpr):
    """Load a tile's `key_params_in` from params [2, d], each [d] in `key_columns`' order.

    Contiguous loads become asynchronous copies; the registers are then permuted. Loads of single channels would wait
    for memory in every tile.
    """
    scale, zero = key_params_in(tl.load(params + tl.arange(0, d)), tl.load(params + d + tl.arange(0, d)), kind)
    return in_key_columns(scale, d, planes, halves), in_key_columns(zero, d, planes, halves)


@triton.jit
def load_value_params(params, group: tl.constexpr, groups: tl.constexpr):
    """Load a tile's value scales (`groups` of [group]) and zeros [group, groups], in one tuple, from params
    [group, 2, groups], as `load_key_params` does."""
    whole = tl.load(params + tl.arange(0, group * 2 * groups))
    scales, zeros = tl.split(tl.permute(tl.reshape(whole, [group, 2, groups]), (0, 2, 1)))
    scales = read_scale(scales)
    zeros = read_zero(zeros, scales)
    columns = (scales,)
    for step in tl.static_range(8):
        if groups >> step > 1:  # column i of 2**step holds numbers i, i + 2**step, ...; split it into two columns
            evens, odds = (), ()
            for at in tl.static_range(1 << step):
                even, odd = tl.split(tl.reshape(columns[at], [group, groups >> step + 1, 2]))
                evens, odds = evens + (even,), odds + (odd,)
            columns = evens + odds
    found = ()
    for at in tl.static_range(groups):
        found = found + (tl.reshape(columns[at], [group]),)
    return found + (zeros,)


@triton.jit
def highest_base(base_row, real, first, end):
    """Return each row's highest base of the blocks from `first` to `end`, float32 [ROWS]."""
    found = tl.full([base_row.shape[0], BASE_BLOCK], float("-inf"), tl.float32)
    for start in range(first, end, BASE_BLOCK):
        block = start + tl.arange(0, BASE_BLOCK)
        there = real[:, None] & (block < end)[None, :]
        found = tl.maximum(found, tl.load(base_row[:, None] + block[None, :], there, float("-inf")))
    return tl.max(found, 1)


@triton.jit
def attend_low_bit(
    # For triton_decode.attend_tiers' rows [ROWS]: pointers to q (rotated if keys are), the mask's row, the logits,
    # their base, the center's shares and the sums; which rows are real, and which keep their logits.
    q_row, mask_row, logits_row, base_row, shares_row, out_row, real, kept,
    # The KV head's index in [B, H]; H; its row of the cursor; the number of low-bit tokens; share `split` of `splits`.
    bh, heads, table, low_bit, split, splits,
    # As in attend_tiers.
    codes, key_params, value_params, slot_index, sink_row, mask, m_token, scale, softcap, capacity,
    d: tl.constexpr, key_bits: tl.constexpr, value_bits: tl.constexpr, group: tl.constexpr, value_group: tl.constexpr,
    top_k: tl.constexpr, sink_tokens: tl.constexpr, stored: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    SPAN: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, KEY_CIRCLE: tl.constexpr, CIRCLE: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Attend over one split's share of the low-bit tier, without tokens in slots and sinks, whose logits are -inf.
    Stores sums, returns peak and total.

    With given logits, the peak is the split's highest base, slots included, so sums are never rescaled. In float16 this
    would round small weights to 0, so float16 uses a running peak; other dtypes have a range of e⁻⁸⁰.

    An element of `codes` is one or two bytes (`halves`), or a number if bits are 16. SPAN bytes of a token's values
    share a scale in each plane, EXACT tokens share a base. KEY_CIRCLE, CIRCLE: bytes of a circle in the keys' and
    values' trellis code, else 0. Loading expands it to a 2-bit code with levels s·(q - 3/2). attend_tiers has bytes and
    FLOPs.
    """
    kind: tl.constexpr = q_row.dtype.element_ty
    plain: tl.constexpr = key_bits == 16
    # The value of a code's lowest bit, see `numbers`. The lift keeps bfloat16's sums in float32's normal range.
    unit: tl.constexpr = 2.0**-133 if kind == tl.bfloat16 else (2.0**-24 if kind == tl.float16 else 1.0)
    lift: tl.constexpr = 2.0**48 if kind == tl.bfloat16 else 1.0
    undo: tl.constexpr = 1.0 if plain else 1.0 / (lift * unit)
    halves: tl.constexpr = 1 if plain else codes.dtype.element_ty.primitive_bitwidth // 8
    key_level_bits: tl.constexpr = 2 if KEY_CIRCLE > 0 else key_bits
    key_planes: tl.constexpr = 1 if plain else 8 // key_level_bits
    key_plane_width: tl.constexpr = d // key_planes
    key_width: tl.constexpr = key_plane_width // halves
    stored_key_width: tl.constexpr = key_width // 2 if KEY_CIRCLE > 0 else key_width
    # Elements are unpacked in pairs.
    KEY_WIDTH: tl.constexpr = max(CHANNELS // (key_planes * halves), 2)
    level_bits: tl.constexpr = 2 if CIRCLE > 0 else value_bits
    planes: tl.constexpr = 1 if plain else 8 // level_bits
    plane_width: tl.constexpr = d // planes
    width: tl.constexpr = plane_width // halves
    stored_width: tl.constexpr = width // 2 if CIRCLE > 0 else width
    WORDED: tl.constexpr = CIRCLE == 4 and halves == 2
    stride: tl.constexpr = stored_key_width + stored_width
    WORDS: tl.constexpr = not plain and halves == 2 and stored_key_width % 2 == 0 and stored_width % 2 == 0
    # `load_expanded_words` needs a power of two of words.
    KEYS_WORDED: tl.constexpr = WORDS and KEY_CIRCLE == 4 and key_width == KEY_WIDTH
    groups: tl.constexpr = d // value_group
    GROUPS: tl.constexpr = triton.next_power_of_2(groups)
    # Contiguous loads of scales and zeros need sizes that are powers of two.
    KEYS_AS_THEY_LIE: tl.constexpr = key_planes >= 2 and key_width == KEY_WIDTH
    VALUES_AS_THEY_LIE: tl.constexpr = groups == GROUPS
    GROWING: tl.constexpr = KEYS or kind == tl.float16

    if KEYS:
        key_channel, key_plane, key_element = key_columns(
            fields=key_planes * halves, planes=key_planes, plane_width=key_plane_width,
            WIDTH=KEY_WIDTH,
        )  # fmt: skip
        inside = key_element < key_width
        query = tl.load(q_row[:, None] + key_channel[None, :], real[:, None] & inside[None, :], 0.0)
        plane_worth = (1 << key_plane * key_level_bits).to(tl.float32)
        lifted = (query.to(tl.float32) * (lift / plane_worth)[None, :]).to(kind)
        if KEY_CIRCLE > 0:
            offset = -1.5 * tl.sum(query.to(tl.float32), 1)
        if sink_tokens > 0:  # loaded before the loop, whose every iteration would wait for them
            sink = tl.arange(0, triton.next_power_of_2(sink_tokens))
            sinks = tl.load(sink_row + sink, sink < sink_tokens, -1)

    # Values in parts with one scale each: `shared` planes of a span.
    span: tl.constexpr = SPAN // halves
    PIECE: tl.constexpr = triton.next_power_of_2(span)
    shared: tl.constexpr = value_group // plane_width if span == width else 1
    runs: tl.constexpr = planes // shared
    parts: tl.constexpr = width // span * runs if VALUES else 0
    piece = tl.arange(0, PIECE)[None, :]
    sums = ()
    for _ in tl.static_range(parts):
        sums = sums + (tl.zeros([shared * halves * PIECE, ROWS], tl.float32),)

    within = tl.arange(0, group)
    value_number = tl.arange(0, GROUPS)
    constants = tl.zeros([GROUPS, ROWS], tl.float32)
    scales_seen = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    tiles = (low_bit // group).to(tl.int32)
    share = tl.cdiv(tiles, splits)
    begin, end = split * share, tl.minimum(tiles, (split + 1) * share)
    if not GROWING:
        peak = highest_base(base_row, real, begin * (group // EXACT), end * (group // EXACT))
    for tile in range(begin, end):
        # Offsets of tiles have 64 bits, offsets inside a tile 32.
        first = bh * capacity + tile * group
        if PAGED:
            token = tl.zeros([], tl.int64) + tile * group
            first = place_in_page(table, bh % heads, token, heads, token >= 0)
        tile_codes = codes + first * stride
        tokens = tile * group + within
        if KEYS:
            if KEYS_WORDED:
                key_codes = load_expanded_words(
                    tile_codes, within[:, None], stride=stride, words=stored_key_width // 2, WORDS=KEY_WIDTH // 4
                )
            elif KEY_CIRCLE > 0:
                key_codes = load_expanded(
                    tile_codes, within[:, None], tl.arange(0, KEY_WIDTH)[None, :],
                    stride=stride, width=stored_key_width, circle=KEY_CIRCLE // halves,
                )  # fmt: skip
            else:
                key_codes = load_keys(
                    tile_codes, group=group, width=key_width, stride=stride, WIDTH=KEY_WIDTH, WORDS=WORDS
                )
            if KEY_CIRCLE > 0:
                keys = unpacked_keys(key_codes, planes=key_planes, bits=key_level_bits, kind=kind)
                logits = tl.dot(keys, tl.trans(lifted), input_precision=PRECISION) * undo
                key_scales = read_scale(tl.load(key_params + first + within)) * scale
                logits = (logits + offset[None, :]) * key_scales[:, None]
            elif plain:
                logits = tl.dot(key_codes, tl.trans(query), input_precision=PRECISION) * scale
            else:
                params = key_params + first // group * (2 * d)
                if KEYS_AS_THEY_LIE:
                    key_scale, key_zero = load_key_params(params, d=d, planes=key_planes, halves=halves, kind=kind)
                else:
                    key_scale, key_zero = key_params_in(
                        tl.load(params + key_channel, inside, 0), tl.load(params + d + key_channel, inside, 0), kind
                    )
                keys = unpacked_keys(key_codes, planes=key_planes, bits=key_bits, kind=kind)
                scaled_query = tl.trans(lifted * key_scale[None, :])
                logits = tl.dot(keys, scaled_query, input_precision=PRECISION) * (undo * scale)
                # All tokens share the zero points; sixteen rows are the smallest product.
                zeros, against, zero_worth = key_zero, tl.trans(query), scale
                if key_params.dtype.element_ty == tl.uint8:
                    zeros, against, zero_worth = key_zero * plane_worth.to(kind), scaled_query, scale * (EIGHTH / lift)
                zeros = tl.broadcast_to(zeros[None, :], [FEWEST_LEFT, keys.shape[1]])
                constant = tl.max(tl.dot(zeros, against, input_precision=PRECISION), 0)
                logits += (constant * zero_worth)[None, :]
            if CENTERED == STEPPED_ROWS:
                logits += tl.load(shares_row + tile, real, 0.0)[None, :]
            elif CENTERED:
                logits += tl.load(shares_row[None, :] + tokens[:, None], real[None, :], 0.0)
            logits = tl.trans(capped(logits, softcap, CAP))

        bits = fetched_tokens(slot_index + bh * top_k, tile * group, top_k=top_k, group=group)
        fetched = set_in(bits, group=group)
        if KEYS:
            apart = fetched
            if sink_tokens > 0:
                apart = set_in(bits | bits_of(sinks, tile * group, group=group), group=group)
            seen = real[:, None] & shown(~apart, mask, tokens * m_token, MASK)[None, :]
            logits = biased(logits, mask, mask_row[:, None] + (tokens * m_token)[None, :], seen, MASK)
            highest = tl.max(logits, 1)
            if stored > 0:
                logits_at = logits_row[:, None] + tokens[None, :]
                if VALUES:
                    tl.store(logits_at, logits, kept[:, None] & ~fetched[None, :])
                else:
                    block = tile * (group // EXACT) + tl.arange(0, group // EXACT)
                    base = tl.where(highest == float("-inf"), LOWEST, highest)[:, None]
                    tl.store(base_row[:, None] + block[None, :], base, kept[:, None])
                    tl.store(logits_at, logits - base, kept[:, None])
        else:
            # Load whole rows, since a mask on single tokens would split the loads.
            above = tl.load(logits_row[:, None] + tokens[None, :], real[:, None], 0.0).to(tl.float32)
            base = tl.load(base_row + tile * (group // EXACT), real, 0.0)
            seen = real[:, None] & ~fetched[None, :]
        if GROWING:
            if not KEYS:
                logits = tl.where(seen, above + base[:, None], float("-inf"))
                highest = tl.max(logits, 1)
            weights, shrink, peak, total = grown(logits, highest, peak, total)
        else:
            weights = tl.where(seen, exponential(above + (base - peak)[:, None]), 0.0)
            total += tl.sum(weights, 1)

        if VALUES:
            if not plain:
                params = value_params + first * (2 * groups)
                if CIRCLE > 0:
                    value_scales = (read_scale(tl.load(value_params + first + within)),)
                    scales_seen = scales_seen * shrink if GROWING else scales_seen
                    scales_seen += tl.sum(weights * value_scales[0][None, :], 1)
                elif VALUES_AS_THEY_LIE:
                    value_scales = load_value_params(params, group=group, groups=groups)
                    value_zeros = tl.trans(value_scales[groups])
                else:
                    scales = params + within * (2 * groups)
                    at = scales[None, :] + value_number[:, None]
                    known = (value_number < groups)[:, None]
                    value_zeros = read_zero(tl.load(at + groups, known, 0), read_scale(tl.load(at, known, 0)))
                if CIRCLE == 0:
                    constants = constants * shrink[None, :] if GROWING else constants
                    constants = tl.dot(
                        value_zeros.to(kind), tl.trans(weights.to(kind)), constants, input_precision=PRECISION
                    )
            added = ()
            for part in tl.static_range(parts):
                at = tile_codes + (stored_key_width + part // runs * span)
                if WORDED:
                    value_codes = load_expanded_words(
                        at, within[:, None], stride=stride, words=stored_width // 2, WORDS=PIECE // 4
                    )
                elif CIRCLE > 0:
                    value_codes = load_expanded(
                        at, within[:, None], piece, stride=stride, width=stored_width, circle=CIRCLE // halves
                    )
                else:
                    value_codes = tl.load(at + within[:, None] * stride + piece, piece < span, 0)
                value_codes = tl.trans(value_codes)
                before = sums[part] * shrink[None, :] if GROWING else sums[part]
                if plain:
                    values, scaled = value_codes, weights
                else:
                    values = unpacked_values(
                        value_codes, first=part % runs * shared, shared=shared, bits=level_bits, kind=kind
                    )
                    if CIRCLE > 0 or VALUES_AS_THEY_LIE:
                        value_scale = value_scales[
                            (part % runs * shared * plane_width + part // runs * SPAN) // value_group
                        ]
                    else:
                        number = (part % runs * shared * plane_width + part // runs * SPAN) // value_group
                        value_scale = read_scale(tl.load(scales + number))
                    scaled = weights * (value_scale * lift)[None, :]
                added = added + (tl.dot(values, tl.trans(scaled.to(kind)), before, input_precision=PRECISION),)
            sums = added

    for part in tl.static_range(parts):
        channel, plane, element = value_rows(
            part, shared=shared, runs=runs, halves=halves, plane_width=plane_width, SPAN=SPAN, PIECE=PIECE,
            WORDED=WORDED,
        )  # fmt: skip
        number = (part % runs * shared * plane_width + part // runs * SPAN) // value_group
        constant = -1.5 * scales_seen
        if CIRCLE == 0:
            constant = tl.sum(tl.where(value_number[:, None] == number, constants, 0.0), 0)
        result = sums[part] * (undo / (1 << plane * level_bits).to(tl.float32))[:, None] + constant[None, :]
        tl.store(out_row[None, :] + channel[:, None], result, real[None, :] & (element < span)[:, None])
    return tl.where(total > 0, peak, float("-inf")), total
