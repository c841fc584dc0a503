"""Sink tokens: the first S real tokens of a row, to which every later token attends (StreamingLLM, arXiv 2309.17453).

Their pairs stay in 16 bits, and do not count in the range of their quantisation group. `sink_index` int32 [B, 1, S]
(-1: none) lists the sinks. Once a sink has left the window, sink_pairs [B, H, S, 2, d] holds its pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import EMPTY


def find_sinks(sink_index: Tensor, there: Tensor | None, low_bit: int, stop: int) -> None:
    """Write the sinks among each row's first `stop` tokens; sinks in the low-bit tier stay.

    there: bool [B, ≥ stop], True for real tokens; None without padding.
    """
    rows, most = sink_index[:, 0].long(), sink_index.shape[2]
    stop = stop if there is not None else min(stop, low_bit + most)
    kept = (rows >= 0) & (rows < low_bit)
    tokens = torch.arange(low_bit, stop, device=rows.device).expand(rows.shape[0], -1)
    known = torch.ones_like(tokens, dtype=torch.bool) if there is None else there[:, low_bit:stop]
    place = kept.sum(-1, keepdim=True) + known.cumsum(-1) - 1
    place = place.masked_fill(~known, most).clamp(max=most)  # other tokens go to one column, which is dropped
    found = torch.nn.functional.pad(rows.masked_fill(~kept, EMPTY), (0, 1))
    sink_index[:, 0] = found.scatter(1, place, tokens)[:, :most]


def keep_sinks(pairs: Tensor, start: int, sink_pairs: Tensor, sink_index: Tensor) -> Tensor:
    """Copy the sinks' pairs from pairs [B, H, T, 2, d], the tokens from `start` on.

    Returns: bool [B, n], True for sinks; n ends at the last sink.
    """
    place = sink_index[:, 0].long() - start
    row, sink = ((place >= 0) & (place < pairs.shape[2])).nonzero(as_tuple=True)
    token = place[row, sink]
    sink_pairs[row, :, sink] = pairs[row, :, token]
    count = int(token.max()) + 1 if row.numel() else 0
    found = torch.zeros(pairs.shape[0], count, dtype=torch.bool, device=pairs.device)
    found[row, token] = True
    return found
