"""A 16-bit cache that has become long enough is compressed, into a new pool of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specache_compile.kernels.codes.trellis import is_trellis
from specache_compile.kernels.movement.tier_ops import store_low_bit
from specache_compile.kernels.state.by_token import put, tokens_of
from specache_compile.kernels.state.center import is_found, set_center
from specache_compile.kernels.state.cursor import CURSOR_SIZE, NEXT_LOW_BIT, runs_of
from specache_compile.kernels.state.page_table import LOW_BIT_TIER, Pages, rows_read, write_rows
from specache_compile.kernels.state.sinks import find_sinks
from specache_compile.kernels.state.stored_pairs import stored
from specache_compile.kernels.state.stored_tiers import StoredTiers
from specache_compile.methods.field import LayerState
from specache_compile.runtime.tiers import Tiers

# Tokens to quantise at a time: a multiple of every group size.
MOVED = 2048


@torch.no_grad()
def compressed(tiers: Tiers, lengths: Sequence[int], padding: Tensor | None) -> Tiers:
    """Tiers under the requested options with the tokens of 16-bit tiers (`in_16_bits`), which are unchanged.

    lengths: of the rows. padding: as for `append`. A host tier that is not rounded, and belongs to these rows alone, is
    shared. The slots are empty.
    """
    assert tiers.pending is not None
    made = tiers.under(tiers.pending)
    for site in range(len(made.layers)):
        old, new = tiers.state[site], made.state[site]
        new["recent"].copy_(old["recent"])
        if "host" in new and new["host"] is not old["host"]:
            copy_host(tiers, made, site, max(lengths, default=0))
        for rows, length in runs_of(lengths):
            compress(tiers, made, site, rows, length, None if padding is None else padding[rows])
    return made


def copy_host(tiers: Tiers, made: Tiers, site: int, tokens: int) -> None:
    old, new = (each.pairs(site, "host") for each in (tiers, made))
    for start in range(0, tokens, MOVED):
        pairs = tokens_of(old, start, min(start + MOVED, tokens))
        put(new, start, stored(pairs, new))


def compress(tiers: Tiers, made: Tiers, site: int, rows: slice, length: int, there: Tensor | None) -> None:
    """Quantise one layer's tokens of rows of this length, block by block. there: their padding."""
    options: Any = made.options
    frequencies = made.frequencies[site]
    low_bit, table = options.low_bit_length(length), made.table[rows]
    held, source = row_tiers(made.state[site], table, rows), Pages(tiers.state[site]["codes"], tiers.table[rows])
    if held.sink_index.shape[2]:
        find_sinks(held.sink_index, None if there is None else there[:, 0, 0], 0, length)
    if low_bit and is_found(held.center, frequencies, is_trellis(held.key_params)):
        keys = tokens_of(source, 0, low_bit).unflatten(3, (2, -1))[:, :, :, 0]
        counts = None if there is None else there[..., :low_bit].mT
        turned_by = None if frequencies is None else frequencies.to(keys.device)
        set_center(keys, counts, turned_by, held.center, options.group_size)
    for start in range(0, low_bit, MOVED):
        pairs = tokens_of(source, start, min(start + MOVED, low_bit)).unflatten(3, (2, -1))
        store_low_bit(pairs, there, start, held, options.layout, options.zero_point)
    cursor = torch.zeros(1, CURSOR_SIZE, dtype=torch.int64)
    cursor[:, NEXT_LOW_BIT] = low_bit
    for name in LOW_BIT_TIER:
        write_rows(made.state[site][name], table, getattr(held, name), cursor)


def row_tiers(state: LayerState, table: Tensor, rows: slice) -> StoredTiers:
    """The low-bit tier of rows in one piece, without contents, and views of their other state."""
    pieces = {name: rows_read(state[name], table, table.shape[1]) for name in LOW_BIT_TIER}
    return StoredTiers(*(pieces[name] if name in pieces else state[name][rows] for name in StoredTiers._fields))
