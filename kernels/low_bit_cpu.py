"""The fused CPU kernel of the low-bit tier's attention: compiled C++ in place of `attention.low_bit_attention`.

Inductor's own C++ toolchain compiles it on first use and keeps it in Inductor's cache. Unpacking to float32 in
PyTorch writes and reads every element some six times; here the codes are read once.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.codecache import CppCodeCache

from .attention import Partial, decode_attention, low_bit_attention, stored_bits

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
    loaded.low_bit_attention.argtypes = [c_void_p] * 7 + [c_int64] * 10 + [c_float] + [c_void_p] * 4
    loaded.low_bit_attention.restype = None
    return loaded  # type: ignore[return-value]


def low_bit_attention_fused(
    query: Tensor, codes: Tensor, key_params: Tensor, value_params: Tensor, hidden: Tensor, bias: Tensor | None,
    length: int, softcap: float | None,
) -> Partial:  # fmt: skip
    """As `attention.low_bit_attention`, which takes over for a tier that is empty or not quantised."""
    bits = stored_bits(codes, query.shape[-1])
    if bits == 16 or length == 0:
        return low_bit_attention(query, codes, key_params, value_params, hidden, bias, length, softcap)
    batch, heads, group_heads, lanes, d = query.shape
    capacity = codes.shape[2]
    query = query.contiguous()
    key_scales, value_scales = key_params.float().contiguous(), value_params.float().contiguous()
    replaced = hidden.to(torch.uint8).contiguous()
    shape = (batch, heads, group_heads, lanes)
    logits, out = query.new_empty(*shape, length), query.new_empty(*shape, d)
    peak, total = query.new_empty(*shape, 1), query.new_empty(*shape, 1)
    strides = torch.zeros(5, dtype=torch.int64)
    if bias is not None:
        bias = bias[..., :length].expand(*shape, length)
        strides = torch.tensor(bias.stride())
    library().low_bit_attention(
        *map(address, (query, codes, key_scales, value_scales, replaced, bias, strides)),
        batch, heads, group_heads, lanes, d, length, capacity, capacity // key_params.shape[2],
        d // value_params.shape[-1], bits, softcap or 0.0, *map(address, (logits, out, peak, total)),
    )  # fmt: skip
    return Partial(logits, out, peak, total)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def decode_attention_fused(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`attention.decode_attention` with the fused low-bit part; the same arguments and results."""
    return decode_attention(*arguments, low_bit_part=low_bit_attention_fused)  # type: ignore[misc]
