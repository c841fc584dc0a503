"""Numbers on the simulated device: aten's CUDA ops run the CPU's kernels, Triton's kernels are interpreted."""

from __future__ import annotations


def install() -> None:
    """Install these replacements for CUDA in this process. The driver refuses everything else, by name."""
    import torch

    from simulated_device import aten, launches

    aten.install()
    # Of attention's kernels only the memory-efficient one has a stand-in.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    launches.install()
