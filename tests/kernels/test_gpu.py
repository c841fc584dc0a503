"""The same guarantees on a CUDA device: `pytest -m gpu`.

On the simulated device (tests/device) kernels are interpreted, milliseconds for each program: everything there is in
smaller numbers, `as_many(on a real device, on the simulated one)`.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from transformers import LlamaForCausalLM

import conftest
import specache_compile as sc
from conftest import greedy, greedy_unmasked, prompt, tiny_llama
from held_tiers import cursor_over
from specache_compile.compat import cache_of, with_cache
from specache_compile.kernels.memory import host_memory
from specache_compile.kernels.movement import copy_stream, triton_copy
from specache_compile.kernels.state.layout import StoredTiers
from specache_compile.kernels.state.page_table import LOW_BIT_TIER
from specache_compile.lowering import cuda_graphs
from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.methods.specache import FIELDS

pytestmark = pytest.mark.gpu

T = TypeVar("T")
SIMULATED = "SIMULATED_DEVICE" in os.environ


def as_many(on_a_real_device: T, on_the_simulated: T) -> T:
    return on_the_simulated if SIMULATED else on_a_real_device


def unmarked(*cases: str) -> Callable[[T], T]:
    return lambda test: test


# Tests that take long on the simulated device are slow only there.
long_there = as_many(unmarked(), pytest.mark.slow)
quick_there = as_many(unmarked, pytest.mark.quick_for)

# Clock cycles, a tenth of a second: longer than the host takes to launch four steps.
PAUSE = 200_000_000

# k exceeds the number of tokens outside the window in all comparisons of tokens.
LOSSLESS = {**conftest.LOSSLESS, "top_k": as_many(1024, 128)}


def compiled_twin(model: LlamaForCausalLM, **options: Any) -> LlamaForCausalLM:
    return conftest.compiled_with(model, {**LOSSLESS, **options})


@quick_there("two lanes-eager")
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("speculate", [True, False], ids=["two lanes", "one lane"])
def test_greedy_tokens_equal_the_uncompiled_models(llama: LlamaForCausalLM, lowering: str, speculate: bool) -> None:
    model = llama.cuda()
    twin = compiled_twin(model, lowering=lowering, speculate=speculate)
    length, tokens = as_many((75, 120), (90, 8))  # a group leaves the window on the way
    ids = prompt(length, 2).cuda()
    assert torch.equal(greedy(twin, ids, tokens), greedy(model, ids, tokens))


@quick_there("reduce-overhead")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_turns_crops_and_forks(llama: LlamaForCausalLM, mode: str | None) -> None:
    """A captured step defers the last layer's fetch to the next replay, or to an earlier reader of the slots."""
    model = llama.cuda()
    twin = compiled_twin(model, mode=mode)
    steps = as_many(5, 3)

    def run(m: LlamaForCausalLM) -> torch.Tensor:
        with torch.no_grad():
            cache = cache_of(m(prompt(130).cuda(), use_cache=True))
            decode(m, cache, steps)
            fork = copy.deepcopy(cache)
            decode(m, cache, steps)
            m(prompt(20).cuda(), **with_cache(cache))
            decode(m, cache, steps)
            cache.crop(-30)
            decode(m, cache, steps)
            return torch.stack([m(prompt(1).cuda(), **with_cache(c)).logits for c in (cache, fork)])

    torch.testing.assert_close(run(twin), run(model), atol=1e-3, rtol=1e-3)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Within this context, any synchronisation of the host with the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def decode(model: LlamaForCausalLM, cache: Any, steps: int) -> None:
    """Decode steps that leave all their results on the device."""
    token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    places = torch.arange(cache.get_seq_length(), cache.get_seq_length() + steps, device="cuda").view(steps, 1, 1)
    for place in places:
        out = model(token, **with_cache(cache), position_ids=place, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)


@quick_there("eager")
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_captured_steps_make_the_uncompiled_models_tokens_across_buckets(
    llama: LlamaForCausalLM, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures, record = [], cuda_graphs.record
    monkeypatch.setattr(cuda_graphs, "record", lambda *given: captures.append(1) or record(*given))
    model = llama.cuda()
    twin = compiled_twin(model, top_k=as_many(1024, 256), lowering=lowering, mode="reduce-overhead")
    length, tokens, buckets = as_many((200, 320, [256, 512, 768]), (252, 8, [256, 512]))
    ids = prompt(length).cuda()
    assert torch.equal(greedy_unmasked(twin, ids, tokens), greedy_unmasked(model, ids, tokens))
    assert len(captures) == len(buckets)
    stats = sc.stats(twin)
    assert stats.replays == stats.decodes - len(buckets), "the first step of each bucket runs as it is"


def test_a_step_without_fetches_is_captured_too(llama: LlamaForCausalLM) -> None:
    model = llama.cuda()
    twin = copy.deepcopy(model)
    twin.compile(backend="specache", options={"bits": 16, "top_k": 0, "mode": "reduce-overhead", "min_context": 0})
    ids, tokens = prompt(100).cuda(), as_many(50, 8)
    assert torch.equal(greedy_unmasked(twin, ids, tokens), greedy_unmasked(model, ids, tokens))


@quick_there("reduce-overhead")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_steady_decode_step_never_stops_the_host(llama: LlamaForCausalLM, mode: str | None) -> None:
    twin = compiled_twin(llama.cuda(), lowering="inductor", mode=mode)
    with torch.no_grad():
        cache = cache_of(twin(prompt(100).cuda(), use_cache=True))
    decode(twin, cache, as_many(5, 3))
    with no_synchronisation():
        decode(twin, cache, as_many(20, 3))


in_time = pytest.mark.skipif(SIMULATED, reason="its work runs in schedules: tests/device/test_device_faults.py")


@pytest.fixture
def late_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay each gather by 50 ms on its stream."""
    gather = triton_copy.gather

    def late(*given: Any, **grid: int) -> None:
        torch.cuda._sleep(100_000_000)
        gather(*given, **grid)

    monkeypatch.setattr(triton_copy, "gather", late)


@in_time
@pytest.mark.usefixtures("late_gathers")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_late_copy_changes_no_token(llama: LlamaForCausalLM, mode: str | None) -> None:
    """A step without waits would read stale slots. A graph contains the delays, and ends after all fetches."""
    model = llama.cuda()
    twin = compiled_twin(model, mode=mode)
    ids = prompt(90, 2).cuda()
    assert torch.equal(greedy_unmasked(twin, ids, 30), greedy_unmasked(model, ids, 30))


@pytest.mark.skipif(SIMULATED, reason="the simulated device has no times: its profiler sees no kernel")
def test_a_trace_shows_copies_concurrent_with_compute() -> None:
    """Wide layers provide compute to overlap: a fetch runs while a kernel of another stream runs.

    The GPU pauses first: a host that launches more slowly than kernels run leaves gaps that a fetch fits in."""
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = tiny_llama(num_hidden_layers=4, **wide).cuda()
    model.compile(backend="specache", options={**LOSSLESS, "top_k": 64})
    with torch.no_grad():
        cache = cache_of(model(prompt(2000, 8).cuda(), use_cache=True))
        tokens = prompt(8, 8).cuda().split(1, 1)
        for token in tokens[:4]:
            model(token, **with_cache(cache))
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.cuda._sleep(PAUSE)
            for token in tokens[4:]:
                model(token, **with_cache(cache))
            torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    fetches = [e.time_range for e in kernels if "fetch_missing" in e.name]
    others = [e.time_range for e in kernels if "fetch_missing" not in e.name and "spin" not in e.name]
    assert fetches
    assert any(f.start < o.end and o.start < f.end for f in fetches for o in others)


@long_there
def test_peak_memory_of_a_cache_is_what_explain_predicted() -> None:
    model = tiny_llama(num_hidden_layers=as_many(8, 3)).cuda()
    length, batch = as_many((6000, 4), (1500, 1))
    with torch.no_grad():
        model(prompt(length, batch).cuda())  # cuBLAS takes its workspace, for good, at its first product
        model.compile(backend="specache", options=LOSSLESS)
        gc.collect()  # what is garbage by now must not be gone by the second count alone
        before = torch.cuda.memory_allocated()
        cache = cache_of(model(prompt(length, batch).cuda(), use_cache=True))
        copy_stream.release_staging()
        gc.collect()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
    predicted = sc.explain(model, length, batch, LOSSLESS).device_bytes
    # Tensors come in multiples of 512 bytes, which is little only of large ones.
    assert held == pytest.approx(predicted, rel=as_many(0.02, 0.03))
    del cache


@long_there
def test_a_hundred_generations_leak_nothing(llama: LlamaForCausalLM) -> None:
    twin = compiled_twin(llama.cuda(), mode="reduce-overhead")
    tokens = as_many(8, 3)

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    for _ in range(3):
        greedy_unmasked(twin, prompt(60).cuda(), tokens)
    before, idle = allocated(), host_memory._pool.idle_bytes()
    for _ in range(as_many(100, 6)):
        greedy_unmasked(twin, prompt(60).cuda(), tokens)
    assert allocated() - before < 1 << 16
    assert host_memory._pool.idle_bytes() == idle
    sc.release_host_memory()
    assert host_memory._pool.idle_bytes() == 0


@quick_there("240")
@pytest.mark.parametrize("tokens", [240, 4330])  # past a bucket of 256; past the room for 4,352 of one for 4,608
def test_a_tier_that_grows_stays_in_place_and_is_accessed_past_its_first_registration(
    llama: LlamaForCausalLM, tokens: int
) -> None:
    """16 bits are exact at any length; at one bit k would have to exceed the number of tokens."""
    model = llama.cuda()
    twin = compiled_twin(model, bits=16, top_k=64)
    ids = prompt(tokens).cuda()
    with torch.no_grad():
        cache = cache_of(twin(ids, use_cache=True))
        before = [layer["host"].data_ptr() for layer in cache.layers[0].keys.handle.session.state]
        more = prompt(100, seed=1).cuda()  # through staging, into both registrations
        whole = torch.cat([ids, more], 1)
        ours = twin(more, **with_cache(cache), use_cache=True).logits[:, -1:]
    torch.testing.assert_close(ours, model(whole).logits[:, -1:], atol=1e-3, rtol=1e-3)
    assert [layer["host"].data_ptr() for layer in cache.layers[0].keys.handle.session.state] == before
    following = torch.cat([whole, ours.argmax(-1)], 1)
    new = as_many(30, 3)
    assert torch.equal(greedy(twin, following, new, **with_cache(cache)), greedy(model, following, new))


@pytest.mark.skipif(SIMULATED, reason="9 GB of the host's memory, and a day of the interpreter's time")
def test_indices_above_two_to_the_31_elements() -> None:
    """The last of 16 rows attends to 70,000 tokens as it does alone; its pairs are at indices above 2^31."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = LayerShape(8, 128, torch.bfloat16, torch.device("cuda"))
    options = parse_options({"bits": 16, "top_k": 0})
    length, pages = 70_000, 274
    state = {
        field.name: torch.zeros(
            field.shape(options, shape, *((16 * pages, 256) if field.by_page else (16, 256 * pages))),
            dtype=field.dtype(options, shape), device="cuda",
        )
        for field in FIELDS
        if not field.on_host
    }  # fmt: skip
    assert state["codes"].numel() > 2**31
    state["codes"][-pages:].normal_(generator=generator)
    state["recent"][-1].normal_(generator=generator)
    low_bit = options.low_bit_length(length)
    cursor = cursor_over(torch.arange(16 * pages).view(16, -1), length, low_bit, low_bit).cuda()
    q, k, v = (torch.randn(16, h, 2, 128, device="cuda", generator=generator).bfloat16() for h in (32, 8, 8))

    def attend(rows: slice) -> torch.Tensor:
        tiers = [state[name] if name in LOW_BIT_TIER else state[name][rows] for name in StoredTiers._fields]
        slots = state["slots"][rows], state["slot_index"][rows]
        new, layout = (q[rows], k[rows], v[rows], None, None, cursor[rows]), [int(n) for n in options.layout]
        out, _ = torch.ops.specache.decode_attention(*new, *slots, tiers, layout, 0.088, None)
        return out[-1]

    torch.testing.assert_close(attend(slice(None)), attend(slice(15, None)), atol=1e-2, rtol=1e-2)
