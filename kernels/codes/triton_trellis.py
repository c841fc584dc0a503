"""Triton: the trellis code of `trellis.py`: a group's keys or values into it, and its codes as codes of two bits.

A thread walks one circle of a vector: eight costs and as many paths are registers, a word each, and no path is walked
back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_compile.kernels.state.triton_pairs import load_pairs

from . import trellis
from .triton_levels import stored_scale

MEMORY, STATES = tl.constexpr(trellis.MEMORY), tl.constexpr(trellis.STATES)
STEP, LEAST_COSINE = tl.constexpr(trellis.STEP), tl.constexpr(trellis.LEAST_COSINE)
# The cost of where no path begins.
FAR = tl.constexpr(1e30)
# Vectors are divided by their peak, or by this: the smallest numbers over it have squares.
LEAST_PEAK = tl.constexpr(2.0**-96)


@triton.jit
def walked(x, costs, marks):
    """One number on: the costs to be in each state, and of `marks` those of the state before on the nearest path."""
    apart = ()
    for q in tl.static_range(4):
        apart = apart + ((q - 1.5) * (q - 1.5) / 2 - x * (q - 1.5),)
    costs_now, marks_now = (), ()
    for state in tl.static_range(STATES):
        first = costs[state >> 1] + apart[2 * ((state ^ (state >> 1)) & 1) + (state >> 2)]
        # The oldest bit turns the level's upper one.
        second = costs[(state >> 1) + STATES // 2] + apart[2 - 2 * ((state ^ (state >> 1)) & 1) + (state >> 2)]
        nearer = second < first
        costs_now = costs_now + (tl.where(nearer, second, first),)
        marks_now = marks_now + (tl.where(nearer, marks[(state >> 1) + STATES // 2], marks[state >> 1]),)
    return costs_now, marks_now


@triton.jit
def extended(paths, place):
    """The paths to each state, with its newest bit at `place`."""
    found = ()
    for state in tl.static_range(STATES):
        if state % 2 == 1:
            found = found + (paths[state] | (tl.full(paths[state].shape, 1, paths[state].dtype) << place),)
        else:
            found = found + (paths[state],)
    return found


@triton.jit
def earlier(bits, by: tl.constexpr, circle: tl.constexpr):
    """Bits that have gone round by so many places; what is above a circle means nothing."""
    return (bits << by) | ((bits >> (circle - by)) & ((1 << by) - 1))


@triton.jit
def ones_of(bits):
    """How many bits of an int32 are set."""
    bits = bits.to(tl.uint32, bitcast=True)
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    sixteens = eights + (eights >> 8)
    return ((sixteens + (sixteens >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def squares_of(path, circle: tl.constexpr):
    """r·r of a circle's levels r: 9/4 where the level's two bits are the same, 1/4 elsewhere."""
    inner = path ^ earlier(path, 1, circle) ^ earlier(path, 2, circle) ^ earlier(path, 3, circle)
    last, outer = ~inner, 0
    if circle > 32:
        outer = ones_of(last.to(tl.int32))
        last = (last >> 32).to(tl.int32)
    if circle % 32 > 0:
        last = last & ((1 << circle % 32) - 1)
    outer += ones_of(last)
    return 0.25 * circle + 2.0 * outer.to(tl.float32)


@triton.jit
def numbers_at(
    x, recent, tokens, first, inverse,
    bh, head_base, stride, length, window, d: tl.constexpr, circle: tl.constexpr, WHICH: tl.constexpr,
    APART: tl.constexpr, CIRCLES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Numbers first to first + AT_ONCE of every circle, in the order in which the code walks them (`trellis.in_steps`),
    of vectors times `inverse` [n, 1]: float32 [n, CIRCLES] each, 0 where there is no circle."""
    number = tl.arange(0, CIRCLES)[None, :]
    found = ()
    for t in tl.static_range(AT_ONCE):
        step = first + t
        channel = step % 8 * (d // 8) + number * (circle // 8) + step // 8
        numbers = load_pairs(
            x, recent, tokens, channel, number < d // circle,
            bh=bh, head_base=head_base, stride=stride, length=length, WHICH=WHICH, window=window, d=d, APART=APART,
        )  # fmt: skip
        found = found + (tl.where(tl.abs(numbers) < float("inf"), numbers, 0.0) * inverse,)
    return found


@triton.jit
def encode_vectors(
    # x [B, H, T, d], keys or values, and the ring (`load_pairs`); of one head's tokens [n], where their codes of d / 8
    # bytes are written, and their scales. limit: the largest number of the scales' dtype.
    x, recent, tokens, codes, scales, limit,
    bh, head_base, stride, length, window: tl.constexpr, d: tl.constexpr, circle: tl.constexpr, WHICH: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """`trellis.quantize`, from which sums of another order differ. circle: numbers.

    All circles of a vector are walked at once. The cost of the path that is taken, half the levels' squares less x·r,
    is what the scale is made of. Bytes a vector: 2·d read, three times more from the cache. FLOPs: some 60 a number.
    """
    CIRCLES: tl.constexpr = triton.next_power_of_2(d // circle)
    AT_ONCE: tl.constexpr = 8 if circle % 16 == 0 else 4  # halves of a circle are whole
    PARTS: tl.constexpr = circle // AT_ONCE
    word: tl.constexpr = tl.int32 if circle <= 32 else tl.int64
    number, rows = tl.arange(0, CIRCLES)[None, :], tokens[:, None]
    nothing = tl.zeros([tokens.shape[0], CIRCLES], tl.float32)

    peak, square = nothing, nothing
    for part in range(PARTS):
        numbers = numbers_at(
            x, recent, rows, part * AT_ONCE, 1.0,
            bh, head_base, stride, length, window, d, circle, WHICH, APART, CIRCLES, AT_ONCE,
        )  # fmt: skip
        for t in tl.static_range(AT_ONCE):
            peak = tl.maximum(peak, tl.abs(numbers[t]))
    peak = tl.maximum(tl.max(peak, 1, keep_dims=True), LEAST_PEAK)
    for part in range(PARTS):
        numbers = numbers_at(
            x, recent, rows, part * AT_ONCE, 1 / peak,
            bh, head_base, stride, length, window, d, circle, WHICH, APART, CIRCLES, AT_ONCE,
        )  # fmt: skip
        for t in tl.static_range(AT_ONCE):
            square += numbers[t] * numbers[t]
    square = tl.sum(square, 1, keep_dims=True)
    unit = tl.sqrt(square / d) * STEP
    inverse = tl.where(unit > 0, 1 / unit, 0.0)

    # From half way round to half way round, to find where the path that goes round begins and ends.
    costs, edges = (), ()
    for state in tl.static_range(STATES):
        costs = costs + (nothing,)
        edges = edges + (tl.full(nothing.shape, state, tl.int32),)
    for part in range(PARTS // 2, PARTS):
        numbers = numbers_at(
            x, recent, rows, part * AT_ONCE, 1 / peak,
            bh, head_base, stride, length, window, d, circle, WHICH, APART, CIRCLES, AT_ONCE,
        )  # fmt: skip
        for t in tl.static_range(AT_ONCE):
            costs, _ = walked(numbers[t] * inverse, costs, edges)
    for part in range(PARTS // 2):
        numbers = numbers_at(
            x, recent, rows, part * AT_ONCE, 1 / peak,
            bh, head_base, stride, length, window, d, circle, WHICH, APART, CIRCLES, AT_ONCE,
        )  # fmt: skip
        for t in tl.static_range(AT_ONCE):
            costs, edges = walked(numbers[t] * inverse, costs, edges)
    best, edge = costs[0], edges[0]
    for state in tl.static_range(1, STATES):
        nearer = costs[state] < best
        best, edge = tl.where(nearer, costs[state], best), tl.where(nearer, edges[state], edge)

    costs, paths = (), ()
    for state in tl.static_range(STATES):
        costs = costs + (tl.where(edge == state, 0.0, FAR),)
        paths = paths + (tl.zeros(nothing.shape, word),)
    for part in range(PARTS):
        numbers = numbers_at(
            x, recent, rows, part * AT_ONCE, 1 / peak,
            bh, head_base, stride, length, window, d, circle, WHICH, APART, CIRCLES, AT_ONCE,
        )  # fmt: skip
        for t in tl.static_range(AT_ONCE):
            costs, paths = walked(numbers[t] * inverse, costs, paths)
            paths = extended(paths, part * AT_ONCE + t)
    cost, path = costs[0], paths[0]
    for state in tl.static_range(1, STATES):
        cost, path = tl.where(edge == state, costs[state], cost), tl.where(edge == state, paths[state], path)
    there = number < d // circle
    for byte in tl.static_range(circle // 8):
        tl.store(codes[:, None] + number * (circle // 8) + byte, (path >> 8 * byte).to(tl.uint8), there)

    levels = squares_of(path, circle)
    along = tl.sum(tl.where(there, levels / 2 - cost, 0.0), 1) * tl.sum(unit, 1)
    levels, square = tl.sum(tl.where(there, levels, 0.0), 1), tl.sum(square, 1)
    along = tl.maximum(along, tl.sqrt(square * levels) * LEAST_COSINE)
    scale = tl.where(square > 0, tl.sum(peak, 1) * (square / along), 0.0)
    tl.store(scales, stored_scale(scale, limit, scales.dtype.element_ty))


@triton.jit
def load_expanded(codes, token, element, stride: tl.constexpr, width: tl.constexpr, circle: tl.constexpr):
    """`trellis.expanded`: elements [tokens, 2·width] of the values as codes of two bits, of codes whose tokens are
    `stride` elements apart and have `width` of values. circle: elements. An element is one byte, or two."""
    size: tl.constexpr = codes.dtype.element_ty.primitive_bitwidth
    place, odd = element % width, element // width
    before = place + tl.where(place % circle == 0, circle - 1, -1)
    there = element < 2 * width
    here = tl.load(codes + token * stride + place, there, 0).to(tl.int32) & ((1 << size) - 1)
    last = tl.load(codes + token * stride + before, there, 0).to(tl.int32) & ((1 << size) - 1)
    window = (here << MEMORY) | (last >> (size - MEMORY))
    high, low = (window >> 3) ^ (window >> 2) ^ window, window >> 1
    return ((((high >> odd) & 0x5555) << 1) | ((low >> odd) & 0x5555)).to(codes.dtype.element_ty)


@triton.jit
def load_expanded_words(codes, token, stride: tl.constexpr, words: tl.constexpr, WORDS: tl.constexpr):
    """The same where a circle is a word, each loaded once: int16 [tokens, 4·WORDS], elements of two bytes. Those of the
    even bits are the first half. codes: of int16, `stride` a token.

    A product's left side has every eighth row in one thread: with these elements innermost it expands one word a token.
    """
    word = tl.arange(0, WORDS)[None, :]
    at = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = tl.load(at + token * (stride // 2) + word, word < words, 0)
    high, low = bits ^ earlier(bits, 1, 32) ^ earlier(bits, 3, 32), earlier(bits, 2, 32)
    evens = ((high & 0x55555555) << 1) | (low & 0x55555555)
    odds = (high & ~0x55555555) | ((low >> 1) & 0x55555555)
    both = tl.join(evens, odds)
    halves = tl.join(both.to(tl.int16), (both >> 16).to(tl.int16))
    return tl.reshape(tl.permute(halves, (0, 2, 1, 3)), [halves.shape[0], 4 * WORDS])
