"""Product of few rows and a weight: a linear layer in a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.kernels.cpp.library import Weight, rows_library

# The most rows that the C++ kernel keeps in registers, and its dtypes.
MOST_ROWS = 4
DTYPES = (torch.float32, torch.bfloat16)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x [rows, m] · weightᵀ [m, n] + bias [n] → [rows, n], for at most `MOST_ROWS` rows."""
    return F.linear(x, weight, bias)


def library_of(x: Tensor, *rest: Tensor | None) -> CDLL | None:
    """Return the library for a call with these arguments; None if the definition runs."""
    return rows_library(x.dtype) if x.dtype in DTYPES else None


def few_rows_each(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Compute `few_rows` of one x with each weight and bias."""
    return [few_rows(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def few_rows_fused(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `few_rows` in C++, which reads the weight once for all rows; same arguments and results."""
    return few_rows_each_fused(x, (weight,), (bias,))[0]


def few_rows_each_fused(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Compute `few_rows_each` in C++; same arguments and results."""
    rows, channels = x.shape
    if x.dtype not in DTYPES or rows > MOST_ROWS:
        return few_rows_each(x, weights, biases)
    x = x.contiguous()
    places, made, kept = (Weight * len(weights))(), [], []
    # A step has a hundred of these calls, so they bypass helper functions.
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
