"""The trellis code's encoder in C++: in PyTorch it is some twenty launches a number, and a sixth of a prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from specache_compile.kernels.cpp.library import address, has_compiler, trellis_library

from . import trellis


def encoder(device: torch.device) -> trellis.Encoder:
    """`trellis.encode`, or the same in C++ on a CPU that has a compiler."""
    return encode if device.type == "cpu" and has_compiler() else trellis.encode


def encode(circles: Tensor) -> Tensor:
    """As `trellis.encode`. Of two paths that are as near as rounding tells, either."""
    circles = circles.contiguous()
    codes = torch.empty((circles.shape[0], circles.shape[1] // 8), dtype=torch.uint8)
    trellis_library().encode(address(circles), *circles.shape, address(codes))
    return codes
