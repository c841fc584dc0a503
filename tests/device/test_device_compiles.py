"""No kernel compiles, and no step is recorded again, during a generation: either takes seconds."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_run import set_schedule, undisturbed
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, greedy, prompt
from held_tiers import adjacent, cursor_over, empty_state
from specache_compile.compat import cache_of, with_cache
from specache_compile.compile import rewrites
from specache_compile.kernels.attention import triton_extend
from specache_compile.kernels.decode import triton_scored
from specache_compile.kernels.movement import triton_append, triton_copy, triton_select
from specache_compile.kernels.state.cursor import host_record
from specache_compile.kernels.state.layout import StoredTiers
from specache_compile.lowering import cuda_graphs
from specache_compile.methods.field import LayerShape
from specache_compile.methods.specache import SpecacheOptions
from specache_compile.runtime.state import bucket

pytestmark = pytest.mark.gpu

HEADS, QUERY_HEADS, D, LANES = 2, 4, 32, 2
CUDA = torch.device("cuda", 0)
# A kernel, with its declared constants, the operands that are None, and its warps.
Form = tuple[str, tuple[Any, ...]]


@pytest.fixture
def compiled_forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Form]]:
    """Collect the variants of this project's kernels that Triton compiles, or loads from its cache."""
    import triton

    forms: list[Form] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        names = [parameter.name for parameter in fn.jit_function.params if parameter.is_constexpr]
        constants = {fn.jit_function.arg_names[path[0]]: value for path, value in compile["constants"].items()}
        absent = tuple(name for name, value in constants.items() if value is None)
        forms.append((fn.name, (*(constants.get(name) for name in names), absent, compile["num_warps"])))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    # Variants that other tests have compiled would not be reported again.
    for module in [module for name, module in sys.modules.items() if name.startswith("specache_compile.kernels.")]:
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    return forms


def step(capacity: int, options: SpecacheOptions, length: int) -> None:
    """Launch a layer's decode step at batch 1 with a mask over all tokens, and a chunked prefill."""
    state = empty_state(options, LayerShape(HEADS, D, torch.float32, CUDA), 1, capacity)
    cursor = cursor_over(adjacent(1, capacity)).cuda()
    host_record(cursor).lengths = (length,)
    q = torch.randn(1, QUERY_HEADS, LANES, D, device=CUDA)
    k, v = torch.randn(2, 1, HEADS, LANES, D, device=CUDA)
    mask = torch.ones(1, 1, LANES, length + LANES + capacity // 256, dtype=torch.bool, device=CUDA)
    slots, tiers = (state["slots"], state["slot_index"]), [state[name] for name in StoredTiers._fields]
    read = tiers, options.layout, D**-0.5, None
    triton_append.append(k[:, :, :1], v[:, :, :1], None, cursor, *tiers, *options.layout, options.zero_point)
    triton_scored.decode_attention(q, k, v, mask, None, cursor, *slots, *read)
    logits, base, scores = triton_scored.score_low_bit(q, k, v, mask, None, cursor, *read)
    triton_scored.attend_scored(q, k, v, mask, None, cursor, logits, base, slots[1], *slots, *read)
    triton_select.select_topk(scores[0], state["selected"])
    moved = torch.zeros(1, dtype=torch.int64).cuda()
    triton_copy.gather(state["selected"].fill_(0), cursor, state["host"], *slots, moved)
    triton_copy.write_through(k, v, cursor, state["host"])
    triton_extend.extend_attention(q, k, v, mask[..., : length + LANES], None, cursor, state["host"], D**-0.5, None)


def test_a_kernel_is_compiled_once_however_large_a_cache_grows(compiled_forms: list[Form]) -> None:
    """1, 2, 4, 16, 28, 32 and 36 shares of the low-bit tier; lists of 1 to 3 tiles, and of 16."""
    options = SpecacheOptions(bits=2, group_size=64, residual_length=64, top_k=16)
    for number, capacity in enumerate((256, 512, 1024, 4096, 7168, 8192, 9216)):
        assert bucket(capacity) == capacity
        step(capacity, options, length=140 + 3 * number)  # lengths are in the cursor, and are no arguments of launches
    scores, selected = torch.zeros(1, HEADS, 65536, device=CUDA), torch.empty(1, HEADS, 16, dtype=torch.int32).cuda()
    triton_select.select_topk(scores, selected)
    again = [form for number, form in enumerate(compiled_forms) if form in compiled_forms[:number]]
    assert again == []
    kernels = Counter(name for name, _ in compiled_forms)
    assert (kernels["score_keys"], kernels["sum_values"]) == (1, 1)
    assert kernels["attend_pairs"] == 3  # in one kernel, for the scores alone, and from the scores


@pytest.mark.quick_for("mask")
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "mask"])
def test_a_generation_compiles_in_the_first_steps_of_its_buckets_alone(
    llama: LlamaForCausalLM, compiled_forms: list[Form], masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 253 to 262 tokens: the first bucket ends at 256."""
    llama.cuda().compile(backend="specache", options={**LOSSLESS, "top_k": 16, "group_size": 64})
    monkeypatch.setattr(rewrites, "observers", [lambda made, variant: compiled_forms.append((made.name, ()))])
    ids, cache, lengths = prompt(253).cuda(), None, []
    for length in range(253, 262):
        before = len(compiled_forms)
        given = {"attention_mask": torch.ones(1, length, dtype=torch.int64, device=CUDA)} if masked else {}
        with torch.no_grad():
            out = llama(ids, **with_cache(cache), use_cache=True, **given)
        ids, cache = out.logits[:, -1:].argmax(-1), cache_of(out)
        if len(compiled_forms) > before:
            lengths.append(length)
    assert lengths == [253, 254, 257]


# Prompt tokens, generated tokens, and steps until the next request: between zero and three rows.
COME_AND_GO = [(90, 9, 4), (9, 6, 3), (5, 4, 4)]


def come_and_go(batch: sc.Batch) -> list[list[int]]:
    """Return the tokens of each request."""
    requests = []
    for length, tokens, steps in COME_AND_GO:
        requests.append(batch.add(prompt(length, seed=length), max_new_tokens=tokens))
        for _ in range(steps):
            batch.step()
    batch.run()
    return [request.generated for request in requests]


def test_rows_that_join_and_leave_are_recorded_once_per_power_of_two_on_a_device(
    llama: LlamaForCausalLM, compiled_forms: list[Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request equals the uncompiled model's tokens, across a step in which only one row quantises a group."""
    captured, capture = list[int](), cuda_graphs.capture
    monkeypatch.setattr(cuda_graphs, "capture", lambda *given: captured.append(len(compiled_forms)) or capture(*given))
    monkeypatch.setattr(rewrites, "observers", [lambda made, variant: compiled_forms.append((made.name, ()))])
    alone = [
        greedy(llama, prompt(length, seed=length), tokens)[0, length:].tolist() for length, tokens, _ in COME_AND_GO
    ]
    model, options = copy.deepcopy(llama).cuda(), {**LOSSLESS, "top_k": 128, "min_context": 0}
    model.compile(backend="specache", options={**options, "mode": "reduce-overhead"})
    batch = sc.Batch(model, rows=4, chunk=48)
    with undisturbed():
        set_schedule("random:7")
        assert come_and_go(batch) == alone
        assert len(captured) == len([1, 2, 4])
        known = len(compiled_forms)
        assert come_and_go(batch) == alone
    assert len(captured) == 3
    assert len(compiled_forms) == known
