"""The low-bit tier and the recent window before it: what KIVI keeps, and SpeCache beside its slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from specache_compile.errors import OptionError, no_host_tier
from specache_compile.kernels.codes.params import EIGHT_BITS
from specache_compile.kernels.codes.quantisers import QUANTISERS
from specache_compile.kernels.codes.quantize import value_group
from specache_compile.kernels.state import center
from specache_compile.kernels.state.layout import Layout
from specache_compile.kernels.state.segments import tokens_of
from specache_compile.kernels.state.stored_pairs import decoded
from specache_compile.kernels.state.stored_tiers import EMPTY
from specache_compile.options import choice, number_or_auto, one_of, option, whole

from .drafting import DraftOptions
from .field import Cropped, Field, LayerShape, LayerState, always

BITS = (1, 2, 4, 8, 16)
# Of keys and values, by `bits`: keys decide which pairs are fetched, and an error of theirs is exponentiated.
BITS_OF_BOTH: dict[float, tuple[int, int]] = {1.5: (2, 1), **{bits: (bits, bits) for bits in BITS}}
GROUP_SIZES = (32, 64, 128)


def check_min_context(name: str, value: Any) -> None:
    if value != "auto" and (type(value) is not int or value < 0):
        raise OptionError(f"option {name}={value!r}: give a number of tokens, 0 or more, or 'auto'")


def check_quantiser(name: str, value: Any) -> None:
    one_of(name, value, tuple(QUANTISERS))


# What a size may end in.
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_of_memory(size: int | str) -> int:
    """6442450944 of "6 GiB"; a number is bytes already. ValueError where it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", str(size).strip())
    if found is None:
        raise ValueError(f"{size!r} is no size")
    return int(float(found[1]) * UNITS[found[2] or ""])


def check_size(name: str, value: Any) -> None:
    try:
        fits = value is None or (type(value) in (int, str) and bytes_of_memory(value) > 0)
    except ValueError:
        fits = False
    if not fits:
        raise OptionError(f"option {name}={value!r}: give a number of bytes, a size like '6 GiB', or None")


def bits_or_memory(given: Mapping[str, Any]) -> dict[str, Any]:
    """OptionError where bits are given beside the memory that is to choose them; there are no defaults to add."""
    if given.get("memory") is not None and given.get("bits") is not None:
        raise OptionError("options memory and bits: give one of them; memory selects the bits")
    return {}


def number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


@dataclass(frozen=True)
class LowBitOptions(DraftOptions):
    """Those of the methods with a low-bit tier; the defaults are SpeCache's.

    R is at least one: a token is selected for fetching while it is in the window, where the newest is not yet.
    """

    bits: int | float = choice(
        2, tuple(sorted(BITS_OF_BOTH)), "of the low-bit tier; 1.5: keys 2, values 1; 16 keeps it unquantised",
        type=number,
    )  # fmt: skip
    value_bits: int | None = None  # not an option: tests and kernel benchmarks set the bits of values apart
    memory: int | str | None = option(
        None, check_size,
        "bytes that the tiers on the device may have for the prompt: as many bits as fit, in place of bits",
        type=str, metavar="SIZE",
    )  # fmt: skip
    rotate: bool = choice(
        False, (True, False),
        "turn its keys and values by a Hadamard matrix before they are quantised, so that no channel sticks out",
        flag=False,
    )  # fmt: skip
    center: str = choice(
        "never", ("never", "auto", "always"),
        "take the mean that its keys have before RoPE off them before they are quantised, and add its exact share to "
        "the logits. auto: where the model adds a bias to its keys",
        flag=False,
    )  # fmt: skip
    lookup: bool = choice(
        False, (True, False),
        "draft what followed the last few tokens where they stood before, and let one decode of several tokens verify "
        "it; not exact: the tiers verify",
    )  # fmt: skip
    group_size: int = choice(64, GROUP_SIZES, "g: tokens (keys) or channels (values) that share a scale")
    residual_length: int = whole(64, 1, "R: newest tokens kept in 16 bits", metavar="R")
    sink_tokens: int = whole(
        0, 0,
        "S: the first tokens of each row, padding not counted, that stay in 16 bits on the device; 0 to 64", most=64,
        metavar="S",
    )  # fmt: skip
    host_tier: bool = choice(
        True, (True, False),
        "keep every pair in host memory too, for fetches, extends, crops and drafts. False: nothing is "
        "fetched, and a cache grows token by token alone, as KIVI's own",
    )  # fmt: skip
    host_bits: int | str = choice(
        16, (16, 8, "auto"),
        "of every pair in host memory: 16, or 8 with a scale for each key and value: half the memory, and half of what "
        "crosses the link. auto: 8 in the setting best",
        type=number_or_auto,
    )  # fmt: skip
    zero_point: str = option(
        "midpoint", check_quantiser,
        "where a group's levels lie: minimum, its ends among them (KIVI); midpoint, at 1 bit the middles of its halves "
        "(SpeCache), else as minimum; middles, those of equal parts at any bits", flag=False,
    )  # fmt: skip
    value_code: str = choice(
        "levels", ("levels", "trellis", "auto"),
        "how its values are coded: by levels of a group's range, or by a trellis of 1 bit, with one scale a value. "
        "auto: the trellis where they have 1 bit",
        flag=False,
    )  # fmt: skip
    key_code: str = choice(
        "levels", ("levels", "trellis", "auto"),
        "how its keys are coded: by levels of a group's range, or by a trellis of 1 bit, with one scale a key, behind "
        "what their mean before RoPE is over a group. auto: the trellis where they have 1 bit",
        flag=False,
    )  # fmt: skip
    param_bits: int | str = choice(
        16, (16, 8, "auto"),
        "of a scale or a zero point in it; 16: as many as the model's numbers have; 8 is coarse where a channel's keys "
        "lie far off zero and close together. auto: 8 where keys and values have 1 or 2",
        flag=False,
    )  # fmt: skip
    min_context: int | str = option(
        "auto", check_min_context,
        "tokens below which a cache stays in 16 bits on the device, unfetched; it moves over when it is longer. "
        'auto: the break-even of a GPU, measured or computed; 0 where there is none', type=number_or_auto, metavar="N",
    )  # fmt: skip

    @property
    def window(self) -> int:
        """W = R + g: the most tokens that the recent tier holds."""
        return self.residual_length + self.group_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_code == "trellis" and self.layout.is_quantised and self.layout.value_bits != 1:
            raise OptionError(
                f"option value_code='trellis': it is a code of 1 bit, and the values have {self.layout.value_bits}; "
                "take bits=1.5, or value_code='levels'"
            )
        chosen = self.memory is None  # by the bits that were asked for
        if self.key_code == "trellis" and chosen and self.layout.is_quantised and self.layout.key_bits != 1:
            raise OptionError(
                f"option key_code='trellis': it is a code of 1 bit, and the keys have {self.layout.key_bits}; take "
                "bits=1, or key_code='levels'"
            )
        if self.param_bits == 8 and 8 in (self.layout.key_bits, self.layout.value_bits):
            raise OptionError(
                "option param_bits=8 with codes of 8 bits: a scale of 3 bits of mantissa would cut their range by many "
                "steps; take param_bits=16"
            )
        if self.sink_tokens > self.window:
            raise OptionError(
                f"option sink_tokens={self.sink_tokens}: more than the window of {self.window} tokens (residual_length "
                f"{self.residual_length} + group_size {self.group_size}); take fewer"
            )
        if self.bits_on_host < 16 and self.drafts:
            raise OptionError(
                f"option host_bits={self.host_bits} with {self.drafting}: what verifies must be exact; take "
                "host_bits=16"
            )
        if self.bits_on_host < 16 and not self.layout.is_quantised:
            raise OptionError(f"option host_bits={self.host_bits} with bits=16: nothing may be lost; take host_bits=16")
        if self.host_bits == 8 and not self.host_tier:
            raise OptionError("option host_bits=8 with host_tier=False: there is no host tier to round; leave one out")
        if self.lookup and self.verify is not None:
            raise OptionError(f"option lookup with verify={self.verify!r}: one drafts at a time; take one of them")
        if not self.host_tier and self.drafts:
            raise OptionError(
                f"option host_tier=False with {self.drafting}: a draft is verified, and taken back, by pairs in "
                "host memory; take one of them"
            )

    @property
    def capacity_is_free(self) -> bool:
        """Without a host tier the number of groups, a part of the capacity, is a size too: torch asks more of that."""
        return self.host_tier

    @property
    def bits_on_host(self) -> int:
        """host_bits; for "auto" 16, since nothing is known to be fetched."""
        return 16 if self.host_bits == "auto" else int(self.host_bits)

    @property
    def layout(self) -> Layout:
        """How the low-bit tier stores a pair."""
        keys, values = BITS_OF_BOTH[self.bits]
        return Layout(keys, values if self.value_bits is None else self.value_bits, self.rotate)

    @property
    def has_trellis(self) -> bool:
        """Whether values are in the trellis code (`kernels/codes/trellis.py`)."""
        return self.value_code != "levels" and self.layout.value_bits == 1

    @property
    def has_key_trellis(self) -> bool:
        """Whether keys are in it."""
        return self.key_code != "levels" and self.layout.key_bits == 1

    def center_rows(self, layer: LayerShape) -> int:
        """Of the center of a layer's keys (`kernels/state/center.py`); 0: they have none."""
        if not self.layout.is_quantised:
            return 0
        asked = self.center == "always" or (self.center == "auto" and layer.biased_keys)
        return center.ROWS if asked else center.STEPPED if self.has_key_trellis else 0

    def param_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of scales and zero points, beside pairs of `dtype`."""
        few = max(self.layout.key_bits, self.layout.value_bits) <= 2
        eight = self.param_bits == 8 or (self.param_bits == "auto" and few)
        return EIGHT_BITS if eight and self.layout.is_quantised else dtype

    @property
    def sinks(self) -> int:
        """S; 0 where nothing is quantised, since every token is kept whole there."""
        return self.sink_tokens if self.layout.is_quantised else 0

    @property
    def in_16_bits(self) -> LowBitOptions:
        """The options below `min_context`: every pair on the device in 16 bits.

        Only what was looked up is then verified: drafts of the model's own would be its exact tokens.
        """
        return replace(self, bits=16, value_bits=None, host_bits=16, verify=None)

    @property
    def drafting(self) -> str:
        """The option that has drafts made, for an error."""
        return "lookup=True" if self.lookup else f"verify={self.verify!r}"

    def with_bits(self, bits: int | float) -> LowBitOptions:
        """The same with keys and values of so many bits, and such codes and parameters as go with them."""
        value_code = "auto" if self.value_code == "trellis" else self.value_code
        key_code = "auto" if self.key_code == "trellis" else self.key_code
        param_bits = "auto" if self.param_bits == 8 else self.param_bits
        return replace(
            self, bits=bits, value_bits=None, key_code=key_code, value_code=value_code, param_bits=param_bits,
            host_bits=16 if bits == 16 else self.host_bits,  # where nothing on the device is rounded
        )  # fmt: skip

    def low_bit_length(self, length: int) -> int:
        """Of `length` cached tokens, how many are in the low-bit tier: whole groups, all but the newest R..R+g-1."""
        return self.group_size * max(0, (length - self.residual_length) // self.group_size)


def check_head_dim(layout: Layout, head_dim: int) -> None:
    """OptionError where heads of this size cannot be stored so."""
    if layout.is_rotated and head_dim % 2:
        raise OptionError(f"option rotate: head_dim {head_dim} is odd, and no block of it can be rotated; rotate=False")
    fewest = min(layout.key_bits, layout.value_bits)
    if layout.is_quantised and head_dim * fewest % 8:
        raise OptionError(
            f"option bits: head_dim {head_dim} fills no whole bytes at {fewest} bit; take more bits, or 16"
        )


def codes_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    check_head_dim(options.layout, layer.head_dim)
    return (batch, layer.heads, capacity, sum(options.layout.widths(layer.head_dim)))


def codes_dtype(options: LowBitOptions, layer: LayerShape) -> torch.dtype:
    return torch.uint8 if options.layout.is_quantised else layer.dtype


def key_params_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """Scale and zero of each channel over a group of tokens; in the trellis code a scale of each key."""
    groups = capacity // options.group_size if options.layout.is_quantised else 0
    if options.has_key_trellis:
        return (batch, layer.heads, groups, 1, options.group_size)
    return (batch, layer.heads, groups, 2, layer.head_dim)


def value_params_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """Scale and zero of each token over a group of channels; in the trellis code a scale."""
    tokens = capacity if options.layout.is_quantised else 0
    if options.has_trellis:
        return (batch, layer.heads, tokens, 1, 1)
    return (batch, layer.heads, tokens, 2, layer.head_dim // value_group(layer.head_dim, options.group_size))


def params_dtype(options: LowBitOptions, layer: LayerShape) -> torch.dtype:
    return options.param_dtype(layer.dtype)


def center_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """The keys' mean, and how RoPE turns it (`kernels/state/center.py`)."""
    return (batch, layer.heads, options.center_rows(layer), layer.head_dim)


def sink_pairs_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, layer.heads, options.sinks, 2, layer.head_dim)


def sink_index_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    return (batch, 1, options.sinks)


def recent_shape(options: LowBitOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
    """A ring: token t at t mod W."""
    return (batch, layer.heads, options.window, 2, layer.head_dim)


def refill_recent(state: LayerState, cropped: Cropped) -> None:
    """After a crop into the low-bit tier: fill the window with older tokens, which the host tier has.

    SpecacheError, before anything has changed, where there is no host tier.
    """
    if cropped.low_bit < cropped.low_bit_before:
        if "host" not in state:
            raise no_host_tier(f"a crop to {cropped.length:,} tokens, of which {cropped.low_bit_before:,} are rounded,")
        window_from_host(state, cropped.low_bit, min(cropped.length, cropped.low_bit_before))


def window_from_host(state: LayerState, low_bit: int, length: int) -> None:
    """Put the tokens from `low_bit` to `length` into the recent tier, wherever the host tier has them."""
    recent = state["recent"]
    places = torch.arange(low_bit, length, device=recent.device) % recent.shape[2]
    pairs = tokens_of(state["host"], low_bit, length).to(recent.device)
    recent[:, :, places] = decoded(pairs, recent.dtype, recent.shape[-1])


CODES = Field("codes", "low-bit", codes_shape, codes_dtype, by_page=True)
KEY_PARAMS = Field("key_params", "low-bit", key_params_shape, params_dtype, by_page=True)
VALUE_PARAMS = Field("value_params", "low-bit", value_params_shape, params_dtype, by_page=True)
CENTER = Field("center", "low-bit", center_shape, always(torch.float32))
# The first tokens' pairs, and which tokens these are (`kernels/state/sinks.py`).
SINK_PAIRS = Field("sink_pairs", "sinks", sink_pairs_shape)
SINK_INDEX = Field("sink_index", "sinks", sink_index_shape, always(torch.int32), empty=EMPTY)
RECENT = Field("recent", "recent", recent_shape, on_crop=refill_recent)
LOW_BIT = (CODES, KEY_PARAMS, VALUE_PARAMS, CENTER, SINK_PAIRS, SINK_INDEX)
# The operands of `append`, in its order.
APPENDED = tuple(field.name for field in (RECENT, *LOW_BIT))
