"""Options of the low-bit tier: which tokens are rounded to a few bits, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specache_compile.kernels.codes.params import EIGHT_BITS
from specache_compile.kernels.codes.quantize import QUANTISERS
from specache_compile.kernels.state import center
from specache_compile.kernels.state.layout import Layout
from specache_compile.options import choice, whole

from .field import LayerShape
from .host_tier import DraftOptions

BITS = (1, 2, 4, 8, 16)
# Bits of keys and of values, by `bits`. Keys select the pairs, and attention exponentiates their errors.
BITS_OF_BOTH: dict[float, tuple[int, int]] = {1.5: (2, 1), **{bits: (bits, bits) for bits in BITS}}


def number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


@dataclass(frozen=True)
class LowBitOptions(DraftOptions):
    """Options of the low-bit tier and the tiers beside it.

    The default window is that of the SpeCache paper's baseline: as many 16-bit pairs as R and k together. R is at least
    1: tokens are selected while they are in the window, which does not contain the newest one yet.
    """

    has_low_bit_tier = True
    # Whether a Hadamard matrix rotates keys and values before quantisation, which spreads outlier channels, and scales
    # of 1- and 2-bit codes have 8 bits.
    rotates = False
    residual_length: int = whole(128, 1, "R: newest tokens to keep in 16 bits", metavar="R")
    sink_tokens: int = whole(
        0, 0,
        "S: first tokens of each row (without padding) to keep in 16 bits on the device; 0 to 64", most=64,
        metavar="S",
    )  # fmt: skip
    bits: int | float = choice(
        2, tuple(sorted(BITS_OF_BOTH)), "bits of the low-bit tier; 1.5: keys 2, values 1; 16: not quantised",
        type=number,
    )  # fmt: skip
    value_bits: int | None = None  # not an option: tests and kernel benchmarks set the bits of values separately
    center: str = choice(
        "never", ("never", "auto", "always"),
        "subtract the keys' mean before RoPE when quantising, and add its exact share to the logits. auto: if the "
        "model adds a bias to its keys",
        flag=False,
    )  # fmt: skip
    zero_point: str = choice(
        "midpoint", QUANTISERS,
        "levels of a group: minimum, from its minimum to its maximum (KIVI); midpoint, at 1 bit the middles of its "
        "halves (SpeCache), else as minimum; middles, the middles of equal parts at any bits", flag=False,
    )  # fmt: skip
    value_code: str = choice(
        "levels", ("levels", "trellis", "auto"),
        "code of the values: levels of a group's range, or a trellis of 1 bit with one scale for each value. auto: the "
        "trellis at 1 bit",
        flag=False,
    )  # fmt: skip
    key_code: str = choice(
        "levels", ("levels", "trellis", "auto"),
        "code of the keys: levels of a group's range, or a trellis of 1 bit with one scale for each key, after "
        "subtracting a group's mean before RoPE. auto: the trellis at 1 bit",
        flag=False,
    )  # fmt: skip
    group_size: int = choice(64, (32, 64, 128), "g: tokens (keys) or channels (values) that share a scale")

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        keys, values, _ = self.layout
        if self.sink_tokens > self.window:
            yield (
                f"sink_tokens={self.sink_tokens}: more than the window of {self.window} tokens (residual_length "
                f"{self.residual_length} + group_size {self.group_size}). Pass fewer"
            )
        for code, of, bits, least in (("value_code", "values", values, 1.5), ("key_code", "keys", keys, 1)):
            if getattr(self, code) == "trellis" and self.layout.is_quantised and bits != 1:
                yield f"{code}='trellis' requires {of} of 1 bit, not {bits}. Pass bits={least}, or {code}='levels'"

    @property
    def window(self) -> int:
        """W = R + g: most tokens of the recent tier."""
        return self.residual_length + self.group_size

    @property
    def layout(self) -> Layout:
        """The layout of a pair in the low-bit tier."""
        keys, values = BITS_OF_BOTH[self.bits]
        return Layout(keys, values if self.value_bits is None else self.value_bits, self.rotates)

    @property
    def has_trellis(self) -> bool:
        """Whether values are in the trellis code (`kernels/codes/trellis.py`)."""
        return self.value_code != "levels" and self.layout.value_bits == 1

    @property
    def has_key_trellis(self) -> bool:
        """Whether keys are in the trellis code."""
        return self.key_code != "levels" and self.layout.key_bits == 1

    def center_rows(self, layer: LayerShape) -> int:
        """Rows of the center of a layer's keys (`kernels/state/center.py`); 0 if they are not centered."""
        if not self.layout.is_quantised:
            return 0
        is_centered = self.center == "always" or (self.center == "auto" and layer.biased_keys)
        return center.ROWS if is_centered else center.STEPPED if self.has_key_trellis else 0

    def param_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of scales and zero points, for pairs of `dtype`."""
        eight = self.rotates and max(self.layout.key_bits, self.layout.value_bits) <= 2
        return EIGHT_BITS if eight else dtype

    @property
    def sinks(self) -> int:
        """S; 0 if nothing is quantised, since every token is exact then."""
        return self.sink_tokens if self.layout.is_quantised else 0

    def low_bit_length(self, length: int) -> int:
        """Tokens of `length` cached ones in the low-bit tier: whole groups, all but the newest R to R+g-1."""
        return self.group_size * max(0, (length - self.residual_length) // self.group_size)
