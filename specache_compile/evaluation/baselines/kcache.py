"""KCache (arXiv 2404.18057): keys stay on the device in 16 bits, values on the host. Each query head fetches the N
values of the largest weights, in the step that needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specache_compile.kernels.attention.attention_ops import weights_of
from specache_compile.kernels.attention.query import query_of
from specache_compile.kernels.op import Op, fake_nothing, fake_of_query
from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.cursor import length_of
from specache_compile.kernels.state.operands import AttentionInputs, takes
from specache_compile.kernels.state.page_table import Pages, pairs_at, put, tokens_of
from specache_compile.methods import full
from specache_compile.methods.field import Field, LayerShape
from specache_compile.methods.host_tier import HOST, DraftOptions
from specache_compile.methods.method import Method
from specache_compile.options import whole
from specache_compile.passes.recipe import OpCall, Recipe, named


@by_rows(0, by_token=("device_keys", "host"))
@takes(new=AttentionInputs)
def kcache_attention(
    new: AttentionInputs, device_keys: Pages, host: Pages, top_n: int, scale: float, softcap: float | None
) -> Tensor:
    """S = softmax(q·Kᵀ/√d) over all tokens; each query head takes only the values of its N largest (equation 4).

    new: of one token. device_keys: all keys, and host: all pairs. The weights are not normalised again.
    The step waits for its fetch. Returns [B, Hq, 1, d] in q's dtype.
    """
    at = query_of(new, scale, softcap)
    length = at.length
    logits = at.logits(torch.cat([tokens_of(device_keys, 0, length), new.k], 2), 0, length + 1)
    (weights,) = weights_of([logits], at.sink)
    best, index = weights[:, :, :, 0].topk(min(top_n, length + 1), dim=-1)  # [B, H, G, N]
    fetched = values_of(host, index.clamp(max=max(length - 1, 0)), length).to(new.q.device)
    fetched = torch.where((index == length).unsqueeze(-1), new.v[:, :, None], fetched)
    return (best.unsqueeze(-2) @ fetched.float()).flatten(1, 2).to(new.q.dtype).contiguous()


def values_of(host: Pages, index: Tensor, length: int) -> Tensor:
    """The values [B, H, G, N, d] of tokens `index` [B, H, G, N], on the host tier's device."""
    if not length:
        return torch.zeros(*index.shape, host.shape[-1], dtype=host.dtype, device=host.device)
    batch, heads = index.shape[:2]
    row = torch.arange(batch, device=host.device)[:, None, None, None]
    head = torch.arange(heads, device=host.device)[None, :, None, None]
    return pairs_at(host, row, head, index, 1)


@by_rows(by_token=("device_keys",))
def keep_keys(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, device_keys: Pages) -> None:
    """Put the new keys k [B, H, T, d] behind those of device_keys. Every store gets v and padding; this
    one does not read them."""
    put(device_keys, length_of(cursor), k)


def attention_behind_copies(q: Tensor, *rest: Any) -> Tensor:
    """As `kcache_attention`, on a CUDA device, after all copies to the host."""
    from specache_compile.kernels.movement import copy_stream

    copy_stream.join(q.device)
    torch.cuda.current_stream(q.device).synchronize()  # the host itself picks the values
    return kcache_attention(q, *rest)


OPS = (
    Op(
        "keep_keys(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) device_keys) -> ()",
        keep_keys, fake_nothing, f"{__name__}:keep_keys",
        early=4, capturable=False,
    ),
    Op(
        "kcache_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, "
        "Tensor device_keys, Tensor host, int top_n, float scale, float? softcap) -> Tensor",
        kcache_attention, fake_of_query, f"{__name__}:attention_behind_copies",
        is_work=True, reads_host=True, capturable=False,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class KCacheOptions(DraftOptions):
    method: str = "kcache"
    top_n: int = whole(128, 1, "N: values that each query head fetches in a step", metavar="N")
    kept_layers: int = whole(1, 0, "first layers whose values stay on the device", metavar="LAYERS")


def keys_shape(options: KCacheOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, capacity, layer.head_dim)


DEVICE_KEYS = Field("device_keys", "keys", keys_shape, by_page=True)


def recipe(options: KCacheOptions, site: int) -> Recipe:
    """Keys on the device and whole pairs on the host, where extends read them; a kept layer has its full cache."""
    if site < options.kept_layers:
        return full.recipe(options, site)
    return Recipe(
        {
            "extend": OpCall("extend_attention", named("host")),
            "decode": OpCall("kcache_attention", named("device_keys", "host"), {"top_n": options.top_n}),
        },
        (OpCall("keep_keys", named("device_keys")), OpCall("offload", named("host"))),
    )


METHOD = Method("kcache", KCacheOptions, (HOST, DEVICE_KEYS, full.FULL_CACHE), recipe)
