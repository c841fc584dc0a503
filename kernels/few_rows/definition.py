"""A few rows times a weight: what a decode step's lanes make of each linear layer."""

from __future__ import annotations

from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from specache_compile.kernels.cpp.library import rows_library

# Rows that the C++ kernel keeps in registers, and the dtypes that it reads.
MOST_ROWS = 4
DTYPES = (torch.float32, torch.bfloat16)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, m] · weightᵀ [m, n] + bias [n], rows at most `MOST_ROWS`; → [rows, n]."""
    return F.linear(x, weight, bias)


def library_of(x: Tensor, *rest: Tensor | None) -> CDLL | None:
    """The library that a call with such arguments needs; None where the definition takes over."""
    return rows_library(x.dtype) if x.dtype in DTYPES else None


def few_rows_fused(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`few_rows` in C++, which reads the weight once for all rows; the same arguments and results."""
    rows, channels = x.shape
    if x.dtype not in DTYPES or rows > MOST_ROWS:
        return few_rows(x, weight, bias)
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    outputs = weight.shape[0]
    out = x.new_empty(rows, outputs)
    # Two hundred calls make a step: no helper stands between.
    rows_library(x.dtype).few_rows(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), rows, channels, outputs,
        out.data_ptr(),
    )  # fmt: skip
    return out


def fake_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
