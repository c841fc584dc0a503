"""The computed step against a step that was measured, and the simulation against sums by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

import specache_compile as sc
from conftest import llama_3_8b, tiny_llama
from specache_compile.explaining.times import op_launches
from specache_compile.explaining.times.devices import Device, find_device
from specache_compile.explaining.times.op_launches import COPY, MAIN, Kernel, LaunchedOp
from specache_compile.explaining.times.step_kernels import Traced, kernels_of
from specache_compile.explaining.times.step_time import (
    BETWEEN,
    break_even_context,
    computed,
    full_cache_batch,
    largest_batch,
    step_of,
)

# Llama-3-8B: its layers, and its bytes in 16 bits.
LAYERS, WEIGHTS = 32, 2 * 8_030_261_248
HOST = 100 * 2**30
# An H200 limited to 75 GiB took these milliseconds for a step of so many sequences of 32k tokens, with the kernels of
# before, whose instructions per number are FORMER (benchmarks/results/gpu_decode.json).
H200 = replace(find_device("H200"), vram_gib=75)
MEASURED, MEASURED_IN_16_BITS = {47: 31.7}, {12: 17.3}
FORMER = {"keys": {2: 3.36, "trellis": 3.4}, "values": {"trellis": 2.35}}
LEVELS = {"value_code": "levels"}
OPTIONS = {
    "k = 0": {"setting": "paper", "top_k": 0, "host_tier": False},
    "paper": {"setting": "paper"},
    "best": {"speculate": True, "host_bits": 16, **LEVELS},
    "one lane": {"host_bits": 16, **LEVELS},
    "default": {},
}
DEVICES = {
    name: replace(find_device(name), vram_gib=size * 1e9 / 2**30)
    for name, size in (("H100", 80), ("A100", 48), ("RTX 4090", 24))
}


@functools.cache
def explained(column: str) -> sc.Explanation:
    return sc.explain(llama_3_8b(3), 32_768, options=OPTIONS[column], device="H100")


def traced(column: str) -> Traced:
    """The column's graph, as if of all layers."""
    return replace(explained(column).traced(), weights=WEIGHTS, layers=LAYERS)


def one_lane() -> Traced:
    return replace(explained("paper").traced_one_lane, weights=WEIGHTS, layers=LAYERS)


def test_a_step_on_a_full_cache_is_the_measured_one() -> None:
    assert step_of(one_lane(), H200, 32_768, 12, full=2).seconds * 1e3 == pytest.approx(
        MEASURED_IN_16_BITS[12], rel=0.1
    )


def test_a_step_with_the_former_instructions_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its selection had two rounds over scores, which a launch wrote."""
    monkeypatch.setattr(op_launches, "INSTRUCTIONS", FORMER)

    def scored(call: LaunchedOp) -> list[Kernel]:
        return [op_launches.score(call, 1, 12 * call.heads * call.low), *op_launches.select(call)]

    monkeypatch.setattr(op_launches, "select_kept", scored)
    assert step_of(traced("default"), H200, 32_768, 47).seconds * 1e3 == pytest.approx(MEASURED[47], rel=0.1)


def test_the_goals_of_the_kernels() -> None:
    """47 sequences of 32k in 17 ms on an H200: in the same memory twice FP8's tokens per second, 3.97 times 16 bits'"""
    default = step_of(traced("default"), H200, 32_768, 47)
    assert default.seconds < 17e-3
    for size, times in ((1, 2.0), (2, 3.95)):
        most = full_cache_batch(one_lane(), H200, 32_768, size)
        assert 47 / default.seconds > times * most / step_of(one_lane(), H200, 32_768, most, size).seconds


def test_host_memory_sets_the_batch() -> None:
    """24 rows with 16 bits on the host fit in 100 GiB: 24 · 4 GiB of pairs, and their rounding up."""
    best, device = traced("best"), DEVICES["H100"]
    assert largest_batch(best, device, 32_768, HOST) == (24, "host")
    assert largest_batch(best, device, 32_768, 512 * 2**30)[1] == "device"
    assert largest_batch(traced("k = 0"), device, 32_768, 0)[1] == "device"


def test_the_launches_of_a_layer_are_those_that_the_kernels_make() -> None:
    """As tools/compile_kernels.py lists them, without the copies of a chunked prefill."""
    device = DEVICES["H100"]

    def own(column: str) -> list[str]:
        middle = [k for k in kernels_of(traced(column), device, 8_192, 1) if k.layer == "1"]
        return [k.name.split(".")[-1] for k in middle if k.op not in ("mm", "linear", "fused", "wait")]

    halves = ["prepare_query", "score_keys", "attend_pairs", "merge_splits"]
    stored = ["write_pairs", "store_groups", "write_pairs"]
    assert sorted(own("default")) == sorted(
        [*halves, "keep_best_of_logits", "fetch_missing", "hide_tokens", "sum_values", "attend_pairs", "merge_splits",
         *stored]
    )  # fmt: skip


def test_what_is_said_of_the_kernels_is_what_they_have() -> None:
    triton_select = pytest.importorskip(
        "specache_compile.kernels.movement.triton_select", reason="Triton is for Linux alone"
    )
    from specache_compile.kernels.movement import triton_copy

    assert (op_launches.TILE, op_launches.PROGRAMS) == (triton_select.TILE, triton_copy.PROGRAMS)


@pytest.mark.slow
def test_few_layers_stand_for_more_and_one_row_for_several() -> None:
    device = DEVICES["H100"]
    more = sc.explain(llama_3_8b(4), 32_768, 2, OPTIONS["paper"], device="H100").traced()
    few = replace(explained("paper").traced(), layers=4)
    for batch in (1, 7):
        ours, theirs = (step_of(one, device, 32_768, batch) for one in (few, more))
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-6)
        assert ours.bound == theirs.bound


def of_seconds(name: str, seconds: float, stream: str = "main", **rest: float | tuple[str, ...]) -> Kernel:
    """A launch that reads for so many seconds on `DEVICE`."""
    return Kernel(name, stream=stream, memory=seconds * 1e9, gap=0.0, **rest)  # type: ignore[arg-type]


# 1e9 bytes a second from memory and over the link.
DEVICE = Device("plain", 1, 1, 1, 1, 1, 1, 1, 1)


def seconds_of(*kernels: Kernel) -> float:
    return computed(kernels, DEVICE).seconds - BETWEEN


def test_launches_of_one_stream_follow_each_other() -> None:
    assert seconds_of(of_seconds("a", 1), replace(of_seconds("b", 2, tail=0.25), gap=0.5)) == pytest.approx(3.75)


def test_streams_share_what_both_need() -> None:
    """Two that read take turns; one that reads, and one that waits for the link, do not disturb each other."""
    assert seconds_of(of_seconds("a", 1), of_seconds("b", 2, COPY)) == pytest.approx(3)
    over_link = Kernel("b", stream=COPY, to_device=2e9, gap=0.0)
    assert seconds_of(of_seconds("a", 1), over_link) == pytest.approx(2)
    assert seconds_of(over_link, replace(over_link, name="c", stream=MAIN)) == pytest.approx(4)


def test_what_the_main_stream_waits_for_is_exposed() -> None:
    fetch = Kernel("f", stream=COPY, to_device=3e9, gap=0.0, waits=("a",))
    found = computed([of_seconds("a", 1), fetch, of_seconds("b", 1), of_seconds("c", 1, waits=("f",))], DEVICE)
    assert (found.seconds - BETWEEN, found.exposed) == pytest.approx((5, 2))
    assert found.bound == "memory"
    # Behind its last launch it waits for the copies' end.
    found = computed([of_seconds("a", 1), fetch], DEVICE)
    assert (found.seconds - BETWEEN, found.exposed) == pytest.approx((4, 3))
    assert found.bound == "PCIe"


def test_the_context_from_which_a_step_is_no_longer() -> None:
    best, plain, device = traced("best"), one_lane(), DEVICES["RTX 4090"]
    found = break_even_context(best, plain, device)
    for length, shorter in ((found, True), (found - 128, False)):
        ours, full = step_of(best, device, length, 1).seconds, step_of(plain, device, length, 1, full=2).seconds
        assert (ours <= full) == shorter
    assert break_even_context(best, plain, replace(device, pcie_gbps=0.1)) is None


def test_what_no_cuda_graph_holds_has_no_computed_step() -> None:
    explanation = sc.explain(tiny_llama(num_hidden_layers=1), 500, options={"method": "full"})
    assert explanation.spans == []
    assert "not computed, because a CUDA graph cannot hold" in str(explanation)
    with pytest.raises(sc.SpecacheError, match="method 'full': no time is computed"):
        explanation.step()


def test_a_step_over_the_fp8_cache_reads_each_pair_once() -> None:
    """It takes as long as the step computed for a full cache of 8 bits."""
    explanation = sc.explain(llama_3_8b(1), 32_768, options={"method": "fp8"}, device="H100")
    one = replace(explanation.traced(), weights=WEIGHTS, layers=LAYERS)
    kernels = kernels_of(one, DEVICES["H100"], 32_768, 4)
    attended = [kernel for kernel in kernels if kernel.op in ("fp8_attention", "keep_fp8")]
    assert [kernel.name.rsplit(".")[-1] for kernel in attended[:3]] == ["attend_rows", "merge_splits", "write_pairs"]
    assert len(attended) == 3 * LAYERS
    assert sum(kernel.memory for kernel in attended) == LAYERS * 4 * 8 * 32_768 * 2 * 128
    for batch in (1, 16):
        own, computed = (made.seconds for made in (
            step_of(one, DEVICES["H100"], 32_768, batch), step_of(one, DEVICES["H100"], 32_768, batch, full=1)
        ))  # fmt: skip
        assert own == pytest.approx(computed, rel=0.05)
