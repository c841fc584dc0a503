"""The order of codes in a record (`kernels/codes/records.py`) once more, from its formulas.

Places take numbers, and tensors that broadcast.
"""

from __future__ import annotations

from typing import Any


def key_place(token: Any, channel: Any, dim: int, bits: int) -> tuple[Any, Any]:
    """Return the word and the bit of a key's number: thread (g, q) owns tokens 8·g + j and channels 8·m + 2·q + k0."""
    fields, loads = 16 // bits, min(4, dim * bits // 16)
    g, j, m, q, k0 = token // 8, token % 8, channel // 8, channel % 8 // 2, channel % 2
    number = m + dim // 8 * j
    word = number // fields
    place = (word // loads * 32 + 4 * g + q) * loads + word % loads
    return place, 16 * k0 + bits * (number % fields)


def value_place(token: Any, channel: Any, dim: int, bits: int) -> tuple[Any, Any]:
    """Return the same of a value: thread (g, q) owns channels 8·c + g and tokens 16·q + 8·o + 2·e + k0."""
    fields, loads = 16 // bits, min(4, dim * bits // 16)
    c, g, q, o, e, k0 = channel // 8, channel % 8, token // 16, token % 16 // 8, token % 8 // 2, token % 2
    shared = 4 // loads
    number = c + dim // 8 * o + dim // 4 * (e % shared)
    place = (number // fields * 32 + 4 * g + q) * loads + e // shared
    return place, 16 * k0 + bits * (number % fields)


def param_place(channel: Any, dim: int) -> Any:
    """Return the place of a channel's scale or zero point among the D of a group of keys."""
    block = min(dim, 64)
    m, q, k0 = channel % block // 8, channel % 8 // 2, channel % 2
    return channel // block * block + q * (block // 4) + m // 2 * 4 + k0 * 2 + m % 2
