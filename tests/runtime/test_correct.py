"""Corrected selection: lane 0 attends to what its own low-bit logits select, whatever was prefetched.

The reference is an attention function for the uncompiled model. It has the whole cache, and computes the method from
its formulas in float64, without slots, speculative token or session.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import specache_compile as sc
from conftest import compile_copy, prompt, step, tiny_llama
from specache_compile.compat import cache_of
from specache_compile.kernels.codes import trellis
from specache_compile.kernels.codes.records import stored_dim, unpacked
from specache_compile.kernels.state.layout import Layout
from specache_compile.methods import parse_options
from specache_compile.methods.low_bit_tier import check_head_dim
from specache_compile.runtime.records import find_record

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

G, R, K = 32, 32, 8
# Tokens that a prompt of 120 brings into the low-bit tier.
FIRST = 64
# Its pairs are exact: the formulas round nothing but the low-bit tier.
SETTINGS = {"setting": "best", "group_size": G, "residual_length": R, "top_k": K, "host_bits": 16}


def hadamard(x: Tensor) -> Tensor:
    """x [..., d] times the orthonormal Hadamard matrix, entry by entry; d a power of two."""
    d = x.shape[-1]
    signs = [[1.0 - 2 * ((i & j).bit_count() % 2) for j in range(d)] for i in range(d)]
    return x @ torch.tensor(signs, dtype=x.dtype) / math.sqrt(d)


@dataclass(frozen=True)
class Codes:
    """How the low-bit tier stores rotated pairs: bits and code of keys and of values.

    At 2 bits the levels are the middles of equal parts, or the ends of a range. Values and keys may be in the trellis
    code. Scales and zero points have 8 bits.
    """

    key_bits: int = 2
    value_bits: int = 1
    middles: bool = True
    trellis: bool = True
    key_trellis: bool = False


def quantised(groups: Tensor, bits: int, dim: int, counted: Tensor, codes: Codes) -> Tensor:
    """Each group along `dim` at 2**bits levels.

    The levels are the middles of equal parts of the range of the counted tokens, as at 1 bit (section 3.4), or reach
    from its minimum to its maximum.
    """
    low = groups.masked_fill(~counted, math.inf).amin(dim, keepdim=True)
    high = groups.masked_fill(~counted, -math.inf).amax(dim, keepdim=True)
    scale, zero = (high - low) / (2**bits - 1), low
    if codes.middles or bits == 1:
        scale = (high - low) / 2**bits
        zero = low + scale / 2
    scale = in_8_bits(torch.maximum(scale, zero.abs() / 14))
    zero = (zero / scale * 8).round() / 8 * scale
    return ((groups - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def in_8_bits(scale: Tensor) -> Tensor:
    """Three bits of mantissa."""
    scale = scale.half().double()
    power = scale.log2().floor().exp2()
    return (scale / power * 8 + 0.5).floor() / 8 * power


def in_trellis(x: Tensor, values: bool) -> Tensor:
    """What the code makes of keys or values, which tests/kernels/test_trellis.py holds against its formula."""
    dim = stored_dim(x.shape[3])
    codes, scale = trellis.quantize(x, 0, dim, values)
    levels = trellis.levels_of_bits(unpacked(codes, 1), dim, values)[:, :, : x.shape[2], : x.shape[3]]
    return trellis.dequantize(levels, in_8_bits(scale))


def stepped(keys: Tensor, tokens: int, base: float) -> Tensor:
    """Of these first keys the mean before RoPE, and what RoPE makes of it over each group of so many tokens."""
    half = keys.shape[-1] // 2
    angles = torch.arange(max(keys.shape[2], tokens)).double()[:, None] * base ** -(torch.arange(half).double() / half)
    turns = torch.polar(torch.ones_like(angles), angles)
    mean = (torch.complex(*keys.chunk(2, -1)) / turns[: keys.shape[2]]).mean(2, keepdim=True)
    groups = (mean * turns[:tokens]).unflatten(2, (-1, G)).mean(3).repeat_interleave(G, 2)
    return torch.cat([groups.real, groups.imag], -1)


def simulated(codes: Codes, sinks: int = 0) -> Any:
    """An attention of transformers that is exact except for the last token, whose far pairs have low bits. Of those, k
    pairs with the highest scores and the first `sinks` are exact."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **rest: Any) -> Any:
        queries = q.shape[1] // k.shape[1]
        q, k, v = q.double().unflatten(1, (-1, queries)), k.double(), v.double()
        cached = k.shape[2] - q.shape[3]
        far = G * max(0, (cached - R) // G) if q.shape[3] == 1 else 0
        first = min(sinks, far)
        counted = (torch.arange(far) >= first).view(-1, G, 1)
        groups = hadamard(k[:, :, :far]).unflatten(2, (-1, G))
        center = stepped(k[:, :, :FIRST], far, module.config.rope_parameters["rope_theta"])
        low_k = (
            center + hadamard(in_trellis(hadamard(k[:, :, :far] - center), False)) if codes.key_trellis
            else hadamard(quantised(groups, codes.key_bits, 3, counted, codes).flatten(2, 3))
        )  # fmt: skip
        values = hadamard(v[:, :, :far])
        low_v = hadamard(
            in_trellis(values, True) if codes.trellis
            else quantised(values, codes.value_bits, 3, torch.tensor(True), codes)
        )  # fmt: skip
        keys, values = (
            torch.cat([exact[:, :, :first], low[:, :, first:], exact[:, :, far:]], 2)
            for exact, low in ((k, low_k), (v, low_v))
        )
        causal = torch.ones(q.shape[3], k.shape[2], dtype=torch.bool).tril(cached)

        def weights() -> Tensor:
            logits = q @ keys.unsqueeze(2).transpose(3, 4) * scaling
            return logits.masked_fill(~causal, -math.inf).softmax(-1)

        given = weights()[..., :far].sum((2, 3))
        given[..., :first] = -1.0
        chosen = given.topk(min(K, far), -1).indices.unsqueeze(-1).expand(-1, -1, -1, 16)
        keys.scatter_(2, chosen, k.gather(2, chosen))
        values.scatter_(2, chosen, v.gather(2, chosen))
        return (weights() @ values.unsqueeze(2)).flatten(1, 2).transpose(1, 2).float().contiguous(), None

    return attend


@contextmanager
def attending(model: LlamaForCausalLM, attention: Any) -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS.register("simulated", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "simulated"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def forced(model: LlamaForCausalLM, ids: Tensor, first: int) -> Tensor:
    """Logits of the tokens behind the first ones, given one at a time."""
    cache = cache_of(step(model, ids[:, :first]))
    return torch.cat([step(model, token, cache).logits for token in ids[:, first:].split(1, 1)], 1)


# Options, the formula's codes, and the number of sinks.
FORMULAS: dict[str, tuple[dict[str, Any], Codes, int]] = {
    "1 bit": ({"bits": 1}, Codes(key_bits=1, key_trellis=True), 4),
    "best": ({}, Codes(), 4),
    "sinks of two groups": ({"sink_tokens": 37}, Codes(), 37),
    "levels at the ends": (
        {"sink_tokens": 0, "zero_point": "midpoint", "value_code": "levels"},
        Codes(middles=False, trellis=False),
        0,
    ),
    "levels": ({"value_code": "levels"}, Codes(trellis=False), 4),
    "2 bits": ({"bits": 2}, Codes(value_bits=2, trellis=False), 4),
    "1 bit, keys in levels": ({"bits": 1, "key_code": "levels"}, Codes(key_bits=1), 4),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_each_steps_logits_are_the_formulas(llama: LlamaForCausalLM, name: str) -> None:
    (options, codes, sinks), ids = FORMULAS[name], prompt(170)
    with attending(llama, simulated(codes, sinks=sinks)):
        expected = forced(llama, ids, 120)
    twin = compile_copy(llama, **SETTINGS, **{"bits": 1.5, **options})
    torch.testing.assert_close(forced(twin, ids, 120), expected, rtol=1e-3, atol=1e-3)
    assert sc.stats(twin).pairs_corrected > 0


@pytest.mark.quick_for("eager")
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_the_speculative_token_changes_what_travels_when_and_no_logit(llama: LlamaForCausalLM, lowering: str) -> None:
    ids, made, stats = prompt(170), [], []
    for speculate in (True, False):
        twin = compile_copy(llama, **SETTINGS, lowering=lowering, speculate=speculate)
        made.append(forced(twin, ids, 120))
        stats.append(sc.stats(twin))
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
    assert stats[0].pairs_ahead != stats[1].pairs_ahead
    assert all(s.bytes_to_device == (s.pairs_ahead + s.pairs_corrected) * 2 * 16 * 4 for s in stats)


def test_a_right_speculative_token_leaves_nothing_to_correct() -> None:
    """In the first layer; in later ones the token's query has come through pairs that were chosen for another one."""
    model = tiny_llama()
    model.lm_head.weight.data.zero_()  # every argmax is token 0
    twin = compile_copy(model, **SETTINGS, speculate=True)
    cache = cache_of(step(twin, prompt(130)))
    for _ in range(20):
        step(twin, torch.zeros(1, 1, dtype=torch.int64), cache)
    assert int(find_record(twin).latest.corrected[0]) == 0
    assert sc.stats(twin).pairs_ahead > 100


def test_the_settings_are_what_they_are_called() -> None:
    paper, best = (parse_options({"setting": name}) for name in ("paper", "best"))
    assert (paper.bits, paper.rotates, paper.corrects) == (2, False, False)
    assert best == parse_options({})
    assert parse_options({"setting": "paper", "bits": 4}).bits == 4, "what is given goes before"


def test_a_head_dim_that_cannot_be_rotated_is_one_clear_line() -> None:
    with pytest.raises(sc.OptionError, match=r"head_dim 65 is odd and cannot be rotated\. Pass setting='paper'"):
        check_head_dim(Layout(8, 8, True), 65)
