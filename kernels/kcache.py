"""KCache (arXiv 2404.18057): keys stay on the device in 16 bits, values live on the host; a step fetches the N that it
needs now."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import grouped_bias, product, softmax_denominator
from .copy_queue import wait_for_offloads
from .cursor import LENGTH
from .segments import picked


def kcache_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, device_keys: Tensor,
    host: Tensor, top_n: int, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """S = softmax(q·Kᵀ/√d) over all tokens; each query head takes its N largest, and only their values (equation 4).

    q [B, Hq, 1, d]; k, v [B, H, 1, d]; mask [B|1, Hq|1, 1, ≥ n + 1]; device_keys [B, H, C, d]; host: all pairs
    (`segments.py`). The weights are not normalised again. Returns [B, Hq, 1, d] in q's dtype. No guess: its fetch is
    waited for.
    """
    wait_for_offloads(cursor)
    length, heads = int(cursor[LENGTH]), k.shape[1]
    query = q.float().unflatten(1, (heads, -1)) * scale
    logits = product(query, torch.cat([device_keys[:, :, :length], k], 2), softcap)
    if mask is not None:
        logits = logits + grouped_bias(mask, heads, length + 1)
    peak, share = softmax_denominator([logits], None if sinks is None else sinks.float().view(heads, -1, 1, 1))
    weights = (logits - peak).exp() * share
    best, index = weights[:, :, :, 0].topk(min(top_n, length + 1), dim=-1)  # [B, H, G, N]
    fetched = values_of(host, index.clamp(max=max(length - 1, 0)), length).to(q.device)
    fetched = torch.where((index == length).unsqueeze(-1), v[:, :, None], fetched)
    return (best.unsqueeze(-2) @ fetched.float()).flatten(1, 2).to(q.dtype).contiguous()


def values_of(host: Tensor, index: Tensor, length: int) -> Tensor:
    """The values [B, H, G, N, d] of tokens `index` [B, H, G, N], where the host tier is."""
    if not length:
        return host.new_zeros(*index.shape, host.shape[-1])
    batch, heads = index.shape[:2]
    row = torch.arange(batch, device=host.device)[:, None, None, None]
    head = torch.arange(heads, device=host.device)[None, :, None, None]
    return picked(host, row, head, index, 1)


def keep_keys(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, device_keys: Tensor) -> None:
    """Put the new keys k [B, H, T, d] behind those of device_keys [B, H, C, d]; v and padding, which every store is
    given, are not read."""
    start = int(cursor[LENGTH])
    device_keys[:, :, start : start + k.shape[2]] = k
