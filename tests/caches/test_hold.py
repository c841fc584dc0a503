"""`hold`: the compiled model continues another model's cache as if it had prefilled the prompt itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import specache_compile as sc
from conftest import LOSSLESS, eager, greedy, left_padding, prompt, tiny_llama
from families import BY_NAME, Family
from held_tiers import in_rows
from specache_compile.compat import with_cache
from specache_compile.methods.field import MEASURE
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import fields_of

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

SETTINGS = {
    "best": {"group_size": 32, "residual_length": 32, "top_k": 8},
    "keys in a trellis": {"bits": 1, "group_size": 32, "residual_length": 32, "top_k": 8},
    "paper": {"setting": "paper", "bits": 2, "group_size": 32, "residual_length": 32, "top_k": 8},
    "16 bits first": {"min_context": 160, "group_size": 32, "residual_length": 32, "top_k": 8},
    "kivi": {"method": "kivi", "bits": 2, "group_size": 32, "residual_length": 32},
    "kcache": {"method": "kcache", "top_n": 8},
    "fp8": {"method": "fp8"},
    "offload": {"method": "offload"},
    "full": {"method": "full"},
}
PADDED = {"best, padded": SETTINGS["best"], "fp8, padded": SETTINGS["fp8"]}


@torch.inference_mode()
def filled(model: Any, ids: torch.Tensor, cache: Any = None, **more: Any) -> DynamicCache:
    """Return a cache with all of `ids`, by default one whose layers keep every token."""
    cache = DynamicCache() if cache is None else cache
    model(ids, **with_cache(cache), use_cache=True, **more)
    return cache


def tiers(cache: DynamicCache) -> list[dict[str, torch.Tensor]]:
    """Return each layer's fields, restricted to the cached tokens."""
    session = session_of(cache)
    session.tiers.drain()
    kept = [{f.name for f in fields_of(session.options, layer) if f.tier != MEASURE} for layer in session.layers]
    states = zip(kept, in_rows(session), strict=True)
    lengths = session.progress.lengths
    return [{name: cut(state[name], name, lengths) for name in names} for names, state in states]


def cut(tensor: torch.Tensor, name: str, lengths: Sequence[int]) -> torch.Tensor:
    """Cut off the unwritten memory of a whole cache after a row's tokens."""
    if name not in ("host", "full_cache"):
        return tensor
    whole = tensor[:, :, : max(lengths)].clone()
    for row, length in enumerate(lengths):
        whole[row, :, length:] = 0
    return whole


def masked(ids: torch.Tensor, hidden: int) -> dict[str, torch.Tensor]:
    """Return arguments that hide the first tokens of row 0."""
    mask = left_padding(ids, hidden, 0)
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}


@pytest.mark.quick_for("best", "16 bits first", "kivi", "offload", "best, padded", "fp8, padded")
@pytest.mark.parametrize("name", [*SETTINGS, *PADDED])
def test_a_held_cache_has_the_tiers_of_a_prefilled_prompt(name: str, llama: Any) -> None:
    """And continues with the same tokens."""
    ids, model = prompt(150, batch=2), eager(llama, **{**SETTINGS, **PADDED}[name])
    padding = masked(ids, 17) if name in PADDED else {}
    read = filled(model, ids, **padding)
    taken = sc.hold(filled(llama, ids, **padding), model, padding.get("attention_mask"))
    for ours, theirs in zip(tiers(taken), tiers(read), strict=True):
        assert ours.keys() == theirs.keys()
        for field in ours:
            assert torch.equal(ours[field], theirs[field]), field
    if name in SETTINGS:
        whole = torch.cat([ids, prompt(3, 2, seed=5)], 1)
        assert torch.equal(greedy(model, whole, **with_cache(taken)), greedy(model, whole, **with_cache(read)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, pytest.param("reduce-overhead", marks=pytest.mark.slow)])
def test_on_a_gpu_it_equals_a_prefilled_prompt(llama: Any, mode: str | None) -> None:
    plain = copy.deepcopy(llama).cuda()
    ids, options = prompt(150).cuda(), SETTINGS["best"]
    model = eager(plain, **options, **({"mode": mode} if mode else {}))
    read, taken = filled(model, ids), sc.hold(filled(plain, ids), model)
    assert torch.equal(tiers(taken)[1]["host"], tiers(read)[1]["host"])
    whole = torch.cat([ids, prompt(1, seed=5).cuda()], 1)
    assert torch.equal(greedy(model, whole, 8, **with_cache(taken)), greedy(model, whole, 8, **with_cache(read)))


def test_keys_with_a_bias_are_centered_as_a_prompts() -> None:
    plain = biased()
    ids, model = prompt(150), eager(plain, group_size=32, residual_length=32, top_k=8, bits=1)
    read, taken = filled(model, ids), sc.hold(filled(plain, ids), model)
    assert tiers(taken)[0]["center"].abs().max() > 0
    for field, tensor in tiers(read)[0].items():
        assert torch.equal(tiers(taken)[0][field], tensor), field


@pytest.mark.parametrize("options", [{"method": "fp8"}, {"center": "never", **SETTINGS["best"]}], ids=["fp8", "never"])
def test_a_bias_that_no_graph_finds_matters_to_no_method_that_does_not_center(options: dict[str, Any]) -> None:
    """A rotary table that depends on the length causes a graph break, after which keys and RoPE cannot be separated."""
    plain = biased(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    ids, model = prompt(100), eager(plain, **options)
    greedy(model, torch.cat([ids, prompt(1)], 1), 4, **with_cache(sc.hold(filled(plain, ids), model)))
    assert sc.stats(model).decodes > 0


def test_the_given_cache_is_unchanged_and_statistics_count_later_steps(llama: Any) -> None:
    """With a wrapped model, too."""
    ids, model = prompt(100), torch.compile(copy.deepcopy(llama), backend="specache", options=LOSSLESS)
    plain = filled(llama, ids)
    before = [layer.keys.clone() for layer in plain.layers]
    taken = sc.hold(plain, model)
    greedy(model, torch.cat([ids, prompt(1)], 1), 5, **with_cache(taken))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(plain.layers, before, strict=True))
    assert sc.stats(model).bytes_to_host > 0
    assert taken.get_seq_length() == 105


def test_layers_that_stay_exact_stay_plain(llama: Any) -> None:
    ids, model = prompt(100), eager(llama, **{**LOSSLESS, "exact_layers": (0,)})
    plain = filled(llama, ids)
    taken = sc.hold(plain, model)
    assert torch.equal(taken.layers[0].keys, plain.layers[0].keys)
    whole = torch.cat([ids, prompt(1)], 1)
    assert torch.equal(greedy(model, whole, **with_cache(taken)), greedy(llama, whole))


def biased(**more: Any) -> Any:
    return Family("biased", "Qwen2Config", {"num_hidden_layers": 1, **more}).model()


def test_unsupported_caches_are_refused_with_a_reason(llama: Any) -> None:
    ids, model = prompt(40), eager(llama, **LOSSLESS)
    with pytest.raises(sc.SpecacheError, match="hold: this model is not compiled with the backend"):
        sc.hold(filled(llama, ids), llama)
    with pytest.raises(sc.SpecacheError, match="holds this cache already"):
        sc.hold(filled(model, ids), model)
    with pytest.raises(sc.SpecacheError, match="it is empty"):
        sc.hold(DynamicCache(), model)
    cache = DynamicCache()
    cache.layers = [type("OtherLayer", (DynamicSlidingWindowLayer,), {})(sliding_window=32)]
    with pytest.raises(sc.SpecacheError, match="is a OtherLayer, not a DynamicLayer"):
        sc.hold(cache, model)
    with pytest.raises(sc.SpecacheError, match="layer 0 is empty"):
        sc.hold(DynamicCache(config=llama.config), model)
    with pytest.raises(sc.SpecacheError, match="'h2o' drops pairs during the prefill"):
        sc.hold(filled(llama, ids), eager(llama, method="h2o", budget=16))
    with pytest.raises(sc.SpecacheError, match="option exact_layers lists all layers"):
        sc.hold(filled(llama, ids), eager(llama, exact_layers=(0, 1)))
    with pytest.raises(sc.SpecacheError, match=r"attention_mask has shape \(1, 39\) for 1 rows of 40 tokens"):
        sc.hold(filled(llama, ids), model, torch.ones(1, 39))


def test_layers_of_unlike_shapes_are_refused(llama: Any) -> None:
    model, cache = eager(llama, **LOSSLESS), filled(llama, prompt(40))
    short = cache.layers[1]
    short.keys, short.values = short.keys[:, :, :-1], short.values[:, :, :-1]
    with pytest.raises(sc.SpecacheError, match="layer 1 has another number of rows or tokens than layer 0"):
        sc.hold(cache, model)
    cache.layers[0].values = cache.layers[0].values[..., :8]
    with pytest.raises(sc.SpecacheError, match="layer 0 has keys"):
        sc.hold(cache, model)


def test_another_models_cache_is_refused_by_the_first_step(llama: Any) -> None:
    ids, model = prompt(41), eager(llama, **LOSSLESS)
    for other, message in ((tiny_llama(num_hidden_layers=3), "the cache has 3 layers, this model has 2"),
                        (tiny_llama(num_key_value_heads=1), "1 KV heads of 16 channels")):  # fmt: skip
        taken = sc.hold(filled(other, ids[:, :-1]), model)
        with pytest.raises(sc.SpecacheError, match=message):
            greedy(model, ids, **with_cache(taken))


@pytest.mark.parametrize("options", [SETTINGS["best"], {"center": "always", **SETTINGS["keys in a trellis"]}])
def test_layers_that_keep_a_window_stay_plain(options: dict[str, Any]) -> None:
    """Tokens and logits are those after the compiled model's own prefill."""
    plain = BY_NAME["gemma3_text"].model()
    ids, model = prompt(150), eager(plain, **options)
    read = filled(model, ids, DynamicCache(config=plain.config))
    taken = sc.hold(filled(plain, ids, DynamicCache(config=plain.config)), model)
    assert type(taken.layers[0]) is DynamicSlidingWindowLayer
    assert torch.equal(taken.layers[0].keys, read.layers[0].keys)
    for field, tensor in tiers(read)[0].items():
        assert torch.equal(tiers(taken)[0][field], tensor), field
    whole = torch.cat([ids, prompt(3, seed=5)], 1)
    wanted = {"output_logits": True, "return_dict_in_generate": True}
    ours, theirs = (greedy(model, whole, 20, **with_cache(cache), **wanted) for cache in (taken, read))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(torch.cat(ours.logits), torch.cat(theirs.logits))
