"""A batch never continues from a prefix that other weights, or other adapters, have computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import specache_compile as sc
from adapted import Adapted, adapt
from conftest import LOSSLESS, prompt, tiny_llama

IDS = prompt(300, seed=9)[0]
# Tokens that a step reads; a prefix ends with a page of 256.
CHUNK = 128


def changed(model: Any, how: str) -> None:
    """Write other values to every weight of the decoder's layers."""
    for module in model.model.layers.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            new = weight.detach() + 0.05 * torch.randn_like(weight)
            if how == "data.copy_":
                weight.data.copy_(new)
            elif how == "data +=":
                weight.data += new - weight.data
            elif how == "data =":
                weight.data = new
            elif how == "numpy":
                weight.detach().numpy()[...] = new.numpy()
            elif how == "in place":
                weight.copy_(new)
            else:
                setattr(module, name, torch.nn.Parameter(new))


ADAPTERS: dict[str, Callable[[Adapted], object]] = {
    "another adapter": lambda layer: layer.set_adapter("two"),
    "a scaling": lambda layer: layer.scaling.update(two=9.0),
    "disabled adapters": lambda layer: setattr(layer, "_disable_adapters", True),
    "the first adapter again": lambda layer: (setattr(layer, "_disable_adapters", False), layer.set_adapter("one")),
}


def compiled(model: Any) -> tuple[Any, sc.Batch]:
    model.compile(backend="specache", options=LOSSLESS)
    return model, sc.Batch(model, chunk=CHUNK)


def generated(batch: sc.Batch) -> tuple[list[int], bool]:
    """The tokens of a request, and whether its first tokens came from a prefix."""
    request = batch.add(IDS, max_new_tokens=8)
    batch.step()
    from_prefix = request.read > CHUNK
    batch.run()
    return request.said, from_prefix


def uncompiled(model: Any) -> list[int]:
    plain = copy.deepcopy(model)
    plain._compiled_call_impl = None
    tokens: list[int] = plain.generate(IDS[None], max_new_tokens=8, do_sample=False)[0, len(IDS) :].tolist()
    return tokens


@torch.no_grad()
def test_no_write_to_the_weights_leaves_a_prefix() -> None:
    model, batch = compiled(tiny_llama())
    before = uncompiled(model)
    assert generated(batch) == (before, False)
    assert generated(batch) == (before, True)
    torch.manual_seed(0)
    for how in ("data.copy_", "data +=", "data =", "numpy", "in place", "a new parameter"):
        changed(model, how)
        expected = uncompiled(model)
        assert expected != before, how
        assert generated(batch) == (expected, False), how
        before = expected
    assert generated(batch) == (before, True)


@torch.no_grad()
def test_no_change_of_adapters_leaves_a_prefix() -> None:
    model, batch = compiled(adapt(tiny_llama()))
    before = uncompiled(model)
    assert generated(batch) == (before, False)
    assert generated(batch) == (before, True)
    for name, change in ADAPTERS.items():
        for layer in model.model.layers:
            change(layer.self_attn.k_proj)
            change(layer.self_attn.v_proj)
        expected = uncompiled(model)
        assert expected != before, name
        assert generated(batch) == (expected, False), name
        before = expected


@torch.no_grad()
def test_prefixes_are_forgotten_on_request_where_no_sample_shows_a_write() -> None:
    """One row of the embedding's table, but for the columns that are sampled; during another prompt's prefill, too."""
    model, batch = compiled(tiny_llama())
    before, _ = generated(batch)
    model.model.embed_tokens.weight.data[IDS[0], 1:31] += 3.0
    expected = uncompiled(model)
    assert expected != before
    batch.forget_prefixes()
    assert generated(batch) == (expected, False)
    batch.forget_prefixes()
    running = batch.add(IDS, max_new_tokens=8)
    batch.step()
    model.model.embed_tokens.weight.data[IDS[0], 1:31] -= 6.0
    batch.forget_prefixes()
    batch.run()
    assert len(running.said) == 8
    assert generated(batch) == (uncompiled(model), False)
