"""The recipes of CONTRIBUTING.md: each adds the thing in a few lines, and shows that it has an effect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import specache_compile as sc
from conftest import LOSSLESS, eager, greedy, prompt, step, tiny_llama
from graphs import decode_graph, text
from specache_compile.compat import cache_of
from specache_compile.evaluation.baselines.eviction import eviction
from specache_compile.evaluation.baselines.policies import POLICIES, History
from specache_compile.kernels import ops
from specache_compile.kernels.codes.quantize import QUANTISERS
from specache_compile.kernels.op import Op, register
from specache_compile.methods import METHODS, Method, specache
from specache_compile.methods.field import Cropped, Field, LayerShape, LayerState, always
from specache_compile.methods.offload import OffloadOptions
from specache_compile.methods.specache import SpecacheOptions
from specache_compile.options import whole
from specache_compile.passes.phase import Phase
from specache_compile.passes.pipeline import run_pipeline
from specache_compile.passes.recipe import OpCall, Recipe, named
from specache_compile.runtime.session import session_of


@pytest.fixture(scope="module", autouse=True)
def an_op() -> None:
    """An op is an entry: schema, code, shapes, and what the passes and explain should know of it."""

    def select_oldest(scores: Tensor, selected: Tensor) -> None:
        """The first k candidates."""
        order = (scores >= 0).to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : selected.shape[-1]]
        selected.fill_(-1)
        selected[..., : order.shape[-1]] = order.masked_fill(scores.gather(-1, order) < 0, -1)

    def count(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, counted: Tensor, each: int) -> None:
        counted += each * k.shape[2]

    register(
        Op(
            "select_oldest(Tensor scores, Tensor(a!) selected) -> ()", select_oldest, ops.fake_nothing, early=0,
        )
    )  # fmt: skip
    register(
        Op(
            "count(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) counted, int each) -> ()",
            count, ops.fake_nothing, early=4,
        )
    )  # fmt: skip


def state_after(method: str, **options: Any) -> list[LayerState]:
    """The state tensors of a cache of 100 tokens, and one step."""
    twin = eager(tiny_llama(), method=method, **options)
    cache = cache_of(step(twin, prompt(100)))
    step(twin, prompt(1), cache)
    return session_of(cache).state


def test_a_quantiser_is_a_function_from_a_groups_ends_to_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels at an eighth and seven eighths of a group's range."""

    def eighths(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        return (high - low) * 0.75, low + (high - low) / 8

    monkeypatch.setitem(QUANTISERS, "eighths", eighths)
    settings = {"setting": "paper", "bits": 1, "group_size": 32, "residual_length": 32}
    (ours, *_), (paper, *_) = (state_after("specache", **settings, zero_point=name) for name in ("eighths", "midpoint"))
    scale, zero = ours["key_params"][:, :, :2].unbind(3)
    paper_scale, paper_zero = paper["key_params"][:, :, :2].unbind(3)
    low, spread = paper_zero - paper_scale / 2, 2 * paper_scale
    torch.testing.assert_close(scale, 0.75 * spread)
    torch.testing.assert_close(zero, low + spread / 8)


def test_a_selector_is_an_op_that_a_recipe_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe(options: SpecacheOptions, site: int) -> Recipe:
        return replace(specache.recipe(options, site), selector=OpCall("select_oldest", named("selected")))

    monkeypatch.setitem(METHODS, "oldest", replace(specache.METHOD, name="oldest", recipe=recipe))
    settings = {
        "setting": "paper", "bits": 1, "group_size": 32, "residual_length": 32, "top_k": 8, "sink_tokens": 3,
    }  # fmt: skip
    for layer in state_after("oldest", **settings):
        assert layer["slot_index"].sort(-1).values.tolist() == [[list(range(3, 11))] * 2]
    explained = sc.explain(tiny_llama(), 300, 1, {"method": "oldest", **settings})
    assert any(span.kernel.op == "select_oldest" for span in explained.spans)
    ids = prompt(100)
    lossless = {name: value for name, value in LOSSLESS.items() if name != "lowering"}
    twin = eager(tiny_llama(), method="oldest", **lossless)
    assert torch.equal(greedy(twin, ids, 20), greedy(tiny_llama(), ids, 20))


def test_a_tiers_field_and_a_method_with_an_option_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading that counts the tokens that it has seen, each as often as an option requests; a crop counts too."""

    @dataclass(frozen=True)
    class CountingOptions(OffloadOptions):
        method: str = "counting"
        each: int = whole(1, 1, "what a token counts")

    def cropped(state: LayerState, crop: Cropped) -> None:
        state["counted"].fill_(crop.length)

    def shape(options: CountingOptions, layer: LayerShape, batch: int, capacity: int) -> tuple[int, ...]:
        return (1,)

    counted = Field("counted", "counts", shape, always(torch.int64), by_row=False, on_crop=cropped)
    offload = METHODS["offload"]

    def recipe(options: CountingOptions, site: int) -> Recipe:
        found = offload.recipe(options, site)
        return replace(found, stores=(*found.stores, OpCall("count", named("counted"), {"each": options.each})))

    monkeypatch.setitem(METHODS, "counting", Method("counting", CountingOptions, (*offload.fields, counted), recipe))
    assert [int(layer["counted"]) for layer in state_after("counting")] == [101, 101]
    assert [int(layer["counted"]) for layer in state_after("counting", each=3)] == [303, 303]
    assert sc.explain(tiny_llama(), 300, 1, {"method": "counting"}).bytes_by_tier["counts"] == 2 * 8
    with pytest.raises(sc.OptionError, match="each=0: accepted is an integer, 1 or more"):
        sc.explain(tiny_llama(), 300, 1, {"method": "counting", "each": 0})
    with pytest.raises(sc.OptionError, match="option each: method 'offload' accepts only"):
        sc.explain(tiny_llama(), 300, 1, {"method": "offload", "each": 1})
    twin = eager(tiny_llama(), method="counting")
    cache = cache_of(step(twin, prompt(100)))
    cache.crop(-40)
    step(twin, prompt(1), cache)
    assert [int(layer["counted"]) for layer in session_of(cache).state] == [61, 61]


def test_a_policy_is_a_function_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the even tokens."""

    def importance(history: History, budget: int, random: torch.Generator) -> Tensor:
        return (history.token % 2 == 0).float()

    monkeypatch.setitem(POLICIES, "even", importance)
    monkeypatch.setitem(METHODS, "even", eviction("even"))
    for layer in state_after("even", budget=20):
        assert layer["kept_token"].tolist() == [[[*range(62, 100, 2), 100]] * 2]


def test_a_phase_is_a_declaration_that_recipes_name() -> None:
    """A look at the next token that leaves no trace: one lane, nothing stored."""
    graph_module, plan = decode_graph()
    recipe = plan.recipe

    def with_peek(site: int) -> Recipe:
        found = recipe(site)
        return replace(found, attend={**found.attend, "peek": found.attend["decode"]})

    plan.phase, plan.recipe, plan.selects = Phase("peek", one_token=True, stores=False), with_peek, False
    rewritten, _ = run_pipeline(graph_module, plan)
    lines = text(rewritten)
    assert "decode_attention" in lines
    assert not any(op in lines for op in ("append", "offload", "prefetch"))
