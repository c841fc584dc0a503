"""Triton: encode a group's keys or values in the trellis code (`trellis.py`).

A thread processes one circle, a word. Its registers hold eight costs and eight paths, one word each, so no path
needs a backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import trellis
from .triton_records import circle_at

STATES = tl.constexpr(trellis.STATES)
STEP, LEAST_COSINE = tl.constexpr(trellis.STEP), tl.constexpr(trellis.LEAST_COSINE)
# The cost of states in which no path begins.
FAR = tl.constexpr(1e30)
# Vectors are divided by their peak, or at least by this, so that squares do not underflow.
LEAST_PEAK = tl.constexpr(2.0**-96)
# Numbers per iteration of a walk.
AT_ONCE = tl.constexpr(8)


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
        found = found + (paths[state] | (tl.full(paths[state].shape, state % 2, paths[state].dtype) << place),)
    return found


@triton.jit
def encode_vectors(x, steps, d, WHICH: tl.constexpr):
    """Compute `trellis.quantize` up to the order of sums, of keys (WHICH 0) or values (1) x [g, D] of d channels.

    steps: float32 [33, words], memory of this program. It gets the numbers of each circle in units of their vectors'
    steps, then the words. All circles are processed in parallel. FLOPs: about 60 per number.

    Returns: words int32 [words], in the order of `by_word`, and scales float32 [g].
    """
    g: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    WORDS: tl.constexpr = g * D // 32
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    peak = tl.maximum(tl.max(tl.abs(x), 1, keep_dims=True), LEAST_PEAK)
    x = x * (1 / peak)
    square = tl.sum(x * x, 1, keep_dims=True)
    unit = tl.sqrt(square / d) * STEP
    token, channel, word = tl.arange(0, g)[:, None], tl.arange(0, D)[None, :], tl.arange(0, WORDS)
    first = tl.zeros([1, 1], tl.int32)
    of_token, in_token = circle_at(token, first, g, D, WHICH)
    of_channel, in_channel = circle_at(first, channel, g, D, WHICH)
    numbers = steps + (of_token + in_token * WORDS) + (of_channel + in_channel * WORDS)
    tl.debug_barrier()  # `steps` of the last vectors have been read
    tl.store(numbers, x * tl.where(unit > 0, 1 / unit, 0.0))
    tl.debug_barrier()

    # Walk from half a circle to half a circle, to find the start and end of the circular path.
    costs, edges = (), ()
    for state in tl.static_range(STATES):
        costs = costs + (tl.zeros([WORDS], tl.float32),)
        edges = edges + (tl.full([WORDS], state, tl.int32),)
    for at in range(16, 32, AT_ONCE):
        for t in tl.static_range(AT_ONCE):
            costs, _ = walked(tl.load(steps + (at + t) * WORDS + word), costs, edges)
    for at in range(0, 16, AT_ONCE):
        for t in tl.static_range(AT_ONCE):
            costs, edges = walked(tl.load(steps + (at + t) * WORDS + word), costs, edges)
    best, edge = costs[0], edges[0]
    for state in tl.static_range(1, STATES):
        nearer = costs[state] < best
        best, edge = tl.where(nearer, costs[state], best), tl.where(nearer, edges[state], edge)

    costs, paths = (), ()
    for state in tl.static_range(STATES):
        costs = costs + (tl.where(edge == state, 0.0, FAR),)
        paths = paths + (tl.zeros([WORDS], tl.int32),)
    for at in range(0, 32, AT_ONCE):
        for t in tl.static_range(AT_ONCE):
            costs, paths = walked(tl.load(steps + (at + t) * WORDS + word), costs, paths)
            paths = extended(paths, at + t)
    path = paths[0]
    for state in tl.static_range(1, STATES):
        path = tl.where(edge == state, paths[state], path)

    circles = steps.to(tl.pointer_type(tl.uint32), bitcast=True) + 32 * WORDS
    tl.store(circles + word, path.to(tl.uint32, bitcast=True))
    tl.debug_barrier()
    circle, place = tl.load(circles + of_token + of_channel), in_token + in_channel
    # The number's bit and the three before it.
    window = (circle >> ((place + 29) % 32)) | (circle << ((35 - place) % 32))
    levels = (2 * ((window >> 3 ^ window >> 2 ^ window) & 1) + (window >> 1 & 1)).to(tl.float32) - 1.5
    along = tl.sum(tl.load(numbers) * levels, 1, keep_dims=True) * unit
    squares = tl.sum(tl.where(channel < d, levels * levels, 0.0), 1, keep_dims=True)
    along = tl.maximum(along, tl.sqrt(square * squares) * LEAST_COSINE)
    return path, tl.sum(tl.where(square > 0, peak * (square / along), 0.0), 1)
