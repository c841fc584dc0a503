"""The center of the keys: its value, the accuracy of biased keys, and the equality of share and subtracted center."""

from __future__ import annotations

import torch
from torch import Tensor

from held_tiers import adjacent, cursor_over, empty_state
from specache_compile.kernels.attention.attention_ops import low_bit_rows
from specache_compile.kernels.state.center import centers, set_center, share_of_center
from specache_compile.kernels.state.layout import Layout, StoredTiers
from specache_compile.kernels.state.page_table import LOW_BIT_TIER, rows_read
from specache_compile.methods.field import LayerShape
from specache_compile.methods.kivi import KiviOptions

HEADS, DIM, GROUP = 2, 64, 32
FREQUENCIES = 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
BIAS = torch.randn(HEADS, 1, DIM, generator=torch.Generator().manual_seed(0)) * 300


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [..., n, d] to its positions, in float64: channels j and j + d/2 are a complex number."""
    pairs = torch.complex(*x.double().chunk(2, -1))
    angles = positions.double().unsqueeze(-1) * FREQUENCIES.double()
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def error_of(keys: Tensor, center: bool, padding: Tensor | None) -> Tensor:
    """Return the root mean square error [B] of 2-bit keys [B, H, n, d], over real tokens."""
    options = KiviOptions(bits=2, group_size=GROUP, residual_length=32, center="always" if center else "never")
    batch, _, tokens, _ = keys.shape
    state = empty_state(options, LayerShape(HEADS, DIM, torch.float32, torch.device("cpu")), batch, 512)
    low_bit, table = options.low_bit_length(tokens), adjacent(batch, 512)
    cursor = cursor_over(table, next_low_bit=low_bit)
    frequencies = FREQUENCIES if center else None
    arguments = (keys, keys, padding, cursor, *(state[name] for name in StoredTiers._fields))
    torch.ops.specache.append(*arguments, *options.layout, "midpoint", frequencies)
    state |= {name: rows_read(state[name], table) for name in LOW_BIT_TIER}
    tiers = StoredTiers(*(state[name] for name in StoredTiers._fields))
    stored = low_bit_rows(tiers, Layout(2, 2, False), DIM, low_bit, values=False)
    if center:
        stored = stored + centers(state["center"], GROUP, 0, low_bit // GROUP)
    seen = torch.ones(batch, 1, low_bit, 1) if padding is None else padding[..., :low_bit].mT.float()
    return ((stored - keys[:, :, :low_bit]).square() * seen).mean((1, 2, 3)).sqrt()


def test_biased_keys_are_quantised_as_well_as_others_wherever_a_row_begins() -> None:
    x = torch.randn(2, HEADS, 500, DIM, generator=torch.Generator().manual_seed(1))
    first = torch.tensor([0, 45]).view(2, 1, 1)  # the second row's first tokens are padding
    positions, padding = torch.arange(500) - first, (torch.arange(500) >= first).unsqueeze(1)
    free, biased = (rope(keys, positions).float() for keys in (x, x + BIAS))
    assert (error_of(biased, False, padding) > 20 * error_of(free, False, padding)).all()
    assert (error_of(biased, True, padding) < 1.1 * error_of(free, False, padding)).all()


def test_the_center_excludes_elements_that_are_not_finite() -> None:
    keys = rope(torch.zeros(1, HEADS, 96, DIM) + BIAS, torch.arange(96)).float()
    keys[0, 0, 5, 3], keys[0, 1, 7] = float("nan"), float("inf")
    center = torch.zeros(1, HEADS, 4, DIM)
    set_center(keys, None, FREQUENCIES, center, GROUP)
    torch.testing.assert_close(center[0, :, 0], BIAS[:, 0], atol=2e-3, rtol=1e-5)


def test_a_stepped_center_is_the_rotated_mean_averaged_over_a_group() -> None:
    """The mean is over the newest real keys. A group has one share."""
    keys = torch.randn(1, HEADS, 1088, DIM, generator=torch.Generator().manual_seed(3)) + 5
    center = torch.zeros(1, HEADS, 3, DIM)
    set_center(keys, None, FREQUENCIES, center, GROUP)
    mean = rope(keys[0, :, 64:], -torch.arange(64, 1088)).mean(1, keepdim=True)
    expected = rope(mean, torch.arange(4096)).unflatten(1, (-1, GROUP)).mean(2).repeat_interleave(GROUP, 1)[None]
    found = centers(center, GROUP, 0, 4096 // GROUP)
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=0)  # of 5: the angle's rounding in float32
    query = torch.randn(1, HEADS, 3, 2, DIM, generator=torch.Generator().manual_seed(2))
    shares = share_of_center(query, center, GROUP, 4096).repeat_interleave(GROUP, -1)
    torch.testing.assert_close(shares, query @ found.unsqueeze(2).mT, atol=1e-4, rtol=0)


def test_without_frequencies_a_stepped_center_is_the_mean_of_the_newest_tokens() -> None:
    keys = torch.randn(2, HEADS, 1100, DIM, generator=torch.Generator().manual_seed(3)) + 5
    keys[1, 0, 1000, 3] = float("nan")
    there = (torch.arange(1100) >= torch.tensor([0, 200]).view(2, 1, 1)).unsqueeze(-1)  # [B, 1, T, 1]
    center = torch.zeros(2, HEADS, 3, DIM)
    set_center(keys, there, None, center, GROUP)
    found = centers(center, GROUP, 0, 2)
    finite = torch.cat([keys[1, 0, 200:1000], keys[1, 0, 1001:]])
    means = keys[0, 0, 76:].mean(0), keys[0, 1, 76:].mean(0), finite.mean(0), keys[1, 1, 200:].mean(0)
    expected = torch.stack(means).view(2, HEADS, 1, DIM).expand(-1, -1, 2 * GROUP, -1)
    torch.testing.assert_close(found, expected)


def test_a_share_equals_the_subtracted_center_far_into_a_context() -> None:
    center = torch.zeros(1, HEADS, 4, DIM)
    keys = rope(BIAS.expand(HEADS, GROUP, DIM), torch.arange(GROUP)).float()[None]
    set_center(keys, None, FREQUENCIES, center, GROUP)
    query = torch.randn(1, HEADS, 3, 2, DIM, generator=torch.Generator().manual_seed(2))
    length = 4096
    waves = centers(center, GROUP, 0, length // GROUP)
    exact = rope(BIAS, torch.arange(length)).unsqueeze(0)
    torch.testing.assert_close(waves.double(), exact, atol=0.1, rtol=0)  # of 300: the angle's rounding in float32
    shares, expected = share_of_center(query, center, GROUP, length), query @ waves.unsqueeze(2).mT
    torch.testing.assert_close(shares, expected, atol=2e-2, rtol=0)  # of 10,000: its sums' order
