"""Numbers on the simulated device: aten's CUDA ops run the CPU's kernels, Triton's kernels are interpreted."""

from __future__ import annotations

import ctypes
import os


def install() -> None:
    """Install these replacements for CUDA in this process. The driver refuses everything else, by name."""
    if ctypes.CDLL(os.environ["SIMULATED_ATEN"]).simulated_install_aten():
        raise RuntimeError("aten's kernels cannot be run on the simulated device: the reason is on stderr")
    import torch

    from simulated_device import launches

    # Of attention's kernels only the memory-efficient one has a stand-in.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    launches.install()
