"""Small random models, and the settings under which tokens must equal the uncompiled model's."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The inputs whose sizes differ between calls, for Dynamo to trace as symbols from the start, also in subprocesses. In
# tests marked `detects_sizes` the backend requests symbols, as in users' programs.
os.environ["TORCH_COMPILE_DYNAMIC_SOURCES"] = (
    r"L\['kwargs'\]\['(input_ids|position_ids|attention_mask)'\]$, L\['args'\]\[[01]\]$"
)
# Only tests with a separate folder store and load traces.
os.environ.pop("SPECACHE_CACHE", None)
# With symbolic sizes, a cache of fake tensors' results costs more than it saves.
os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"
# Dynamo collects garbage after each of its thousands of compilations, which takes 4 % of their time.
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"

import torch

# Without a GPU, Triton's kernels run in its interpreter, which Triton selects at its first import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

import pairwise
from one_trace import compile_by_options
from specache_compile.compat import cache_of, with_cache
from specache_compile.runtime import records
from specache_compile.runtime.held import HeldTensor

# Fixtures for tests of consecutive processes.
pytest_plugins = ["kept_traces"]

# Every pair is fetched, so the low-bit tier does not affect results (invariant 2). With a small group and window,
# tokens leave the window early.
LOSSLESS = {"lowering": "eager", "setting": "paper", "bits": 1, "group_size": 32, "residual_length": 32, "top_k": 1024}

# A trained byte-level model, which finds needles in a long text.
NEEDLE_LLAMA = Path(__file__).parent.parent / "examples" / "needle-llama"

# Test modules of at least half a minute, the longest first.
LONGEST = (
    "runtime/test_families.py", "caches/test_rows.py", "generate/test_verify.py", "runtime/test_sessions.py",
    "compile/test_backend.py", "kernels/test_sanitized.py", "caches/test_saving.py",
    "tests/test_checkpoints.py", "generate/test_generate.py", "kernels/test_attention.py", "kernels/test_tiers.py",
    "runtime/test_methods.py",
    "warm/test_warm.py", "lowering/test_compiled_graph.py", "runtime/test_ranks.py", "tests/test_benchmarks.py",
    "lowering/test_fold_layers.py", "runtime/test_no_host_tier.py",
    "runtime/test_sink_tokens.py", "runtime/test_mixed_calls.py", "explaining/test_explain.py", "passes/test_masks.py",
    "runtime/test_uncompiled.py", "compile/test_graph_breaks.py", "weights/test_quantised.py", "weights/test_peft.py",
    "runtime/test_pictures.py", "explaining/test_step_time.py", "evaluation/test_eval.py",
    "explaining/test_costs.py", "caches/test_hold.py", "tests/test_cli.py", "bench/test_demo.py",
    "device/test_device_faults.py", "device/test_device_schedules.py", "device/test_device_methods.py",
    "device/test_device_ways.py",
)  # fmt: skip

# Restored after every test: generate(prefill_chunk_size=...) of transformers 5.17 sets 64 for the whole process.
DYNAMOS_LIMITS = {
    "recompile_limit": torch._dynamo.config.recompile_limit,
    "accumulated_recompile_limit": torch._dynamo.config.accumulated_recompile_limit,
}

# To measure guards, Dynamo empties the processor's caches, which takes 2 % of a compilation and slows other workers.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# For a module or class marked `one_process`: its name, and its models by how they were built and compiled.
_shared: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def garbage() -> None:
    """Freeze objects of imports and of earlier modules, so that garbage collection skips them.

    Scanning them takes a tenth of Dynamo's time, and seconds in each `gc.collect()`.
    """
    torch._dynamo.reset()  # a module's fixtures run before `dynamo`, and earlier graphs count towards their limit
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 100, 100)


@pytest.fixture(autouse=True)
def dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test compiles separately, on one thread per worker, from one seed.

    Tests of a module marked `one_process` reuse the graphs of earlier tests.
    """
    torch.manual_seed(0)
    sizes = "" if request.node.get_closest_marker("detects_sizes") else torch.compiler.config.dynamic_sources
    module = request.module.__name__ if request.node.get_closest_marker("one_process") else None
    if module is None or _shared.get("module") != module:
        torch._dynamo.reset()
        _shared.clear()
    if module is not None:
        _shared["module"] = module
        _shared["one_trace"] = request.node.get_closest_marker("one_trace") is not None
    # A module's models compiled with several options need separate graphs, which Dynamo counts together.
    limits = DYNAMOS_LIMITS if module is None else {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
    with torch.compiler.config.patch(dynamic_sources=sizes), torch._dynamo.config.patch(limits):
        yield
    if module is None:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def warn_again() -> None:
    """Forget which warnings each model has printed: a model warns once, and fixtures share models."""
    forget_warnings()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The package's messages of the level INFO and above."""
    messages: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("specache_compile")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield messages
    log.removeHandler(handler)
    log.setLevel(level)


def forget_warnings() -> None:
    for record in list(records._records.values()):
        record.warned.clear()


@pytest.fixture(autouse=True)
def tiers_from_the_first_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a GPU's short caches stay in 16 bits; disable this in tests, whose caches are short."""
    monkeypatch.setattr("specache_compile.runtime.break_even.COMPUTED", {})


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other cases of tests with `pairwise` or `quick_for` as slow, and skip GPU tests without a GPU.

    The longest modules come first, and the short kernel modules last. Workers take whole modules
    (`--dist loadfile --no-loadscope-reorder`), and then end at about the same time.
    """
    for _, cases in itertools.groupby(items, key=lambda item: item.nodeid.split("[")[0]):
        mark_the_rest_slow(list(cases))
    for item in items:
        if not torch.cuda.is_available() and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
    items.sort(key=lambda item: place_of(item.path))


def place_of(path: Path) -> int:
    name = f"{path.parent.name}/{path.name}"
    return LONGEST.index(name) if name in LONGEST else len(LONGEST) + (path.parent.name == "kernels")


def mark_the_rest_slow(cases: list[Any]) -> None:
    """Mark one test's cases as slow that `pairwise` or `quick_for` exclude."""
    grid, named = (cases[0].get_closest_marker(name) for name in ("pairwise", "quick_for"))
    if named is not None:
        known = {case.callspec.id for case in cases}
        assert known >= set(named.args), f"{cases[0].nodeid}: quick_for names {set(named.args) - known}"
        kept = {place for place, case in enumerate(cases) if case.callspec.id in named.args}
    elif grid is not None and len(cases) > 1:
        kept = set(pairwise.chosen([case.callspec.params for case in cases], *grid.args))
    else:
        return
    for place, case in enumerate(cases):
        if place not in kept:
            case.add_marker("slow")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Return a Llama with two layers, four query and two KV heads, and weights so large that logits differ clearly."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def llama_3_8b(layers: int) -> LlamaConfig:
    """Return a configuration of Llama-3-8B's width."""
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.fixture
def llama() -> LlamaForCausalLM:
    if "module" not in _shared:
        return tiny_llama()
    if "llama" not in _shared:
        _shared["llama"] = tiny_llama()
    return _shared["llama"]


@pytest.fixture
def compiled(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the same weights, compiled in place with lossless settings."""
    return compile_copy(llama)


def compile_copy(model: LlamaForCausalLM, **options: Any) -> LlamaForCausalLM:
    """Return a copy compiled with the lossless settings, overridden by `options`."""
    return compiled_with(model, {**LOSSLESS, **options})


def compiled_with(model: LlamaForCausalLM, options: dict[str, Any]) -> LlamaForCausalLM:
    """Return a compiled copy; for a shared model, the copy that was compiled with these options before."""
    how, shared = repr(sorted(options.items())), model is _shared.get("llama")
    if shared and how in _shared:
        return _shared[how]
    twin = copy.deepcopy(model)
    if shared and _shared["one_trace"]:
        compile_by_options(twin, options)
    else:
        twin.compile(backend="specache", options=options)
    if shared:
        _shared[how] = twin
    return twin


def eager(model: LlamaForCausalLM, **options: Any) -> LlamaForCausalLM:
    """Return a copy compiled with the default settings, overridden by `options`, whose graphs run as they are."""
    return compiled_with(model, {"lowering": "eager", **options})


def byte_tokenizer() -> Any:
    """Return the needle model's tokenizer: a token's id is its byte, without special tokens before a text."""
    return AutoTokenizer.from_pretrained(NEEDLE_LLAMA)


def prompt(length: int, batch: int = 1, seed: int = 1, vocabulary: int = 128) -> torch.Tensor:
    """Return random token ids [batch, length]."""
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padding(ids: torch.Tensor, *hidden: int) -> torch.Tensor:
    """Return a mask that hides the first tokens of each row of `ids`, as many as `hidden` states."""
    return (torch.arange(ids.shape[1]) >= torch.tensor(hidden)[:, None]).long()


def greedy(model: Any, ids: torch.Tensor, tokens: int = 40, **kwargs: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **kwargs)


def new_tokens(model: Any, ids: torch.Tensor, tokens: int, **kwargs: Any) -> list[int]:
    """Return what `greedy` generates for one row, without its prompt."""
    found: list[int] = greedy(model, ids, tokens, **kwargs)[0, ids.shape[1] :].tolist()
    return found


@torch.no_grad()
def step(model: Any, ids: torch.Tensor, cache: Any = None, **given: Any) -> Any:
    """Return the outputs of one call on a cache, by default a new one."""
    return model(ids, **with_cache(cache), use_cache=True, **given)


def failing(whole: Callable[..., Any], error: Any, call: int = 1, after: bool = False) -> Callable[..., Any]:
    """Return a function like `whole`, of which one call raises an error, before or after the work."""
    calls = itertools.count(1)

    def function(*given: Any, **more: Any) -> Any:
        fails = next(calls) == call
        if fails and not after:
            raise error
        done = whole(*given, **more)
        if fails:
            raise error
        return done

    return function


def is_held(cache: Any) -> bool:
    """Return whether all keys and values are held; a mixture raises."""
    (held,) = {isinstance(x, HeldTensor) for layer in cache.layers for x in (layer.keys, layer.values)}
    return held


def chatted(model: Any, tokens: int) -> torch.Tensor:
    """Return the whole text of three turns on one cache, `tokens` tokens per reply; the second turn is one token."""
    cache, spoken = DynamicCache(), prompt(0)
    for turn, length in enumerate((60, 1, 20)):
        spoken = greedy(model, torch.cat([spoken, prompt(length, seed=20 + turn)], 1), tokens, **with_cache(cache))
    return spoken


@torch.no_grad()
def greedy_unmasked(model: Any, ids: torch.Tensor, tokens: int = 40) -> torch.Tensor:
    """Generate like `greedy`, without the mask of ones that some versions of `generate` pass to every step.

    A step with a growing mask is not captured.
    """
    made, out = [ids], model(ids, use_cache=True)
    for place in range(ids.shape[1], ids.shape[1] + tokens):
        made.append(out.logits[:, -1:].argmax(-1))
        position = torch.full_like(made[-1], place)
        out = model(made[-1], **with_cache(cache_of(out)), position_ids=position, use_cache=True)
    return torch.cat(made, 1)
