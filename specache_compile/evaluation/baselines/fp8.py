"""The FP8 cache of serving engines: every pair on the device as e4m3 codes, half of 16 bits.

A prefill is exact. The scale is 1, as in engines without calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.kernels.attention.extend import extend_attention, extend_attention_fused
from specache_compile.kernels.op import Op, fake_nothing, fake_of_query
from specache_compile.kernels.state.by_rows import by_rows
from specache_compile.kernels.state.cursor import length_of
from specache_compile.kernels.state.page_table import Pages, put
from specache_compile.kernels.state.stored_pairs import FP8
from specache_compile.methods.field import Field, always
from specache_compile.methods.host_tier import whole_cache
from specache_compile.methods.method import Method
from specache_compile.options import MethodOptions
from specache_compile.passes.recipe import OpCall, Recipe, named

LARGEST = torch.finfo(FP8).max  # 448


@by_rows(by_token=("fp8_codes",))
def keep_fp8(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, fp8_codes: Pages) -> None:
    """Put the new pairs k, v [B, H, T, d] behind those of fp8_codes uint8, in pages, as e4m3 codes.

    Each element becomes its nearest code, beyond ±448 that of ±448; NaN stays NaN. Every store gets padding; this one
    does not read it.
    """
    pairs = torch.stack([k, v], dim=3)
    # Not every version of torch saturates by itself.
    put(fp8_codes, length_of(cursor), pairs.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8))


OPS = (
    Op(
        "keep_fp8(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) fp8_codes) -> ()",
        keep_fp8, fake_nothing, f"{__package__}.triton_fp8:keep_fp8",
        early=4,
    ),
    Op(
        "fp8_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor fp8_codes, "
        "float scale, float? softcap) -> Tensor",
        extend_attention, fake_of_query, f"{__package__}.triton_fp8:fp8_attention",
        fused=extend_attention_fused, is_work=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Fp8Options(MethodOptions):
    method: str = "fp8"


def recipe(options: MethodOptions, site: int) -> Recipe:
    """As `full`'s, over the codes. A step's own pair is exact in its own attention and rounded from the next step
    on."""
    codes = named("fp8_codes")
    extend = OpCall("extend_attention", {"host": "fp8_codes"})
    return Recipe({"extend": extend, "decode": OpCall("fp8_attention", codes)}, (OpCall("keep_fp8", codes),))


FP8_CODES = Field("fp8_codes", "cache", whole_cache, always(torch.uint8), by_page=True, has_all_pairs=True)
METHOD = Method("fp8", Fp8Options, (FP8_CODES,), recipe)
