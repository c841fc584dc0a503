"""The bisector finds planted faults, in a kernel and in a pass, and nothing where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import specache_compile as sc
from conftest import prompt, tiny_llama
from specache_compile.compile import rewrites
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.passes.plan import PassReport, RewritePlan

LAYERS = 2
SETTINGS = {"setting": "paper", "bits": 1, "group_size": 32, "residual_length": 32}


@pytest.fixture
def model() -> Any:
    return tiny_llama(num_hidden_layers=LAYERS)


def test_a_sound_lossless_rewrite_moves_nothing(model: Any) -> None:
    result = sc.bisect(model, prompt(150, 2), SETTINGS)
    assert result.layer is None
    assert list(result.moved) == [tuple(range(LAYERS))]
    assert result.moved[tuple(range(LAYERS))] < 1e-3
    assert "no layer" in str(result)


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [1])
def test_a_fault_planted_in_a_pass_is_found(model: Any, monkeypatch: pytest.MonkeyPatch, faulty: int) -> None:
    """A pass that halves one layer's attention scale in decode, as a wrong constant would."""

    def rewrite_attention(graph_module: GraphModule, plan: RewritePlan) -> tuple[GraphModule, PassReport]:
        graph_module, report = real(graph_module, plan)
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.specache.decode_attention.default and belongs_to(node, faulty):
                *rest, scale, softcap = node.args
                node.args = (*rest, scale / 2, softcap)
        return graph_module, report

    real = next(p for p in rewrites.PIPELINE if p.__name__ == "rewrite_attention")
    changed = tuple(rewrite_attention if p is real else p for p in rewrites.PIPELINE)
    monkeypatch.setattr(rewrites, "PIPELINE", changed)
    result = sc.bisect(model, prompt(100), SETTINGS, new_tokens=2)
    assert result.layer == faulty
    assert result.step == 1  # the prompt itself is exact
    assert result.moved[(faulty,)] > result.tolerance
    assert f"layer {faulty} is the first" in str(result)
    if faulty:
        assert result.moved[tuple(range(faulty))] <= result.tolerance


def belongs_to(node: torch.fx.Node, layer: int) -> bool:
    """Whether the weights behind an op's query are that layer's."""
    todo, newest = [node.args[0]], -1
    seen = set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        parts = at.name.split("layers_modules_")
        if at.op == "placeholder" and len(parts) > 1:
            newest = max(newest, int(parts[1].split("_")[0]))
        todo.extend(at.all_input_nodes)
    return newest == layer


@pytest.mark.slow
def test_a_fault_planted_in_a_kernel_is_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that fills the slots overflows on large values, which one layer alone has."""
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight *= 100
        model.model.layers[1].self_attn.o_proj.weight /= 100
    real = tiers.refill

    def refill(selected: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, fetched: Tensor) -> None:
        real(selected, host, slots, slot_index, fetched)
        slots.clamp_(-60, 60)

    assert sc.bisect(model, prompt(150), SETTINGS, new_tokens=2).layer is None
    torch._dynamo.reset()
    monkeypatch.setattr(tiers, "refill", refill)
    assert sc.bisect(model, prompt(150), SETTINGS, new_tokens=2).layer == 1


@pytest.mark.slow
def test_lossy_options_name_the_first_layer_that_loses(model: Any) -> None:
    lossy = {**SETTINGS, "top_k": 0}
    assert sc.bisect(model, prompt(200), lossy, new_tokens=1).layer == 0
    assert sc.bisect(model, prompt(200), lossy, new_tokens=1, tolerance=1e6).layer is None


@pytest.mark.slow
def test_padding_and_a_compiled_model_are_accepted(model: Any) -> None:
    mask = torch.ones(2, 120, dtype=torch.int64)
    mask[1, :20] = 0
    model.compile(backend="specache", options={"lowering": "eager"})
    assert sc.bisect(model, {"input_ids": prompt(120, 2), "attention_mask": mask}, SETTINGS).layer is None
    assert model._compiled_call_impl is not None


def test_what_cannot_be_bisected_is_said(model: Any) -> None:
    with pytest.raises(sc.SpecacheError, match="chooses exact_layers itself"):
        sc.bisect(model, prompt(50), {"exact_layers": [1]})
    with pytest.raises(sc.SpecacheError, match="nothing of this model is rewritten"):
        sc.bisect(model, prompt(50), {"disable_passes": ["store"]})
