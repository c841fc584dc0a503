"""The fused CPU kernels of the low-bit tier: compiled C++ in place of `attention.low_bit_logits` and `low_bit_mix`.

Inductor's own C++ toolchain compiles it on first use and keeps it in Inductor's cache. Unpacking to float32 in
PyTorch writes and reads every element some six times; here the codes are read once.
"""

from __future__ import annotations

import functools
import math
from ctypes import CDLL, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.codecache import CppCodeCache

from .attention import (
    LowBitKernels,
    Partial,
    attend_scored,
    decode_attention,
    low_bit_logits,
    low_bit_mix,
    score_low_bit,
)
from .layout import Layout, rotated

# Inductor turns these off for its own kernels, which it vectorises itself. Sums may be reordered; infinities count.
FLAGS = (
    "-ftree-loop-vectorize",
    "-ffp-contract=fast",
    "-fassociative-math",
    "-fno-math-errno",
    "-mprefer-vector-width=512",
)


@functools.cache
def library() -> CDLL:
    """The compiled kernel; needs a C++ compiler, as Inductor does."""
    source = Path(__file__).with_name("low_bit_cpu.cpp").read_text()
    loaded = CppCodeCache.load(source, extra_flags=FLAGS)
    loaded.score_low_bit.argtypes = [c_void_p] * 5 + [c_int64] * 10 + [c_float, c_void_p]
    loaded.mix_low_bit.argtypes = [c_void_p] * 3 + [c_int64] * 9 + [c_void_p] * 3
    loaded.score_low_bit.restype = loaded.mix_low_bit.restype = None
    return loaded  # type: ignore[return-value]


def logits_fused(
    query: Tensor, codes: Tensor, key_params: Tensor, bias: Tensor | None, length: int, softcap: float | None,
    layout: Layout,
) -> Tensor:  # fmt: skip
    """As `attention.low_bit_logits`, which takes over for a tier that is empty or not quantised."""
    if not layout.is_quantised or length == 0:
        return low_bit_logits(query, codes, key_params, bias, length, softcap, layout)
    batch, heads, group_heads, lanes, d = query.shape
    capacity = codes.shape[2]
    query = (rotated(query) if layout.is_rotated else query).contiguous()
    scales = key_params.float().contiguous()
    logits = query.new_empty(batch, heads, group_heads, lanes, length)
    strides = torch.zeros(5, dtype=torch.int64)
    if bias is not None:
        bias = bias.expand(*logits.shape)
        strides = torch.tensor(bias.stride())
    library().score_low_bit(
        *map(address, (query, codes, scales, bias, strides)), batch, heads, group_heads, lanes, d, length, capacity,
        capacity // key_params.shape[2], codes.shape[3], layout.key_bits, softcap or 0.0, address(logits),
    )  # fmt: skip
    return logits


def mix_fused(logits: Tensor, hidden: Tensor, codes: Tensor, value_params: Tensor, d: int, layout: Layout) -> Partial:
    """As `attention.low_bit_mix`, which takes over for a tier that is empty or not quantised."""
    if not layout.is_quantised or not logits.shape[-1]:
        return low_bit_mix(logits, hidden, codes, value_params, d, layout)
    batch, heads, group_heads, lanes, length = logits.shape
    logits = logits.masked_fill(hidden[:, :, None, None], -math.inf).contiguous()
    scales = value_params.float().contiguous()
    out = logits.new_empty(batch, heads, group_heads, lanes, d)
    peak, total = (logits.new_empty(*out.shape[:-1], 1) for _ in range(2))
    library().mix_low_bit(
        *map(address, (logits, codes, scales)), batch, heads, group_heads * lanes, d, length, codes.shape[2],
        d // value_params.shape[-1], codes.shape[3], layout.value_bits, *map(address, (out, peak, total)),
    )  # fmt: skip
    return Partial(logits, rotated(out) if layout.is_rotated else out, peak, total)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


FUSED = LowBitKernels(logits_fused, mix_fused)


def decode_attention_fused(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`attention.decode_attention` with the fused low-bit part; the same arguments and results."""
    return decode_attention(*arguments, kernels=FUSED)  # type: ignore[misc]


def score_low_bit_fused(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`attention.score_low_bit` with the fused low-bit part; the same arguments and results."""
    return score_low_bit(*arguments, kernels=FUSED)  # type: ignore[misc]


def attend_scored_fused(*arguments: Any) -> Tensor:
    """`attention.attend_scored` with the fused low-bit part; the same arguments and results."""
    return attend_scored(*arguments, kernels=FUSED)  # type: ignore[misc]
