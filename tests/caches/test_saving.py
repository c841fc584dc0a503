"""Sessions on disk: bit-for-bit equality after loading, in another process too; and error messages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import LinearAttentionLayer

import specache_compile as sc
from adapted import adapt
from conftest import compile_copy, compiled_with, eager, failing, prompt, step, tiny_llama
from families import BY_NAME
from kept_traces import TESTS, in_new_process
from specache_compile.caches import saving
from specache_compile.compat import cache_of
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.session import session_of

pytestmark = [pytest.mark.one_process, pytest.mark.one_trace]

SETTINGS: dict[str, dict[str, Any]] = {
    "best": {"top_k": 16, "group_size": 32, "residual_length": 32},
    "keys in a trellis": {"bits": 1, "top_k": 16, "group_size": 32, "residual_length": 32},
    "two lanes": {"bits": 1, "top_k": 16, "group_size": 32, "residual_length": 32, "speculate": True},
    "still in 16 bits": {"bits": 1, "min_context": 4096},
    "eviction": {"method": "h2o", "budget": 0.5},
}


def go_on(model: Any, cache: DynamicCache, steps: int = 34) -> torch.Tensor:
    """Return logits of a chunk and of decode steps, enough steps for pairs to leave the window."""
    rows = next(layer.keys.shape[0] for layer in cache.layers)
    logits = [step(model, prompt(5, rows), cache).logits[:, -1]]
    for _ in range(steps):
        logits.append(step(model, logits[-1].argmax(-1, keepdim=True), cache).logits[:, -1])
    return torch.stack(logits)


@pytest.mark.quick_for("best", "keys in a trellis")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_loaded_session_continues_bit_for_bit(llama: LlamaForCausalLM, tmp_path: Path, name: str) -> None:
    """From the middle of a generation, with slots and a speculative token, or centered keys (those in a trellis); two
    rows; loaded under inference mode."""
    model = eager(llama, **SETTINGS[name])
    out = step(model, prompt(150, 2))
    for _ in range(3):
        out = step(model, out.logits[:, -1:].argmax(-1), cache_of(out))
    cache, token = cache_of(out), out.logits[:, -1:].argmax(-1)
    sc.save(cache, tmp_path / "session")
    with torch.inference_mode():
        again = sc.load(tmp_path / "session", model)
    counted = [state[n] for state in session_of(again).state for n in ("fetched", "corrected") if n in state]
    assert not any(map(torch.any, counted))
    assert torch.equal(step(model, token, again).logits, step(model, token, cache).logits)
    assert torch.equal(go_on(model, again), go_on(model, cache))


@pytest.mark.slow
@torch.no_grad()
def test_layers_that_stay_plain_are_saved_with_the_held_ones(tmp_path: Path) -> None:
    """gemma2: every other layer has a window, and keeps Hugging Face's form."""
    model = eager(BY_NAME["gemma2"].model(), bits=1)
    cache = DynamicCache(config=model.config)
    step(model, prompt(60), cache)
    sc.save(cache, tmp_path)
    again = sc.load(tmp_path, model)
    assert [type(layer) for layer in again.layers] == [type(layer) for layer in cache.layers]
    assert any(not isinstance(layer.keys, HeldTensor) for layer in again.layers)
    assert torch.equal(go_on(model, again, 8), go_on(model, cache, 8))


PROCESS = """
import sys, torch
sys.path[:0] = [{tests!r}]
import specache_compile as sc
from conftest import compiled_with, prompt, step, tiny_llama
torch.set_num_threads(1)
model = compiled_with(tiny_llama(), {options!r})
print(step(model, prompt(1), sc.load({folder!r}, model)).logits[0, -1].tolist())
"""


@pytest.mark.slow
def test_a_session_outlives_its_process(tmp_path: Path) -> None:
    options = {"bits": 1, "top_k": 16, "lowering": "eager"}
    model = compiled_with(tiny_llama(), options)
    cache = cache_of(step(model, prompt(150)))
    sc.save(cache, tmp_path)
    printed = in_new_process(PROCESS.format(tests=str(TESTS), options=options, folder=str(tmp_path)))
    assert step(model, prompt(1), cache).logits[0, -1].tolist() == json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name"), [(torch, "save"), (os, "replace")])
def test_an_interrupted_save_leaves_a_whole_session(
    compiled: LlamaForCausalLM, tmp_path: Path, owner: Any, name: str, when: str
) -> None:
    """The previous session remains until the header is replaced; the next save removes only leftovers of this one."""
    cache = cache_of(step(compiled, prompt(100)))
    sc.save(cache, tmp_path)
    (tmp_path / "layers-of-mine").mkdir()
    step(compiled, prompt(1), cache)
    interrupted = failing(getattr(owner, name), KeyboardInterrupt, after=when == "after")
    with patch.object(owner, name, interrupted), pytest.raises(KeyboardInterrupt):
        sc.save(cache, tmp_path)
    again = sc.load(tmp_path, compiled)
    assert again.get_seq_length() == (101 if (name, when) == ("replace", "after") else 100)
    sc.save(again, tmp_path)
    sc.load(tmp_path, compiled)
    assert len(list(tmp_path.glob("layers-*"))) == 2
    assert (tmp_path / "layers-of-mine").exists()


def test_memory_that_was_never_written_is_not_saved(compiled: LlamaForCausalLM, tmp_path: Path) -> None:
    cache = cache_of(step(compiled, prompt(100)))
    for state in session_of(cache).state:
        state["host"][:, :, 100:] = 7.0  # of one page
    sc.save(cache, tmp_path)
    for state in session_of(sc.load(tmp_path, compiled)).state:
        assert not state["host"][:, :, 100:].any()


@pytest.mark.parametrize("write", ["in place", "data"])
@torch.no_grad()
def test_a_session_is_saved_with_the_weights_that_filled_it(tmp_path: Path, write: str) -> None:
    """Not with the weights at the time of `save`, which did not fill the cache."""
    model = eager(tiny_llama(num_hidden_layers=1), bits=16)
    cache = cache_of(step(model, prompt(60)))
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.clone()
    weight.mul_(1.5) if write == "in place" else weight.data.mul_(1.5)
    sc.save(cache, tmp_path)
    with pytest.raises(sc.SpecacheError, match=r"another model: 1 of its \d+ weights differ"):
        sc.load(tmp_path, model)
    weight.copy_(before)
    assert sc.load(tmp_path, model).get_seq_length() == 60


@torch.no_grad()
def test_a_session_is_saved_with_the_adapter_that_filled_it(tmp_path: Path) -> None:
    model = eager(adapt(tiny_llama(num_hidden_layers=1)), bits=16)
    cache = cache_of(step(model, prompt(60)))
    layer = model.model.layers[0].self_attn.k_proj
    layer.set_adapter("two")
    layer.scaling["two"] = 9.0
    sc.save(cache, tmp_path)
    with pytest.raises(sc.SpecacheError, match="other settings of the model's modules: _active_adapter, scaling"):
        sc.load(tmp_path, model)
    layer.set_adapter("one")
    layer.scaling["two"] = 2.0
    sc.save(sc.load(tmp_path, model), tmp_path)
    layer._disable_adapters = True
    with pytest.raises(sc.SpecacheError, match="other settings of the model's modules: _disable_adapters"):
        sc.load(tmp_path, model)


@torch.no_grad()
def test_each_row_is_saved_with_the_weights_that_filled_it(tmp_path: Path) -> None:
    model = eager(tiny_llama(num_hidden_layers=1), bits=16)
    old = cache_of(step(model, prompt(60)))
    model.model.embed_tokens.weight.data.mul_(1.5)
    new = cache_of(step(model, prompt(60)))
    together = sc.join([old, new])
    sc.save(together, tmp_path)
    with pytest.raises(sc.SpecacheError, match="another model: 1 of"):
        sc.load(tmp_path, model)
    together.batch_select_indices(torch.tensor([1]))
    sc.save(together, tmp_path)
    assert sc.load(tmp_path, model).get_seq_length() == 60


class TestRefusals:
    @pytest.fixture
    def folder(self, compiled: LlamaForCausalLM, tmp_path: Path) -> Path:
        sc.save(cache_of(step(compiled, prompt(70))), tmp_path / "session")
        return tmp_path / "session"

    def test_a_folder_without_a_session(self, compiled: LlamaForCausalLM, tmp_path: Path) -> None:
        with pytest.raises(sc.SpecacheError, match="has no saved session"):
            sc.load(tmp_path / "nowhere", compiled)

    def test_a_header_whose_part_is_lost_or_changed(self, compiled: LlamaForCausalLM, folder: Path) -> None:
        header = torch.load(folder / "session.pt")
        lost = [{name: value for name, value in header.items() if name != part} for part in header if part != "format"]
        changed = [{**header, part: 7} for part in ("folder", "keys", "options", "progress", "shapes", "layers")]
        for damaged in (*lost, *changed):
            torch.save(damaged, folder / "session.pt")
            with pytest.raises(sc.SpecacheError, match=r"session\.pt of a saved session cannot be read: a part is"):
                sc.load(folder, compiled)

    @pytest.mark.parametrize("damage", [lambda file: os.truncate(file, file.stat().st_size - 10), Path.unlink])
    def test_a_file_that_is_cut_short_or_missing(self, compiled: LlamaForCausalLM, folder: Path, damage: Any) -> None:
        damage(next(folder.glob("layers-*/001.pt")))
        with pytest.raises(sc.SpecacheError, match=r"001\.pt of a saved session cannot be read"):
            sc.load(folder, compiled)

    @pytest.mark.parametrize("header", [b"", b"{", [], {"format": 5}])
    def test_a_header_that_cannot_be_read(self, compiled: LlamaForCausalLM, folder: Path, header: Any) -> None:
        file = folder / "session.pt"
        file.write_bytes(header) if isinstance(header, bytes) else torch.save(header, file)
        other = header == {"format": 5}
        why = r"it is of format 5, and this version reads format 6\. Prefill" if other else "it is damaged"
        with pytest.raises(sc.SpecacheError, match=rf"session\.pt of a saved session cannot be read: {why}"):
            sc.load(folder, compiled)

    def test_a_full_disk_and_a_file_in_place_of_a_folder(self, compiled: LlamaForCausalLM, folder: Path) -> None:
        with pytest.raises(sc.SpecacheError, match=r"save: /dev/full cannot be written \(.*\)\. Free disk space"):
            saving.write({"keys": torch.zeros(1 << 16)}, Path("/dev/full"))
        with pytest.raises(sc.SpecacheError, match=r"session\.pt/layers-.*/000\.pt cannot be written .* folder"):
            sc.save(sc.load(folder, compiled), folder / "session.pt")

    def test_a_method_that_is_not_installed(self, compiled: LlamaForCausalLM, folder: Path) -> None:
        header = torch.load(folder / "session.pt")
        header["options"][0]["method"] = "of a package that is gone"
        torch.save(header, folder / "session.pt")
        with pytest.raises(sc.SpecacheError, match="other options: method 'of a package that is gone'"):
            sc.load(folder, compiled)

    def test_layers_and_caches_with_more_than_is_known(self, compiled: LlamaForCausalLM, tmp_path: Path) -> None:
        """A model's own layer or cache class may have unknown state."""
        layer, cache_of_its_own = (type("Own", (kind,), {}) for kind in (LinearAttentionLayer, DynamicCache))
        cache = cache_of(step(compiled, prompt(70)))
        cache.layers.append(layer())
        with pytest.raises(
            sc.SpecacheError, match=r"layer 2 of this cache, a Own, has other contents than keys, values"
        ):
            sc.save(cache, tmp_path)
        assert sc.materialize(cache).get_seq_length() == 70
        cache.__class__ = cache_of_its_own
        with pytest.raises(sc.SpecacheError, match="is a Own, and only a DynamicCache"):
            sc.save(cache, tmp_path)

    def test_a_model_on_several_devices(self, folder: Path) -> None:
        other = compile_copy(tiny_llama())
        other.lm_head.to("meta")
        with pytest.raises(sc.SpecacheError, match=r"on several devices \(cpu, meta\)"):
            sc.load(folder, other)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (lambda llama: llama, "not compiled with the backend"),
            (lambda llama: compile_copy(tiny_llama(seed=1)), "made with another model"),
            (lambda llama: compile_copy(llama, bits=2), r"made with other options: bits 1 \(the model's: 2\)"),
            (lambda llama: compile_copy(llama, exact_layers=[0]), r"made with other options: exact_layers \(\)"),
            (lambda llama: compile_copy(llama, host_memory=10), r"host tier would need .* for 256 tokens"),
        ],
        ids=["uncompiled", "other weights", "other bits", "other layers", "over its budget"],
    )
    def test_a_model_that_does_not_fit(self, llama: LlamaForCausalLM, folder: Path, other: Any, message: str) -> None:
        with pytest.raises(sc.SpecacheError, match=message):
            sc.load(folder, other(llama))

    def test_a_plain_cache(self, llama: LlamaForCausalLM, tmp_path: Path) -> None:
        with pytest.raises(sc.SpecacheError, match="plain tensors already"):
            sc.save(cache_of(step(llama, prompt(10))), tmp_path)
