"""The FP8 cache: keys and values as e4m3 codes, under the scale 1 that engines take where nothing was calibrated."""

from __future__ import annotations

import torch
from torch import Tensor

from .cursor import LENGTH

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448


def keep_fp8(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, fp8_codes: Tensor) -> None:
    """Put the new pairs k, v [B, H, T, d] behind those of fp8_codes uint8 [B, H, C, 2, d], as e4m3 codes.

    Each element becomes its nearest code, beyond ±448 that of ±448; NaN stays NaN. padding, which every store is given,
    is not read.
    """
    start = int(cursor[LENGTH])
    pairs = torch.stack([k, v], dim=3)
    # Not every version of torch saturates by itself.
    fp8_codes[:, :, start : start + k.shape[2]] = pairs.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
