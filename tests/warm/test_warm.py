"""A process that follows another takes what that one kept, if and only if it would have compiled the same."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import random
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.utils import output_capturing

import specache_compile as sc
from conftest import LOSSLESS
from specache_compile.warm import environment, route, store


class Traces:
    """How often Dynamo traced since the newest process began. `next_process()` begins one: it has the files alone."""

    def __init__(self) -> None:
        self.count = 0

    def next_process(self) -> None:
        torch._dynamo.reset()
        route._in_force.clear()
        store._told.clear()
        gc.collect()  # what Dynamo has put into modules goes with the code that it is for
        self.count = 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where forms are kept."""
    where = tmp_path / "store"
    monkeypatch.setenv(store.VARIABLE, str(where))
    return where


@pytest.fixture
def traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    with counted(monkeypatch) as traces:
        yield traces


@pytest.fixture(autouse=True)
def one_family() -> Iterator[None]:
    """Dynamo guards on transformers' registry of the model classes that a process has made."""
    before = dict(output_capturing._CAN_RECORD_REGISTRY)
    yield
    output_capturing._CAN_RECORD_REGISTRY.clear()
    output_capturing._CAN_RECORD_REGISTRY.update(before)


@contextlib.contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Traces]:
    traces = Traces()
    compile_frame: Callable[..., Any] = convert_frame._compile

    def counting(*args: Any, **kwargs: Any) -> Any:
        traces.count += 1
        return compile_frame(*args, **kwargs)

    patch.setattr(convert_frame, "_compile", counting)
    traces.next_process()
    yield traces
    traces.next_process()


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
PROMPT, LATER, STEPS = 90, 20, 2
# The cheapest to trace: what is told apart is no method's.
FULL = {"method": "full", "lowering": "eager"}


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def logits(call: Callable[..., Any], rows: int = 1) -> Tensor:
    """Of a prefill, decode steps and an extend: one graph each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SIZES["vocab_size"], (rows, PROMPT + STEPS + LATER), generator=generator)
    cache, found, start = DynamicCache(), [], 0
    for size in (PROMPT, *[1] * STEPS, LATER):
        ids, places = tokens[:, start : start + size], torch.arange(start, start + size).expand(rows, -1)
        with torch.no_grad():
            found.append(call(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True).logits)
        start += size
    return torch.cat(found, 1)


def run(model: Any, traces: Traces, rows: int = 1, options: Any = FULL) -> int:
    """Traces of a process that runs a model, whose logits must be the uncompiled model's."""
    traces.next_process()
    compiled = torch.compile(model, backend="specache", options=options)
    torch.testing.assert_close(logits(compiled, rows), logits(model, rows), atol=2e-5, rtol=2e-5)
    return int(traces.count)


@pytest.mark.parametrize("options", [LOSSLESS, {**LOSSLESS, "lowering": "inductor"}], ids=["eager", "inductor"])
@pytest.mark.quick_for("eager")
def test_the_next_process_traces_nothing_and_says_the_same(traces: Traces, options: dict[str, Any]) -> None:
    model = llama(num_hidden_layers=5)  # enough for Inductor to compile one of them for all
    assert run(model, traces, options=options) == 3
    assert run(model, traces, options=options) == 0
    assert sc.stats(model).decodes == STEPS


def test_other_weights_of_the_same_shapes_are_used(kept: Traces) -> None:
    other = llama()
    for weight in other.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    assert run(other, kept) == 0


@contextlib.contextmanager
def attribute(where: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def doubled_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotate = modeling_llama.rotate_half
    return q * cos + 2 * rotate(q) * sin, k * cos + 2 * rotate(k) * sin


def halved_mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) / 2


def biased_linear(self: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, self.weight, self.bias) + 0.01


def scaled_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
    given["scaling"] = 0.3
    return modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa_before"](module, query, key, value, mask, **given)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Another function under the name of the model's attention."""
    mapping = AttentionInterface._global_mapping
    before = mapping["sdpa"]
    mapping["sdpa_before"], mapping["sdpa"] = before, scaled_attention
    try:
        yield
    finally:
        mapping["sdpa"] = before
        del mapping["sdpa_before"]


def with_adapter(model: Any) -> Any:
    """A LoRA, as a library puts it in: a module of its own in the place of a linear layer."""
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_hook(model: Any) -> Any:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, made: made * 1.5)
    return model


def with_own_forward(model: Any) -> Any:
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(halved_mlp, mlp)
    return model


CHANGED: dict[str, Callable[[], Any]] = {
    "another dtype": lambda: llama().double(),
    "another attention implementation": lambda: llama(attn_implementation="eager"),
    "another constant of the config": lambda: llama(rms_norm_eps=1e-2),
    "other heads": lambda: llama(num_key_value_heads=2),
    "another activation": lambda: llama(hidden_act="gelu"),
    "another class of the same shapes": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval(),
    "an adapter": lambda: with_adapter(llama()),
    "a hook": lambda: with_hook(llama()),
    "a forward of one module's own": lambda: with_own_forward(llama()),
    "a frozen weight": lambda: llama().requires_grad_(False),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the process of a plain model has kept."""
    where = tmp_path_factory.mktemp("left") / "store"
    with pytest.MonkeyPatch.context() as patch, counted(patch) as traces:
        patch.setenv(store.VARIABLE, str(where))
        assert run(llama(), traces) == 3
    return where


@pytest.fixture
def kept(left: Path, traces: Traces, folder: Path) -> Traces:
    """A store of this test's own that has the same."""
    shutil.copytree(left, folder)
    return traces


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.quick_for("a hook", "an adapter")
def test_another_model_is_traced(kept: Traces, change: str) -> None:
    assert run(CHANGED[change](), kept) >= 2


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (modeling_llama, "apply_rotary_pos_emb", doubled_rope),
        (modeling_llama.LlamaMLP, "forward", halved_mlp),
        (nn.Linear, "forward", biased_linear),
    ],
    ids=["a function", "a method", "a method of torch's"],
)
@pytest.mark.quick_for("a method")
def test_a_model_whose_code_is_another_is_traced_each_way(kept: Traces, where: Any, name: str, value: Any) -> None:
    """As after an edit of its file: and what it left is not taken for the code as it was."""
    with attribute(where, name, value):
        assert run(llama(), kept) == 3
        assert run(llama(), kept) == 0
    assert run(llama(), kept) == 0


@pytest.mark.slow
def test_a_registered_attention_function_is_traced(kept: Traces) -> None:
    with registered():
        assert run(llama(), kept) == 3
    assert run(llama(), kept) == 0


@pytest.mark.slow
def test_other_options_are_compiled_for(kept: Traces) -> None:
    assert run(llama(), kept, options=LOSSLESS) == 3
    assert run(llama(), kept, options={**FULL, "disable_passes": ["causal_prefill"]}) == 3


def test_two_models_of_one_class_with_other_options_in_one_process(kept: Traces) -> None:
    """Each has its own graphs: Dynamo asks for the backend's options in every call."""
    kept.next_process()
    first, second = llama(), copy.deepcopy(llama())
    one = torch.compile(first, backend="specache", options=FULL)
    two = torch.compile(second, backend="specache", options={"method": "offload", "lowering": "eager"})
    want = logits(first)
    for _ in range(2):
        torch.testing.assert_close(logits(one), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(logits(two), want, atol=2e-5, rtol=2e-5)
    assert [sc.stats(model).host_bytes > 0 for model in (first, second)] == [False, True]
    assert kept.count == 3


@pytest.mark.slow
def test_another_batch_size_is_served(kept: Traces) -> None:
    assert run(llama(), kept, rows=2) <= 3
    assert run(llama(), kept, rows=3) == 0


def test_a_change_in_the_process_that_took_it_is_noticed(kept: Traces) -> None:
    kept.next_process()
    model = llama()
    compiled = torch.compile(model, backend="specache", options=FULL)
    logits(compiled)
    assert kept.count == 0
    with registered():
        torch.testing.assert_close(logits(compiled), logits(model), atol=2e-5, rtol=2e-5)
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    torch.testing.assert_close(logits(compiled), logits(model), atol=2e-5, rtol=2e-5)
    assert kept.count == 6


@pytest.mark.parametrize("name", environment.components())
@pytest.mark.quick_for("specache")
def test_each_part_of_the_environment_counts(kept: Traces, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parts = environment.components()
    monkeypatch.setattr(environment, "components", lambda: {**parts, name: parts[name] + " "})
    assert run(llama(), kept) == 3


def test_settings_and_threads_are_in_the_environment() -> None:
    before = environment.environment()
    assert environment.environment() == before
    with torch._inductor.config.patch(max_autotune=True):
        assert environment.environment() != before
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert environment.environment() != before
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("medium")
    assert environment.environment() != before
    torch.set_float32_matmul_precision("highest")
    assert environment.environment() == before


def test_a_phase_that_was_not_kept_is_traced_and_kept_behind_it(traces: Traces, folder: Path) -> None:
    assert run(llama(), traces, options=LOSSLESS) == 3
    for file in folder.glob("*/*/*/pre-decode-*"):
        file.unlink()
    assert run(llama(), traces, options=LOSSLESS) == 1
    assert run(llama(), traces, options=LOSSLESS) == 0


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "none": lambda data: b"",
    "other bytes": lambda data: data[::-1],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.quick_for("half")
def test_damaged_files_are_ignored_with_one_warning(kept: Traces, folder: Path, damage: str) -> None:
    for file in folder.glob("*/*/*/*"):
        file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.warns(sc.SpecacheWarning, match="is of no use"):
        assert run(llama(), kept) == 3
    assert run(llama(), kept) == 0


@pytest.mark.parametrize("what", ["*/*/*/*", "*/*/*", "*/*", "*", "."], ids=["file", "form", "call", "all", "root"])
@pytest.mark.quick_for("root")
def test_what_others_may_write_to_is_not_read(kept: Traces, folder: Path, what: str) -> None:
    for path in folder.glob(what) if what != "." else [folder]:
        path.chmod(path.stat().st_mode | 0o002)
    with pytest.warns(sc.SpecacheWarning, match="other users"):
        assert run(llama(), kept) == 3


@pytest.mark.slow
def test_a_form_in_another_calls_folder_is_not_taken(kept: Traces, folder: Path) -> None:
    """Whoever has moved it there."""
    (environment_folder,) = folder.iterdir()
    forms = [form for call in environment_folder.iterdir() for form in call.iterdir()]
    places = [form.parent for form in forms]
    for form, place in zip(forms, places[1:] + places[:1], strict=True):
        form.rename(place / f"{form.name}0")
    assert run(llama(), kept) == 3


@pytest.mark.slow
def test_a_folder_that_takes_no_file_is_nothing_but_slower(
    traces: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(sc.SpecacheWarning, match="No space left"):
        assert run(llama(), traces) == 3
    monkeypatch.undo()
    assert [file for file in folder.rglob("*") if file.is_file()] == []


def test_what_a_killed_writer_left_is_no_form(kept: Traces, folder: Path) -> None:
    for call in folder.glob("*/*"):
        half = call / ("0" * 32)
        half.mkdir()
        (half / f"{store.PART}abc").write_bytes(b"half")
    assert run(llama(), kept) == 0


@pytest.mark.slow
def test_off_keeps_nothing(traces: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.VARIABLE, "off")
    assert run(llama(), traces) == 3
    assert not folder.exists()


def test_the_oldest_go_first(kept: Traces, folder: Path) -> None:
    found = sorted(store.entries(folder), key=lambda entry: entry[2])
    assert len(found) == 3
    newest, size, _ = found[-1]
    store.trim(folder, most_bytes=size)
    assert [form for form, _, _ in store.entries(folder)] == [newest]
    mine = folder / "a" / "folder" / "of mine"
    mine.mkdir(parents=True)
    assert store.clear(folder) == size
    assert list(store.entries(folder)) == []
    assert mine.is_dir()


CALLS = """
import random, sys, torch
sys.path[:0] = {paths!r}
from test_warm import calls_of, llama
from torch._dynamo import convert_frame
count, traced = 0, convert_frame._compile
def counting(*args, **kwargs):
    global count
    count += 1
    return traced(*args, **kwargs)
convert_frame._compile = counting
calls_of(llama(), random.Random({seed}), 20)
print("traces", count)
"""


def calls_of(model: Any, chosen: random.Random, count: int) -> None:
    """Random calls of a compiled model and of its uncompiled self, whose logits must be the same."""
    options = {**LOSSLESS, "top_k": 512}
    compiled = torch.compile(model, backend="specache", options=options)
    rows, pairs = 1, (DynamicCache(), DynamicCache())
    for _ in range(count):
        length = pairs[0].get_seq_length()
        kind = chosen.choice(["step", "step", "several", "crop", "new"]) if length else "new"
        if kind == "new":
            rows, length, pairs = chosen.choice([1, 2, 3]), 0, (DynamicCache(), DynamicCache())
        elif kind == "crop" and length > 1:
            gone = chosen.randrange(1, length // 2 + 1)
            length -= gone
            for cache in pairs:
                cache.crop(-gone)
        size = 1 if kind == "step" else chosen.choice([2, 5, 40, 90])
        ids = torch.tensor([[chosen.randrange(SIZES["vocab_size"]) for _ in range(size)] for _ in range(rows)])
        places = torch.arange(length, length + size).expand(rows, -1)
        with torch.no_grad():
            got, want = (
                call(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True).logits
                for call, cache in zip((compiled, model), pairs, strict=True)
            )
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
def test_random_calls_over_two_processes(folder: Path) -> None:
    """The second takes what the first left, and other calls of it; a third of the first's calls traces nothing."""
    paths = [str(Path(__file__).parent), *sys.path]
    counts = []
    for seed in (1, 2, 1):
        code = CALLS.format(paths=paths, seed=seed)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout.split()[-1]))
    assert counts[0] >= 4
    assert counts[1] < counts[0]
    assert counts[2] == 0
