"""The figures that bound a step on a device: memory, link and arithmetic. All are from data sheets, none is
measured."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.errors import SpecacheError


@dataclass(frozen=True)
class Device:
    """hbm_gbps, pcie_gbps: 1e9 bytes a second, PCIe one way.
    tflops: 1e12 dense 16-bit operations a second with 32-bit sums.
    vram_gib: memory.

    sms: multiprocessors, of four schedulers each.
    ghz: their clock under load.
    hbm_share, tflops_share: the shares of hbm_gbps and tflops that long reads and products reach.
    """

    name: str
    hbm_gbps: float
    pcie_gbps: float
    tflops: float
    vram_gib: float
    sms: int
    ghz: float
    hbm_share: float
    tflops_share: float

    @property
    def vram(self) -> float:
        """Bytes of memory."""
        return self.vram_gib * 2**30


# Memory, arithmetic (without sparsity) and multiprocessors: the vendor's data sheets.
# PCIe: what such a link carries in practice, some four fifths of its nominal 32 (gen 4 x16), 64 (gen 5 x16) and 16
# (gen 4 x8) GB/s.
# Clock: the data sheet's where power lets a device keep it (A6000, A100, RTX 4090), else an estimate.
# The two shares: estimates.
DEVICES = {
    device.name: device
    for device in (
        Device("A6000", 768, 25, 155, 48, 84, 1.8, 0.9, 0.8),
        Device("A100", 2039, 25, 312, 80, 108, 1.41, 0.88, 0.74),
        Device("H100", 3350, 50, 989, 80, 132, 1.75, 0.9, 0.61),
        Device("H200", 4800, 50, 989, 141, 132, 1.75, 0.9, 0.61),
        Device("RTX 4090", 1008, 25, 165, 24, 128, 2.5, 0.92, 0.85),
        Device("L4", 300, 12.5, 121, 24, 58, 1.5, 0.9, 0.7),
    )
}
DEFAULT_DEVICE = "A100"


def find_device(name: str | None = None) -> Device:
    """The device of that name (in any case, spaces optional)."""
    known = {key.replace(" ", "").lower(): device for key, device in DEVICES.items()}
    found = known.get((name or DEFAULT_DEVICE).replace(" ", "").replace("-", "").lower())
    if found is None:
        raise SpecacheError(
            f"unknown device {name!r}: known are {', '.join(DEVICES)}. For another one pass a `Device` to sc.explain"
        )
    return found
