"""The low-bit tier and the recent window: all of KIVI's cache, and SpeCache's without the slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from specache_compile.errors import OptionError, no_host_tier
from specache_compile.kernels.codes.params import EIGHT_BITS
from specache_compile.kernels.codes.quantisers import QUANTISERS
from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.state import center
from specache_compile.kernels.state.by_token import tokens_of
from specache_compile.kernels.state.layout import Layout
from specache_compile.kernels.state.stored_pairs import decoded
from specache_compile.kernels.state.stored_tiers import EMPTY
from specache_compile.options import choice, number_or_auto, one_of, option, whole

from .drafting import DraftOptions
from .field import Cropped, Field, LayerShape, LayerState, always

BITS = (1, 2, 4, 8, 16)
# Bits of keys and of values, by `bits`. Keys select the pairs, and attention exponentiates their errors.
BITS_OF_BOTH: dict[float, tuple[int, int]] = {1.5: (2, 1), **{bits: (bits, bits) for bits in BITS}}
GROUP_SIZES = (32, 64, 128)


def check_min_context(name: str, value: Any) -> None:
    if value != "auto" and (type(value) is not int or value < 0):
        raise OptionError(f"option {name}={value!r}: accepted are a number of tokens, 0 or more, and 'auto'")


def check_weight(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise OptionError(f"option {name}={value!r}: accepted is a number from 0 to below 1, such as 1e-4")


def check_quantiser(name: str, value: Any) -> None:
    one_of(name, value, tuple(QUANTISERS))


# Units of a size.
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_of_memory(size: int | str) -> int:
    """Bytes of a size like "6 GiB", or of a number of bytes. ValueError if it is neither."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", str(size).strip())
    if found is None:
        raise ValueError(f"{size!r} is not a size")
    return int(float(found[1]) * UNITS[found[2] or ""])


def check_size(name: str, value: Any) -> None:
    try:
        fits = value is None or (type(value) in (int, str) and bytes_of_memory(value) > 0)
    except ValueError:
        fits = False
    if not fits:
        raise OptionError(f"option {name}={value!r}: accepted are a number of bytes, a size like '6 GiB', and None")


def bits_or_memory(given: Mapping[str, Any]) -> dict[str, Any]:
    """OptionError if both bits and memory are given. No defaults to override."""
    if given.get("memory") is not None and given.get("bits") is not None:
        raise OptionError("options memory and bits: pass one of them; memory selects the bits")
    return {}


def number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


@dataclass(frozen=True)
class LowBitOptions(DraftOptions):
    """Options of the methods with a low-bit tier.

    R is at least 1: tokens are selected while they are in the window, which does not contain the newest one yet.
    """

    bits: int | float = choice(
        2, tuple(sorted(BITS_OF_BOTH)), "bits of the low-bit tier; 1.5: keys 2, values 1; 16: not quantised",
        type=number,
    )  # fmt: skip
    value_bits: int | None = None  # not an option: tests and kernel benchmarks set the bits of values separately
    memory: int | str | None = option(
        None, check_size,
        "most bytes of the prompt's tiers on the device; selects the most bits that fit, instead of bits",
        type=str, metavar="SIZE",
    )  # fmt: skip
    rotate: bool = choice(
        False, (True, False),
        "rotate keys and values by a Hadamard matrix before quantising, which spreads outlier channels",
        flag=False,
    )  # fmt: skip
    center: str = choice(
        "never", ("never", "auto", "always"),
        "subtract the keys' mean before RoPE when quantising, and add its exact share to the logits. auto: if the "
        "model adds a bias to its keys",
        flag=False,
    )  # fmt: skip
    lookup: bool = choice(
        False, (True, False),
        "draft the tokens that followed an earlier occurrence of the last few tokens, and verify them in one decode "
        "over the tiers (not exact)",
    )  # fmt: skip
    group_size: int = choice(64, GROUP_SIZES, "g: tokens (keys) or channels (values) that share a scale")
    residual_length: int = whole(64, 1, "R: newest tokens to keep in 16 bits", metavar="R")
    sink_tokens: int = whole(
        0, 0,
        "S: first tokens of each row (without padding) to keep in 16 bits on the device; 0 to 64", most=64,
        metavar="S",
    )  # fmt: skip
    host_tier: bool = choice(
        True, (True, False),
        "also keep all pairs in host memory, for fetches, further turns, crops and drafts. False: nothing is fetched, "
        "and a cache grows only token by token, as in KIVI",
    )  # fmt: skip
    host_bits: int | str = choice(
        16, (16, 8, "auto"),
        "bits of the pairs in host memory: 16, or 8 with a scale for each key and value, which halves the memory and "
        "the copied bytes. auto: 8 in the setting best",
        type=number_or_auto,
    )  # fmt: skip
    zero_point: str = option(
        "midpoint", check_quantiser,
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
    param_bits: int | str = choice(
        16, (16, 8, "auto"),
        "bits of scales and zero points; 16: the model's dtype; 8 is coarse for channels whose keys are far from zero "
        "and close together. auto: 8 if keys and values have 1 or 2 bits",
        flag=False,
    )  # fmt: skip
    skip_below: float = option(
        0.0, check_weight,
        "skip the low-bit values of 64 tokens whose attention weights are all below this number, such as 1e-4. The "
        "weights left out sum to less than this number times the tokens. 0: skip nothing",
        type=float, metavar="WEIGHT",
    )  # fmt: skip
    min_context: int | str = option(
        "auto", check_min_context,
        "tokens below which a cache stays in 16 bits on the device; a longer one is compressed. auto: the measured or "
        'computed break-even of the GPU; 0 without one', type=number_or_auto, metavar="N",
    )  # fmt: skip

    @property
    def window(self) -> int:
        """W = R + g: most tokens of the recent tier."""
        return self.residual_length + self.group_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_code == "trellis" and self.layout.is_quantised and self.layout.value_bits != 1:
            raise OptionError(
                f"option value_code='trellis' requires values of 1 bit, and they have {self.layout.value_bits}. Pass "
                "bits=1.5, or value_code='levels'"
            )
        chosen = self.memory is None  # memory selects the bits later
        if self.key_code == "trellis" and chosen and self.layout.is_quantised and self.layout.key_bits != 1:
            raise OptionError(
                f"option key_code='trellis' requires keys of 1 bit, and they have {self.layout.key_bits}. Pass bits=1, "
                "or key_code='levels'"
            )
        if self.param_bits == 8 and 8 in (self.layout.key_bits, self.layout.value_bits):
            raise OptionError(
                "option param_bits=8 with codes of 8 bits: a scale with 3 bits of mantissa is too coarse for them. "
                "Pass param_bits=16"
            )
        if self.sink_tokens > self.window:
            raise OptionError(
                f"option sink_tokens={self.sink_tokens}: more than the window of {self.window} tokens (residual_length "
                f"{self.residual_length} + group_size {self.group_size}). Pass fewer"
            )
        if self.bits_on_host < 16 and self.drafts:
            raise OptionError(
                f"option host_bits={self.host_bits} with {self.drafting}: verification needs exact pairs. Pass "
                "host_bits=16"
            )
        if self.bits_on_host < 16 and not self.layout.is_quantised:
            raise OptionError(f"option host_bits={self.host_bits} with bits=16: pairs must be exact. Pass host_bits=16")
        if self.host_bits == 8 and not self.host_tier:
            raise OptionError("option host_bits=8 with host_tier=False: there is no host tier. Leave one of them out")
        if self.lookup and self.verify is not None:
            raise OptionError(f"option lookup with verify={self.verify!r}: pass only one of them")
        if not self.host_tier and self.drafts:
            raise OptionError(
                f"option host_tier=False with {self.drafting}: verifying and dropping drafts needs the host tier. Pass "
                "only one of them"
            )

    @property
    def bits_on_host(self) -> int:
        """host_bits; "auto" is 16, since this method fetches nothing."""
        return 16 if self.host_bits == "auto" else int(self.host_bits)

    @property
    def layout(self) -> Layout:
        """The layout of a pair in the low-bit tier."""
        keys, values = BITS_OF_BOTH[self.bits]
        return Layout(keys, values if self.value_bits is None else self.value_bits, self.rotate)

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
        few = max(self.layout.key_bits, self.layout.value_bits) <= 2
        eight = self.param_bits == 8 or (self.param_bits == "auto" and few)
        return EIGHT_BITS if eight and self.layout.is_quantised else dtype

    @property
    def sinks(self) -> int:
        """S; 0 if nothing is quantised, since every token is exact then."""
        return self.sink_tokens if self.layout.is_quantised else 0

    @property
    def in_16_bits(self) -> LowBitOptions:
        """The options below `min_context`: all pairs on the device in 16 bits.

        Only drafts of lookup are verified: the model's own drafts would be its exact tokens.
        """
        return replace(self, bits=16, value_bits=None, host_bits=16, verify=None)

    @property
    def drafting(self) -> str:
        """The option that requests drafts, for an error."""
        return "lookup=True" if self.lookup else f"verify={self.verify!r}"

    def with_bits(self, bits: int | float) -> LowBitOptions:
        """The options with so many bits for keys and values, and matching codes and parameters."""
        value_code = "auto" if self.value_code == "trellis" else self.value_code
        key_code = "auto" if self.key_code == "trellis" else self.key_code
        param_bits = "auto" if self.param_bits == 8 else self.param_bits
        return replace(
            self, bits=bits, value_bits=None, key_code=key_code, value_code=value_code, param_bits=param_bits,
            host_bits=16 if bits == 16 else self.host_bits,  # nothing on the device is rounded then
        )  # fmt: skip

    def low_bit_length(self, length: int) -> int:
        """Tokens of `length` cached ones in the low-bit tier: whole groups, all but the newest R to R+g-1."""
        return self.group_size * max(0, (length - self.residual_length) // self.group_size)


def check_head_dim(layout: Layout, head_dim: int) -> None:
    """OptionError if heads of this size cannot be stored in this layout."""
    if layout.is_rotated and head_dim % 2:
        raise OptionError(f"option rotate: head_dim {head_dim} is odd and cannot be rotated. Pass rotate=False")


def codes_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    check_head_dim(options.layout, layer.head_dim)
    return (batch, layer.heads, capacity, options.layout.width(layer.head_dim))


def codes_dtype(options: LowBitOptions, layer: LayerShape) -> torch.dtype:
    return torch.uint8 if options.layout.is_quantised else layer.dtype


def key_params_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """Scale and zero of each channel over a group of tokens; in the trellis code one scale for each key."""
    groups = capacity // options.group_size if options.layout.is_quantised else 0
    if options.has_key_trellis:
        return (batch, layer.heads, groups, 1, options.group_size)
    return (batch, layer.heads, groups, 2, stored_dim(layer.head_dim))


def value_params_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """Scale and zero of each token over a group of channels; in the trellis code one scale."""
    tokens = capacity if options.layout.is_quantised else 0
    if options.has_trellis:
        return (batch, layer.heads, tokens, 1, 1)
    channels = stored_dim(layer.head_dim)
    return (batch, layer.heads, tokens, 2, channels // min(channels, options.group_size))


def params_dtype(options: LowBitOptions, layer: LayerShape) -> torch.dtype:
    return options.param_dtype(layer.dtype)


def center_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """The keys' mean, and its rotation by RoPE (`kernels/state/center.py`)."""
    return (batch, layer.heads, options.center_rows(layer), layer.head_dim)


def sink_pairs_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, options.sinks, 2, layer.head_dim)


def sink_index_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, 1, options.sinks)


def recent_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """A ring buffer: token t is at t mod W."""
    return (batch, layer.heads, options.window, 2, layer.head_dim)


def refill_recent(state: LayerState, cropped: Cropped) -> None:
    """After a crop into the low-bit tier, fill the window with older tokens from the host tier.

    SpecacheError, before anything has changed, if there is no host tier.
    """
    if cropped.low_bit < cropped.low_bit_before:
        if "host" not in state:
            raise no_host_tier(f"a crop to {cropped.length:,} tokens, of which {cropped.low_bit_before:,} are rounded,")
        window_from_host(state, cropped.low_bit, min(cropped.length, cropped.low_bit_before))


def window_from_host(state: LayerState, low_bit: int, length: int) -> None:
    """Copy the tokens from `low_bit` to `length` from the host tier to the recent tier."""
    recent = state["recent"]
    places = torch.arange(low_bit, length, device=recent.device) % recent.shape[2]
    pairs = tokens_of(state["host"], low_bit, length).to(recent.device)
    recent[:, :, places] = decoded(pairs, recent.dtype, recent.shape[-1])


CODES = Field("codes", "low-bit", codes_shape, codes_dtype, by_page=True)
KEY_PARAMS = Field("key_params", "low-bit", key_params_shape, params_dtype, by_page=True)
VALUE_PARAMS = Field("value_params", "low-bit", value_params_shape, params_dtype, by_page=True)
CENTER = Field("center", "low-bit", center_shape, always(torch.float32))
# The sinks' pairs and token numbers (`kernels/state/sinks.py`).
SINK_PAIRS = Field("sink_pairs", "sinks", sink_pairs_shape)
SINK_INDEX = Field("sink_index", "sinks", sink_index_shape, always(torch.int32), empty=EMPTY)
RECENT = Field("recent", "recent", recent_shape, on_crop=refill_recent)
LOW_BIT = (CODES, KEY_PARAMS, VALUE_PARAMS, CENTER, SINK_PAIRS, SINK_INDEX)
# The operands of `append`, in order.
APPENDED = tuple(field.name for field in (RECENT, *LOW_BIT))
