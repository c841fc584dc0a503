"""A few rows times a weight: what a decode step's lanes make of each linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.kernels.cpp.library import Weight, rows_library

# Rows that the C++ kernel keeps in registers, and the dtypes that it reads.
MOST_ROWS = 4
DTYPES = (torch.float32, torch.bfloat16)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, m] · weightᵀ [m, n] + bias [n], rows at most `MOST_ROWS`; → [rows, n]."""
    return F.linear(x, weight, bias)


def library_of(x: Tensor, *rest: Tensor | None) -> CDLL | None:
    """The library that a call with such arguments needs; None where the definition takes over."""
    return rows_library(x.dtype) if x.dtype in DTYPES else None


def few_rows_each(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`few_rows` of each of these weights and biases, of one x."""
    return [few_rows(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def few_rows_fused(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`few_rows` in C++, which reads the weight once for all rows; the same arguments and results."""
    return few_rows_each_fused(x, (weight,), (bias,))[0]


def few_rows_each_fused(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`few_rows_each`, as `few_rows_fused`."""
    rows, channels = x.shape
    if x.dtype not in DTYPES or rows > MOST_ROWS:
        return few_rows_each(x, weights, biases)
    x = x.contiguous()
    places, made, kept = (Weight * len(weights))(), [], []
    # A hundred calls make a step: no helper stands between.
    for place, weight, bias in zip(places, weights, biases, strict=True):
        weight, outputs = weight.contiguous(), weight.shape[0]
        out = x.new_empty(rows, outputs)
        made.append(out)
        kept.append(weight)
        if bias is not None:
            bias = bias.contiguous()
            kept.append(bias)
            place.bias = bias.data_ptr()
        place.w, place.outputs, place.y = weight.data_ptr(), outputs, out.data_ptr()
    rows_library(x.dtype).few_rows(x.data_ptr(), places, len(made), rows, channels)
    return made


def fake_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def fake_few_rows_each(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
