"""Triton: encode a group's keys or values in the trellis code (`trellis.py`), and expand trellis codes to 2-bit codes.

A thread processes one circle of a vector. Its registers hold eight costs and eight paths, one word each, so no path
needs a backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_compile.kernels.state.triton_pairs import load_pairs

from . import trellis
from .triton_levels import stored_scale

MEMORY, STATES = tl.constexpr(trellis.MEMORY), tl.constexpr(trellis.STATES)
STEP, LEAST_COSINE = tl.constexpr(trellis.STEP), tl.constexpr(trellis.LEAST_COSINE)
# The cost of states in which no path begins.
FAR = tl.constexpr(1e30)
# Vectors are divided by their peak, or at least by this, so that squares do not underflow.
LEAST_PEAK = tl.constexpr(2.0**-96)


@triton.jit
def walked(x, costs, marks):
    """Process one number; returns each state's cost, and the mark of its predecessor on the nearest path."""
    apart = ()
    for q in tl.static_range(4):
        apart = apart + ((q - 1.5) * (q - 1.5) / 2 - x * (q - 1.5),)
    costs_now, marks_now = (), ()
    for state in tl.static_range(STATES):
        first = costs[state >> 1] + apart[2 * ((state ^ (state >> 1)) & 1) + (state >> 2)]
        # The oldest bit flips the level's upper bit.
        second = costs[(state >> 1) + STATES // 2] + apart[2 - 2 * ((state ^ (state >> 1)) & 1) + (state >> 2)]
        nearer = second < first
        costs_now = costs_now + (tl.where(nearer, second, first),)
        marks_now = marks_now + (tl.where(nearer, marks[(state >> 1) + STATES // 2], marks[state >> 1]),)
    return costs_now, marks_now


@triton.jit
def extended(paths, place):
    """Return the path to each state, with its newest bit at `place`."""
    found = ()
    for state in tl.static_range(STATES):
        if state % 2 == 1:
            found = found + (paths[state] | (tl.full(paths[state].shape, 1, paths[state].dtype) << place),)
        else:
            found = found + (paths[state],)
    return found


@triton.jit
def earlier(bits, by: tl.constexpr, circle: tl.constexpr):
    """Rotate the bits of a circle by `by` places; higher bits are undefined."""
    return (bits << by) | ((bits >> (circle - by)) & ((1 << by) - 1))


@triton.jit
def ones_of(bits):
    """Count the bits that are set in an int32."""
    bits = bits.to(tl.uint32, bitcast=True)
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    sixteens = eights + (eights >> 8)
    return ((sixteens + (sixteens >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def squares_of(path, circle: tl.constexpr):
    """Return r·r of a circle's levels r: 9/4 if the level's two bits are equal, else 1/4."""
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
    """Load numbers `first` to first + AT_ONCE of every circle, in the code's order (`trellis.in_steps`).

    The vectors are multiplied by `inverse` [n, 1]. Each result is float32 [n, CIRCLES], with 0 for padding circles.
    """
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
    # x [B, H, T, d], keys or values, and the ring (`load_pairs`); one head's tokens [n], pointers to their codes of
    # d / 8 bytes, and to their scales. limit: the largest number of the scales' dtype.
    x, recent, tokens, codes, scales, limit,
    bh, head_base, stride, length, window: tl.constexpr, d: tl.constexpr, circle: tl.constexpr, WHICH: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Compute `trellis.quantize` up to the order of sums. circle: numbers in a circle.

    All circles of a vector are processed in parallel. The scale follows from the cost of the selected path, half the
    levels' squares minus x·r. Bytes per vector: 2·d read, three times more from the cache. FLOPs: about 60 per number.
    """
    CIRCLES: tl.constexpr = triton.next_power_of_2(d // circle)
    AT_ONCE: tl.constexpr = 8 if circle % 16 == 0 else 4  # divides half a circle
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

    # Walk from half a circle to half a circle, to find the start and end of the circular path.
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
    """Compute `trellis.expanded`: load trellis codes, and return their 2-bit codes [tokens, 2·width].

    Tokens are `stride` elements apart and have `width` elements. circle: elements in a circle. An element is one byte,
    or two.
    """
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
    """Compute `load_expanded` if a circle is a word, which is loaded once: int16 [tokens, 4·WORDS], even bits first.

    codes: int16, `stride` elements per token. A thread holds every eighth row of a product's left side; with this order
    it expands one word per token.
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
