"""Numbers on the simulated device: aten's CUDA ops run the CPU's kernels, Triton's kernels are interpreted."""

from __future__ import annotations

import ctypes
import os


def install() -> None:
    """Put them in CUDA's place in this process. Whatever cannot be is refused by the driver, by name."""
    if ctypes.CDLL(os.environ["SIMULATED_ATEN"]).simulated_install_aten():
        raise RuntimeError("aten's kernels cannot be run on the simulated device: the reason is on stderr")
    from simulated_device import launches

    launches.install()
