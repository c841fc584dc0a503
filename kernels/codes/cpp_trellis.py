"""The trellis encoder in C++: in PyTorch it needs about twenty launches per number, and a sixth of a prefill's time."""

from __future__ import annotations

import torch
from torch import Tensor

from specache_compile.kernels.cpp.library import address, has_compiler, trellis_library

from . import trellis


def encoder(device: torch.device) -> trellis.Encoder:
    """Return the C++ encoder on a CPU with a compiler, else `trellis.encode`."""
    return encode if device.type == "cpu" and has_compiler() else trellis.encode


def encode(circles: Tensor) -> Tensor:
    """Compute `trellis.encode`; paths that are equally near up to rounding may differ."""
    circles = circles.contiguous()
    codes = torch.empty((circles.shape[0], circles.shape[1] // 8), dtype=torch.uint8)
    trellis_library().encode(address(circles), *circles.shape, address(codes))
    return codes
