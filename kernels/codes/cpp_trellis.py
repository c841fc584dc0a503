"""The trellis code's encoder in C++: in PyTorch it is some twenty launches a number, and a sixth of a prefill."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from specache_compile.kernels.cpp.library import address, trellis_library

from . import trellis


def encoder(device: torch.device) -> trellis.Encoder:
    """`trellis.encode`, or the same in C++ on a CPU that has a compiler."""
    return encode if device.type == "cpu" and has_compiler() else trellis.encode


@functools.cache
def has_compiler() -> bool:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def encode(circles: Tensor) -> Tensor:
    """As `trellis.encode`. Of two paths that are as near as rounding tells, either."""
    circles = circles.contiguous()
    codes = torch.empty((circles.shape[0], circles.shape[1] // 8), dtype=torch.uint8)
    trellis_library().encode(address(circles), *circles.shape, address(codes))
    return codes
