"""Every method on a CUDA device against the same run on the CPU: logits of a prompt and of steps with given tokens."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import specache_compile as sc
from conftest import prompt, tiny_llama
from families import BY_NAME
from one_trace import compile_by_options
from specache_compile.compat import cache_of, with_cache
from specache_compile.compile import captured
from specache_compile.methods import every_method
from specache_compile.passes.absorb import absorb
from specache_compile.passes.reading.latents import Latents
from specache_compile.passes.reading.nodes import value_of

pytestmark = [pytest.mark.gpu, pytest.mark.one_process]

SMALL = {"lowering": "eager"}
GROUPS = {**SMALL, "min_context": 0, "group_size": 32, "residual_length": 32}
BUDGET = {**SMALL, "budget": 24}
# Each method, where it approximates; a recipe of specache for each of its ways to choose, fetch and correct.
SETTINGS: dict[str, dict[str, Any]] = {
    "full": SMALL, "fp8": SMALL, "offload": SMALL, "kivi": {**GROUPS, "bits": 2}, "kcache": {**SMALL, "top_n": 8},
    "snapkv": {**BUDGET, "window": 8}, "expected_attention": BUDGET, "kvzip": {**SMALL, "budget": 4096},
    **{policy: BUDGET for policy in ("random", "streaming_llm", "scissorhands", "h2o", "tova", "roco")},
    "specache": {**GROUPS, "top_k": 8},
    "specache, keys in a trellis": {**GROUPS, "top_k": 8, "bits": 1},
    "specache, in the paper": {**GROUPS, "top_k": 8, "setting": "paper"},
    "specache, one lane": {**GROUPS, "top_k": 8, "speculate": False},
    "pages": {**GROUPS, "top_k": 16, "method": "pages", "page_size": 4},
    "specache, 16 bits": {**GROUPS, "bits": 16, "top_k": 0},
    "specache, lossless": {**GROUPS, "bits": 1, "top_k": 1024},
    "specache, recorded": {**GROUPS, "top_k": 8, "mode": "reduce-overhead"},
    "fp8, recorded": {**SMALL, "mode": "reduce-overhead"},
}  # fmt: skip
QUICK = (
    "fp8-padded rows", "fp8, recorded-a row", "offload-a row", "kcache-a row", "h2o-padded rows", "specache-a row",
    "specache-padded rows", "specache, in the paper-a row", "specache, recorded-a row",
    "specache, keys in a trellis-a row", "kivi-a row",
)  # fmt: skip


def test_every_method_is_there() -> None:
    assert {name.split(",")[0] for name in SETTINGS} == set(every_method())


@functools.cache
def model_of(**changes: Any) -> Any:
    return tiny_llama(**changes)


@torch.no_grad()
def logits(model: Any, options: dict[str, Any], device: str, rows: int, length: int = 75, steps: int = 5) -> Tensor:
    """[steps + 1, rows, vocabulary] on the CPU; of more than one row the first are padded on the left."""
    compiled = copy.deepcopy(model).to(device)
    compile_by_options(compiled, options)
    ids, tokens = prompt(length, rows).to(device), prompt(steps, rows, seed=5).to(device)
    mask = torch.ones(rows, length + steps, dtype=torch.int64, device=device)
    for row in range(rows - 1):
        mask[row, : 20 + 9 * row] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    given = {} if rows == 1 else {"attention_mask": mask[:, :length]}
    out = compiled(ids, position_ids=places[:, :length], use_cache=True, **given)
    made = [out.logits[:, -1]]
    for step in range(steps):
        given = {} if rows == 1 else {"attention_mask": mask[:, : length + step + 1]}
        where = places[:, length + step, None]
        out = compiled(tokens[:, step, None], **with_cache(cache_of(out)), position_ids=where, use_cache=True, **given)
        made.append(out.logits[:, -1])
    if "mode" in options:  # a recorded step is one that replays
        assert (sc.stats(compiled).replays > 0) == (device == "cuda")
    return torch.stack([each.float().cpu() for each in made])


def check(model: Any, options: dict[str, Any], rows: int) -> None:
    ours, expected = (logits(model, options, device, rows) for device in ("cuda", "cpu"))
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.quick_for(*QUICK)
@pytest.mark.parametrize("rows", [1, 3], ids=["a row", "padded rows"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_method_is_on_cuda_what_it_is_on_the_cpu(name: str, rows: int) -> None:
    method = name.split(",")[0]
    if rows == 1 and method == "random":
        pytest.skip("what it keeps is drawn on the device: the generators are others")
    options = SETTINGS[name] if method == "specache" else {"method": method, **SETTINGS[name]}
    check(model_of(), options, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_as_far_from_float32_as_on_the_cpu(dtype: torch.dtype) -> None:
    """Rounding can change the selected pairs; if all pairs are fetched, it only changes logits."""
    options, model = SETTINGS["specache, lossless"], model_of(initializer_range=0.1)
    exact = logits(model, options, "cpu", 1)
    ours, theirs = (logits(copy.deepcopy(model).to(dtype), options, device, 1) for device in ("cuda", "cpu"))
    assert (ours - exact).abs().max() < 2 * (theirs - exact).abs().max()


def test_latent_attention_is_absorbed_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and steps of a padded batch; each device absorbs the projection in its decode graph."""
    devices = set()

    def noted(graph_module: GraphModule, latents: tuple[Latents, ...]) -> tuple[Node, ...]:
        made = absorb(graph_module, latents)
        devices.update(value_of(node).device.type for node in made)
        return made

    monkeypatch.setattr(captured, "absorb", noted)
    family = BY_NAME["deepseek_v3"].one_layer
    check(family.model(), SMALL, 3)
    assert devices == {"cpu", "cuda"}
