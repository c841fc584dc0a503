"""The order of codes in memory: 64 tokens of a head are one record, in the order of tensor-core fragments.

A product's operand then needs no conversion: each GPU thread loads its own fragment, and a CPU's vector holds eight
words whose numbers it unpacks by one shift each.
"""

# A record of codes [64, w] is the keys' part, then the values' part: 32-bit words in fragment order at 1, 2 and 4 bits,
# rows of tokens at 8 bits. head_dim is padded to D channels (`stored_dim`).
#
# Thread (g, q) of 8 × 4 owns the words (l·32 + 4·g + q)·V + v, with V of them in each of its loads. A word has two
# halves k0 with F = 16 / bits fields; the number of field f is at bit 16·k0 + bits·f.
#
# Keys: token 8·g + j, channel 8·m + 2·q + k0; the thread's numbers are counted by m + D/8·j.
# Values: channel 8·c + g, token 16·q + 8·o + 2·e + k0; counted by c + D/8·o, and e is the word in a load.
#
# Example: d = 128, keys of 2 bits. Word 37 = 0·128 + 9·4 + 1 is the second of thread (2, 1): n = 8 to 15, so token 16
# and channels 66, 74, ..., 122 in the lower half, 67, 75, ..., 123 in the upper. Word 37 of the values in the trellis
# code: tokens 18 and 19, channels 2, 10, 18, ..., 122.

from __future__ import annotations

import functools

import torch
from torch import Tensor

RECORD = 64
# Words in a thread's load; numbers in a word at one bit, which are a circle of the trellis code.
VECTOR, CIRCLE = 4, 32
SMALLEST_DIM = 16
# From this width on, codes are rows of tokens.
ROWS_FROM = 8
# Bits per field → integer dtype with one byte for each field of a packed byte.
WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16, 8: torch.uint8}
# Channels whose parameters a thread loads at a time.
PARAM_BLOCK = 64


def stored_dim(head_dim: int) -> int:
    """Return D, the channels of a stored key or value: the next power of two, at least 16."""
    return max(SMALLEST_DIM, 1 << (head_dim - 1).bit_length())


@functools.cache
def order_of(dim: int, bits: int, values: bool) -> Tensor:
    """Return the order of the keys or values, int64 [64 · D] of token · D + channel: element p is the number in field p
    of the part's words."""
    element = torch.arange(RECORD * dim, device="cpu")
    if bits >= ROWS_FROM:
        return element
    fields, loads = 16 // bits, min(VECTOR, dim * bits // 16)
    if values:
        place = element.view(4, 2, loads, VECTOR // loads, 2, dim // 8, 8)  # q, o, e (load and its rest), k0, c, g
        numbers = place.permute(3, 1, 5, 6, 0, 2, 4).reshape(-1, fields, 8, 4, loads, 2)
        return numbers.permute(0, 2, 3, 4, 5, 1).flatten()
    place = element.view(8, 8, dim // 8, 4, 2)  # g, j, m, q, k0
    numbers = place.permute(1, 2, 0, 3, 4).reshape(-1, loads, fields, 8, 4, 2)
    return numbers.permute(0, 3, 4, 1, 5, 2).flatten()


@functools.cache
def inverse(dim: int, bits: int, values: bool) -> Tensor:
    """Return each number's field, int64 [64 · D]."""
    return order_of(dim, bits, values).argsort()


@functools.cache
def param_order(dim: int, bits: int) -> Tensor:
    """Return the channel of each stored parameter of keys, int64 [D]: the bytes that a thread loads are adjacent."""
    channel = torch.arange(dim, device="cpu")
    if bits >= ROWS_FROM:
        return channel
    block = min(dim, PARAM_BLOCK)
    within = channel % block
    place = channel - within + within % 8 // 2 * (block // 4) + within // 16 * 4 + channel % 2 * 2 + within // 8 % 2
    return place.argsort()


def in_thread_order(scales: Tensor) -> Tensor:
    """Swap the two middle scales of each four tokens [..., T]; its own inverse."""
    return scales.unflatten(-1, (-1, 2, 2)).mT.flatten(-3)


def packed(fields: Tensor, bits: int) -> Tensor:
    """Pack fields uint8 [..., n] of so many bits, the first in a byte's lowest bits: uint8 [..., n · bits / 8]."""
    last = 8 // bits - 1
    # Field i is byte i of a word. One product shifts all fields to the highest byte, without carries.
    shifts = sum(1 << 8 * (last - i) + bits * i for i in range(last + 1))
    return (fields.contiguous().view(WORDS[bits]) * shifts >> 8 * last).to(torch.uint8)


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """Unpack uint8 [..., n · bits / 8] to fields uint8 [..., n], the inverse of `packed`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def part_of(codes: Tensor, dim: int, bits: int, values: bool) -> Tensor:
    """Return the keys' or the values' part of whole records, a view uint8 [B, H, C/64, 64 · D · bits / 8] of codes."""
    records = codes.unflatten(2, (-1, RECORD)).flatten(3)
    width = RECORD * dim * bits // 8
    return records[..., records.shape[-1] - width :] if values else records[..., :width]


def fields_of(codes: Tensor, dim: int, bits: int, values: bool) -> Tensor:
    """Return the fields uint8 [B, H, C/64, 64 · D] of whole records' keys or values, in the order of memory."""
    return unpacked(part_of(codes, dim, bits, values), bits)


def by_token(fields: Tensor, dim: int, bits: int, values: bool) -> Tensor:
    """Return fields [B, H, n, 64 · D] of records by token and channel, [B, H, 64 · n, D]."""
    found = fields[..., inverse(dim, bits, values).to(fields.device)]
    return found.unflatten(-1, (RECORD, dim)).flatten(2, 3)


def by_field(x: Tensor, start: int, bits: int, values: bool) -> Tensor:
    """Return tokens [B, H, T, D] from `start` on in their records' order, [B, H, n, 64 · D], padded with zeros."""
    before, after = start % RECORD, -(start + x.shape[2]) % RECORD
    whole = torch.nn.functional.pad(x, (0, 0, before, after)).unflatten(2, (-1, RECORD)).flatten(3)
    return whole[..., order_of(x.shape[3], bits, values).to(x.device)]


def read_levels(codes: Tensor, dim: int, bits: int, values: bool) -> Tensor:
    """Return the levels uint8 [B, H, C, D] of whole records' keys or values, codes [B, H, C, w]."""
    return by_token(fields_of(codes, dim, bits, values), dim, bits, values)


def write_records(new: Tensor, start: int, stop: int, codes: Tensor, dim: int, bits: int, values: bool) -> None:
    """Write `new` [B, H, n, 64 · D · bits / 8], the keys' or values' part of the n records with tokens start..stop.

    Other tokens of these records stay, since a tier of groups of 32 tokens may end inside a record.
    """
    first, last = start // RECORD, -(-stop // RECORD)
    target = part_of(codes[:, :, first * RECORD : last * RECORD], dim, bits, values)
    if start % RECORD or stop % RECORD:
        record = torch.arange(first, last, device=codes.device)[:, None]
        token = order_of(dim, bits, values).to(codes.device) // dim + record * RECORD
        own = (token >= start) & (token < stop)
        new = packed(torch.where(own, unpacked(new, bits), unpacked(target, bits)), bits)
    target.copy_(new)


def write_levels(levels: Tensor, start: int, codes: Tensor, bits: int, values: bool) -> None:
    """Write levels uint8 [B, H, T, D] of tokens from `start` on to codes [B, H, C, w]."""
    new, stop = packed(by_field(levels, start, bits, values), bits), start + levels.shape[2]
    write_records(new, start, stop, codes, levels.shape[3], bits, values)
