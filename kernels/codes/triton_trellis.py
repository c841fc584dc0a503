"""Triton: the trellis code of `trellis.py`: a group's values into it, and its codes as codes of two bits.

A thread walks one vector: eight costs and as many paths are registers, a word each, and no path is walked back.
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


@triton.jit
def level_of(window):
    """q of four bits, the newest lowest: `trellis.levels_of`."""
    return 2 * ((window ^ (window >> 1) ^ (window >> 3)) & 1) + ((window >> 2) & 1)


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
def number_at(
    v, recent, tokens, step, peak, unit,
    bh, head_base, stride, length, window, d: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Number `step` of each vector as the code walks them (`trellis.in_steps`), of unit step."""
    channel = step % 8 * (d // 8) + step // 8
    x = load_pairs(
        v, recent, tokens, channel, tokens >= 0,
        bh=bh, head_base=head_base, stride=stride, length=length, WHICH=1, window=window, d=d, APART=APART,
    )  # fmt: skip
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return tl.where(unit > 0, x / peak / unit, 0.0)


@triton.jit
def encode_values(
    # v [B, H, T, d], and the ring (`load_pairs`); of one head's tokens [n], where their codes of d / 8 bytes are
    # written, and their scales. limit: the largest number of the scales' dtype.
    v, recent, tokens, codes, scales, limit,
    bh, head_base, stride, length, window: tl.constexpr, d: tl.constexpr, circle: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """`trellis.quantize`, from which sums of another order differ. circle: numbers.

    Bytes a value: 2·d read, from the cache again in each of four walks. FLOPs: some 60 a number.
    """
    CHANNELS: tl.constexpr = triton.next_power_of_2(d)
    channel = tl.arange(0, CHANNELS)[None, :]
    whole = load_pairs(
        v, recent, tokens[:, None], channel, channel < d,
        bh=bh, head_base=head_base, stride=stride, length=length, WHICH=1, window=window, d=d, APART=APART,
    )  # fmt: skip
    whole = tl.where(tl.abs(whole) < float("inf"), whole, 0.0)
    peak = tl.max(tl.abs(whole), 1)
    whole = tl.where(peak[:, None] > 0, whole / peak[:, None], 0.0)
    square = tl.sum(whole * whole, 1)
    unit = tl.sqrt(square / d) * STEP
    along, levels = tl.zeros_like(square), tl.zeros_like(square)
    half: tl.constexpr = circle // 2
    word: tl.constexpr = tl.int32 if circle <= 32 else tl.int64
    for number in range(d // circle):
        first = number * circle
        # From half way round to half way round, to find where the path that goes round begins and ends.
        costs, edges = (), ()
        for state in tl.static_range(STATES):
            costs = costs + (tl.zeros_like(square),)
            edges = edges + (tl.full(square.shape, state, tl.int32),)
        for t in range(circle - half, circle):
            x = number_at(v, recent, tokens, first + t, peak, unit, bh, head_base, stride, length, window, d, APART)
            costs, _ = walked(x, costs, edges)
        for t in range(circle - half):
            x = number_at(v, recent, tokens, first + t, peak, unit, bh, head_base, stride, length, window, d, APART)
            costs, edges = walked(x, costs, edges)
        best, edge = costs[0], edges[0]
        for state in tl.static_range(1, STATES):
            nearer = costs[state] < best
            best, edge = tl.where(nearer, costs[state], best), tl.where(nearer, edges[state], edge)

        costs, paths = (), ()
        for state in tl.static_range(STATES):
            costs = costs + (tl.where(edge == state, 0.0, FAR),)
            paths = paths + (tl.zeros(square.shape, word),)
        for t in range(circle):
            x = number_at(v, recent, tokens, first + t, peak, unit, bh, head_base, stride, length, window, d, APART)
            costs, paths = walked(x, costs, paths)
            paths = extended(paths, t)
        path = paths[0]
        for state in tl.static_range(1, STATES):
            path = tl.where(edge == state, paths[state], path)
        for byte in tl.static_range(circle // 8):
            tl.store(codes + number * (circle // 8) + byte, (path >> 8 * byte).to(tl.uint8))

        for t in range(circle):
            bits = tl.zeros(square.shape, word)
            for back in tl.static_range(MEMORY + 1):
                bits |= ((path >> (t + circle - back) % circle) & 1) << back
            level = level_of(bits).to(tl.float32) - 1.5
            x = number_at(v, recent, tokens, first + t, peak, unit, bh, head_base, stride, length, window, d, APART)
            along += level * (x * unit)
            levels += level * level
    along = tl.maximum(along, tl.sqrt(square * levels) * LEAST_COSINE)
    scale = tl.where(square > 0, peak * (square / along), 0.0)
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
def earlier(bits, by: tl.constexpr):
    """Words whose bits have gone round by so many places."""
    return (bits << by) | ((bits >> (32 - by)) & ((1 << by) - 1))


@triton.jit
def load_expanded_words(codes, token, stride: tl.constexpr, words: tl.constexpr, WORDS: tl.constexpr):
    """The same where a circle is a word, each loaded once: int16 [tokens, 4·WORDS], elements of two bytes. Those of the
    even bits are the first half. codes: of int16, `stride` a token.

    A product's left side has every eighth row in one thread: with these elements innermost it expands one word a token.
    """
    word = tl.arange(0, WORDS)[None, :]
    at = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = tl.load(at + token * (stride // 2) + word, word < words, 0)
    high, low = bits ^ earlier(bits, 1) ^ earlier(bits, 3), earlier(bits, 2)
    evens = ((high & 0x55555555) << 1) | (low & 0x55555555)
    odds = (high & ~0x55555555) | ((low >> 1) & 0x55555555)
    both = tl.join(evens, odds)
    halves = tl.join(both.to(tl.int16), (both >> 16).to(tl.int16))
    return tl.reshape(tl.permute(halves, (0, 2, 1, 3)), [halves.shape[0], 4 * WORDS])
