"""Triton: encode a group's keys or values in the trellis code (`trellis.py`).

A thread processes one circle, a word. Its registers hold eight costs and eight paths, one word each, so no path
needs a backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import trellis
from .triton_records import by_token, by_word

MEMORY, STATES = tl.constexpr(trellis.MEMORY), tl.constexpr(trellis.STATES)
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
        if state % 2 == 1:
            found = found + (paths[state] | (tl.full(paths[state].shape, 1, paths[state].dtype) << place),)
        else:
            found = found + (paths[state],)
    return found


@triton.jit
def earlier(bits, by: tl.constexpr):
    """Rotate the bits of circles by `by` places."""
    return (bits << by) | ((bits >> (32 - by)) & ((1 << by) - 1))


@triton.jit
def encode_vectors(x, steps, d, WHICH: tl.constexpr):
    """Compute `trellis.quantize` up to the order of sums, for keys (WHICH 0) or values (1) float32 [g, D] of d channels.

    steps: float32 [32, words], memory of this program, which gets the numbers in units of their vectors' steps. All
    circles are processed in parallel. FLOPs: about 60 per number.

    Returns: words int32 [words], in the order of `by_word`, and scales float32 [g].
    """
    WORDS: tl.constexpr = x.shape[0] * x.shape[1] // 32
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    peak = tl.maximum(tl.max(tl.abs(x), 1, keep_dims=True), LEAST_PEAK)
    x = x * (1 / peak)
    square = tl.sum(x * x, 1, keep_dims=True)
    unit = tl.sqrt(square / d) * STEP
    word, number = tl.arange(0, WORDS), tl.arange(0, 32)[None, :]
    places = steps + number * WORDS + word[:, None]
    tl.debug_barrier()  # the last vectors' numbers have been read
    tl.store(places, by_word(x * tl.where(unit > 0, 1 / unit, 0.0), 1, WHICH))
    tl.debug_barrier()

    # Walk from half a circle to half a circle, to find the start and end of the circular path.
    costs, edges = (), ()
    for state in tl.static_range(STATES):
        costs = costs + (tl.zeros([WORDS], tl.float32),)
        edges = edges + (tl.full([WORDS], state, tl.int32),)
    for first in range(16, 32, AT_ONCE):
        for t in tl.static_range(AT_ONCE):
            costs, _ = walked(tl.load(steps + (first + t) * WORDS + word), costs, edges)
    for first in range(0, 16, AT_ONCE):
        for t in tl.static_range(AT_ONCE):
            costs, edges = walked(tl.load(steps + (first + t) * WORDS + word), costs, edges)
    best, edge = costs[0], edges[0]
    for state in tl.static_range(1, STATES):
        nearer = costs[state] < best
        best, edge = tl.where(nearer, costs[state], best), tl.where(nearer, edges[state], edge)

    costs, paths = (), ()
    for state in tl.static_range(STATES):
        costs = costs + (tl.where(edge == state, 0.0, FAR),)
        paths = paths + (tl.zeros([WORDS], tl.int32),)
    for first in range(0, 32, AT_ONCE):
        for t in tl.static_range(AT_ONCE):
            costs, paths = walked(tl.load(steps + (first + t) * WORDS + word), costs, paths)
            paths = extended(paths, first + t)
    path = paths[0]
    for state in tl.static_range(1, STATES):
        path = tl.where(edge == state, paths[state], path)

    high, low = path ^ earlier(path, 1) ^ earlier(path, 3), earlier(path, 2)
    levels = (2 * (high[:, None] >> number & 1) + (low[:, None] >> number & 1)).to(tl.float32) - 1.5
    along = tl.sum(by_token(tl.load(places) * levels, x.shape[0], WHICH), 1, keep_dims=True) * unit
    squares = by_token(levels * levels, x.shape[0], WHICH)
    squares = tl.sum(tl.where(tl.arange(0, x.shape[1])[None, :] < d, squares, 0.0), 1, keep_dims=True)
    along = tl.maximum(along, tl.sqrt(square * squares) * LEAST_COSINE)
    return path, tl.sum(tl.where(square > 0, peak * (square / along), 0.0), 1)
