"""An extend of latent attention: over the cached rows themselves, or over keys and values made of them once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.kernels.movement.copy_queue import wait_for_offloads
from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.cursor import length_of
from specache_compile.kernels.state.segments import tokens_of
from specache_compile.kernels.state.stored_pairs import channels_of, decoded, keys_and_values

from .definition import extend_attention
from .flash import DTYPES, Part, Rows, extend_attention_fused, flash, merged

# Tokens whose keys and values are made at a time.
BLOCK = 1024


def extend_latents(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, host: Tensor,
    weight: Tensor, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Exact attention of T new tokens to rows of latent and RoPE part, as `extend_attention` is to pairs.

    q [B, Hq, T, nope + rope]; k and v are both the new rows [B, 1, T, rank + rope]; weight [Hq·(nope + v), rank], which
    makes a latent into each head's key, without its RoPE part, and value; the rest as there. Returns [B, Hq, T, v].
    The projection is absorbed into the query and the output (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """
    return over_rows(extend_attention, q, k, mask, sinks, cursor, host, weight, scale, softcap)


def fake_extend_latents(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, host: Tensor,
    weight: Tensor, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    return q.new_empty((*q.shape[:3], channels(q, k, weight)[1]))


def channels(q: Tensor, k: Tensor, weight: Tensor) -> tuple[int, int]:
    """Of each head's key those without RoPE, and those of its value."""
    rope = k.shape[-1] - weight.shape[1]
    nope = q.shape[-1] - rope
    return nope, weight.shape[0] // q.shape[1] - nope


def over_rows(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor,
    host: Tensor, weight: Tensor, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """`extend_latents`, by an attention over pairs."""
    nope, outputs = channels(q, k, weight)
    keys, values = weight.unflatten(0, (q.shape[1], -1)).split([nope, outputs], 1)
    query = torch.cat([torch.einsum("bhtn,hnr->bhtr", q[..., :nope], keys), q[..., nope:]], -1)
    out = attend(query, k, k, mask, sinks, cursor, host, scale, softcap)
    return torch.einsum("bhtr,hvr->bhtv", out[..., : weight.shape[1]], values).contiguous()


def extend_latents_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, host: Tensor,
    weight: Tensor, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """`latents.extend_latents`, by torch's flash kernel, over whichever of both is cheaper; the same arguments and
    results."""
    taken = softcap is None and q.dtype in DTYPES and q.dtype == k.dtype and channels(q, k, weight)[1] <= q.shape[-1]
    if taken and makes_keys(q, k, weight):
        return over_keys(q, k, mask, sinks, cursor, host, weight, scale)
    return over_rows(extend_attention_fused, q, k, mask, sinks, cursor, host, weight, scale, softcap)


def makes_keys(q: Tensor, k: Tensor, weight: Tensor) -> bool:
    """Whether keys and values of the whole cache, made once, cost fewer multiplications than they save.

    Of a cached token and a head: T·(rank + rope)·2 over rows; over keys T·(nope + rope)·2, and the projection.
    """
    saved = 2 * q.shape[2] * (k.shape[-1] - q.shape[-1])
    return saved > weight.shape[0] // q.shape[1] * weight.shape[1]


@by_rows(0)
def over_keys(
    q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None, cursor: Tensor, host: Tensor, weight: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """`extend_latents`, over keys and values that are made part by part."""
    length, width = length_of(cursor), k.shape[-1]
    if length < 0:
        return over_rows(extend_attention_fused, q, k, mask, sinks, cursor, host, weight, scale, None)
    wait_for_offloads(cursor)
    outputs, rows = channels(q, k, weight)[1], Rows(q, q.shape[1], mask, length + q.shape[2])

    def part(latents: Tensor, mask: Tensor | None) -> Part:
        return flash(rows.q, *made(latents, weight, q), mask, scale)

    parts = [part(k, rows.new_columns(length, rows.tokens))]
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        pairs = decoded(tokens_of(host, start, stop), q.dtype, channels_of(host, width))
        parts.append(part(keys_and_values(pairs, width)[0], rows.columns(start, stop)))
    return rows.back(merged(parts, rows.sinks(sinks))[..., :outputs], q.dtype)


def made(latents: Tensor, weight: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, Hq, n, nope + rope] of rows [B, 1, n, rank + rope], and values, filled up with zeros to that width."""
    nope, outputs = channels(q, latents, weight)
    both = F.linear(latents[:, 0, :, : weight.shape[1]], weight).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
    ropes = latents[..., weight.shape[1] :].expand(-1, q.shape[1], -1, -1)
    return torch.cat([both[..., :nope], ropes], -1), F.pad(both[..., nope:], (0, q.shape[-1] - outputs))
