"""A batch never continues from a prefix that other weights, or other adapters, have computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import specache_compile as sc
from adapted import adapt
from conftest import eager, new_tokens, prompt, tiny_llama

pytestmark = pytest.mark.one_process

IDS = prompt(300, seed=9)[0]
# Tokens that a step reads; a prefix ends with a page of 256.
CHUNK = 128


@pytest.fixture(scope="module")
def model() -> Any:
    """With adapters on its keys and values; nothing that it computes is rounded."""
    return eager(adapt(tiny_llama(num_hidden_layers=1)), bits=16)


def generated(batch: sc.Batch) -> tuple[list[int], bool]:
    """The tokens of a request, and whether its first tokens came from a prefix."""
    request = batch.add(IDS, max_new_tokens=8)
    batch.step()
    from_prefix = request.prefilled > CHUNK
    batch.run()
    return request.generated, from_prefix


def uncompiled(model: Any) -> list[int]:
    plain = copy.deepcopy(model)
    plain._compiled_call_impl = None
    return new_tokens(plain, IDS[None], 8)


@torch.no_grad()
def test_no_write_to_the_weights_and_no_switch_of_adapters_leaves_a_prefix(model: Any) -> None:
    """All kinds of changes are in tests/test_model_key.py."""
    batch, before, layer = sc.Batch(model, chunk=CHUNK), uncompiled(model), model.model.layers[0]
    assert generated(batch) == (before, False)
    assert generated(batch) == (before, True)
    changes = (
        lambda: layer.mlp.up_proj.weight.data.neg_(),
        lambda: [projection.set_adapter("two") for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj)],
    )
    for change in changes:
        change()
        expected = uncompiled(model)
        assert expected != before
        assert generated(batch) == (expected, False)
        before = expected
    assert generated(batch) == (before, True)


@torch.no_grad()
@pytest.mark.parametrize("sessions", [0, 1])
def test_a_change_that_is_undone_while_a_request_runs_leaves_no_prefix(model: Any, sessions: int) -> None:
    """A write in the second chunk of a prompt, or another adapter in a decode step of a session."""
    projection = model.model.layers[0].self_attn.v_proj
    weight, (active,) = projection.base_layer.weight.data, projection._active_adapter
    other = {"one": "two", "two": "one"}[active]
    batch = sc.Batch(model, chunk=CHUNK, sessions=sessions)
    batch.add(IDS[:5], max_new_tokens=1)
    batch.run()
    request = batch.add(IDS, max_new_tokens=8)
    for _ in range(5 if sessions else 1):
        batch.step()
    assert len(request.generated) == (3 if sessions else 0)
    projection.set_adapter(other) if sessions else weight.mul_(2.0)
    batch.step()
    projection.set_adapter(active) if sessions else weight.mul_(0.5)
    batch.run()
    further = batch.add(torch.cat([request.ids[0] if sessions else IDS, IDS[:3]]), max_new_tokens=2)
    batch.run()
    assert further.reused == 0


@torch.no_grad()
def test_prefixes_are_forgotten_on_request_where_no_sample_shows_a_write(model: Any) -> None:
    """Rows of the embedding's table, but for the columns that are sampled; while a prompt is prefilled, too."""
    batch, table = sc.Batch(model, chunk=CHUNK), model.model.embed_tokens.weight.data
    before, _ = generated(batch)
    table[IDS, 1:31] += 3.0
    expected = uncompiled(model)
    assert expected != before
    assert generated(batch)[1], "no sample shows it"
    batch.forget_prefixes()
    assert generated(batch) == (expected, False)
    batch.forget_prefixes()
    running = batch.add(IDS, max_new_tokens=8)
    batch.step()
    table[IDS, 1:31] -= 6.0
    batch.forget_prefixes()
    batch.run()
    assert len(running.generated) == 8
    assert generated(batch) == (uncompiled(model), False)
