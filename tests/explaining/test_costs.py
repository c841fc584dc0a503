"""Costs against the formulas of the papers, and against what really moved."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import compile_copy, llama_3_8b, prompt, step, tiny_llama
from specache_compile.compat import cache_of
from specache_compile.explaining.times.devices import DEVICES, find_device
from specache_compile.runtime.session import session_of

OPTIONS = {"setting": "paper", "bits": 2, "group_size": 32, "residual_length": 32, "top_k": 16}


CONFIG = llama_3_8b(2)


def total(e: sc.Explanation, resource: str, op: str = "") -> float:
    """The sum over a decode step's launches, or those of one op."""
    return sum(getattr(span.kernel, resource) for span in e.spans if op in ("", span.kernel.op))


def fetched(e: sc.Explanation) -> float:
    """Bytes of all selected pairs, with 16 bits on the host."""
    return sum(e.batch_size * 64 * layer.heads * 2 * layer.head_dim * layer.dtype.itemsize for layer in e.layers)


@pytest.fixture(scope="module")
def wide() -> sc.Explanation:
    """32k tokens, four rows."""
    return sc.explain(CONFIG, 32_768, 4, {"setting": "paper"}, device="H200", reuse=0.0)


def test_a_large_model_explains_from_its_config_without_weights(wide: sc.Explanation) -> None:
    """A group has 32 bits of parameters; k and R are 64; and up to an eighth of spare room in a bucket."""
    assert wide.full_cache_bytes == 4 * 32_768 * 2 * 8 * 128 * 2 * 2
    assert wide.kv_ratio == pytest.approx((2 + 32 / 64) / 16 + 128 / 32_768, rel=0.15)


def test_a_step_computes_two_lanes_of_every_weight(wide: sc.Explanation) -> None:
    assert total(wide, "flops", "mm") == pytest.approx(2 * 2 * 4 * (wide.weight_bytes / 2 - 128256 * 4096), rel=0.001)


def test_a_step_fetches_k_pairs_a_head_less_those_it_has(wide: sc.Explanation) -> None:
    assert total(wide, "to_device") == fetched(wide)
    reused = sc.explain(tiny_llama(), prompt_length=500, options={"setting": "paper"}, reuse=0.75)
    assert total(reused, "to_device") == fetched(reused) / 4


@pytest.mark.parametrize(
    "setting", [pytest.param(one, marks=[] if one == "paper" else pytest.mark.slow) for one in ("paper", "best")]
)
def test_a_step_reads_the_weights_and_the_tiers_once(setting: str) -> None:
    """The closed form of a decode step's device memory traffic: W + b·[n·kv·(B + 32/g)/16 + (R + k)·kv], and what it
    writes between its halves: a logit a query row and lane in 16 bits above a base, written once and read twice (once
    more by a selection of one lane), a score a head and lane, written once (and read once by a correction)."""
    kv, n, b = 4 * 2 * 8 * 128, 32_768, 4
    corrected = {"reuse": 0.0, "corrected": 0.25}
    e = sc.explain(CONFIG, n, b, {"setting": setting, "speculate": True}, device="H200", **corrected)
    low, bits = e.options.low_bit_length(n), {"paper": 2.0, "best": 1.5}[setting]
    window, logits, scores = {"paper": (1.0, 2.5, 1), "best": (1.5, 3.0, 2)}[setting]
    tiers = b * kv * (low * (bits + 32 / 64) / 16 + (n - low) * window + 64)
    between = 2 * b * low * (2 * logits * (2 + 4 / 16) * 32 + 4 * 8 * scores)
    matrices = e.weight_bytes - 128256 * 4096 * 2  # the embedding is read by the row
    assert total(e, "memory") == pytest.approx(matrices + tiers + between, rel=0.02)
    assert total(e, "to_device") == pytest.approx({"paper": fetched(e), "best": 1.25 * fetched(e) * 132 / 256}[setting])


@pytest.mark.slow
def test_the_counted_bytes_of_steps_without_reuse_are_the_predicted_ones(llama: LlamaForCausalLM) -> None:
    """With the slots emptied before each step nothing can be reused: what was counted is what was predicted, for any of
    them, since no group leaves the window meanwhile."""
    twin = compile_copy(llama, **OPTIONS)
    ids = prompt(300, 2)
    cache = cache_of(step(twin, ids))
    step(twin, ids[:, :1], cache)
    session = session_of(cache)
    explained = sc.explain(llama, prompt_length=302, batch_size=2, options=OPTIONS, reuse=0.0)
    for _ in range(4):
        session.tiers.drain()
        for layer in session.state:
            layer["slot_index"].fill_(-1)
        before = sc.stats(twin)
        step(twin, ids[:, :1], cache)
        after = sc.stats(twin)
        assert after.bytes_to_device - before.bytes_to_device == total(explained, "to_device") > 0
        assert after.bytes_to_host - before.bytes_to_host == total(explained, "to_host") > 0


@pytest.mark.parametrize("name", [*DEVICES, "rtx4090", "h100"])
def test_devices_are_found_by_name(name: str) -> None:
    assert find_device(name).hbm_gbps > 0


def test_an_unknown_device_is_named_with_those_that_are_known() -> None:
    with pytest.raises(sc.SpecacheError, match=r"unknown device 'TPU': known are A6000, .* pass a `Device`"):
        find_device("TPU")
