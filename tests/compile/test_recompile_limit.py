"""However many kinds of calls one process makes, each is compressed, and Dynamo prints no warning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import specache_compile as sc
from conftest import compiled_with, is_held, left_padding, prompt, tiny_llama
from families import Family
from specache_compile.compile import recompile_limit

OPTIONS = {"lowering": "eager", "bits": 16}
Call = Callable[[Any], Any]


def small(config: str = "Llama") -> Any:
    return Family("small", f"{config}Config", {"num_hidden_layers": 1}).model()


def generate(model: Any, ids: Tensor | None, **given: Any) -> Any:
    settings = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
    return model.generate(ids, **{**settings, **given})


def further_turn(model: Any, tokens: int, rows: int = 1) -> Any:
    first = generate(model, several(rows, 40))
    ids = torch.cat([first.sequences, several(rows, tokens)], 1)
    return generate(model, ids, past_key_values=first.past_key_values)


def several(rows: int, tokens: int = 30) -> Tensor:
    return prompt(tokens).repeat(rows, 1)


KINDS: dict[str, Call] = {
    "a further turn": lambda m: further_turn(m, 9),
    "three rows": lambda m: generate(m, several(3)),
    "padded rows": lambda m: generate(m, several(3), attention_mask=left_padding(several(3), 15, 0, 0), pad_token_id=0),
    "hidden states": lambda m: generate(m, prompt(40), output_hidden_states=True),
}


def compiled(model: Any) -> Any:
    return compiled_with(model, OPTIONS)


@pytest.mark.filterwarnings("error::specache_compile.SpecacheWarning")
def test_all_kinds_of_calls_in_one_process_are_compressed() -> None:
    """They need more graphs than Dynamo's limit of 8."""
    model = compiled(small())
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torch._dynamo")
    log.addHandler(handler)
    try:
        plain = [name for name, call in KINDS.items() if not is_held(sc.cache_of(call(model)))]
    finally:
        log.removeHandler(handler)
    assert plain == []
    assert [message for message in messages if "limit" in message] == []


def test_other_backends_keep_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one function of ten sizes they compile as many as Dynamo's limit allows."""
    graphs: list[int] = []

    def count(graph_module: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph_module

    @torch.compile(backend=count, dynamic=False)
    def double(x: Tensor) -> Tensor:
        return x * 2

    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 3)
    monkeypatch.setattr(recompile_limit, "LEAST", 64)
    for size in range(2, 12):
        double(torch.ones(size))
    assert len(graphs) == 3


def test_a_generation_past_the_limit_warns_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompile_limit, "LEAST", 1)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    first, second = compiled(small()), compiled(small("Qwen2"))
    with warnings.catch_warnings(action="ignore", category=sc.SpecacheWarning):
        generate(first, prompt(40))
    with pytest.warns(sc.SpecacheWarning, match=r"ran no compiled graph.*recompile limit was reached"):
        generate(second, prompt(40))
    with pytest.raises(sc.SpecacheError, match="recompile limit was reached"):
        sc.stats(second)
    with pytest.raises(sc.SpecacheError, match=r"explain captured no graph.*recompile limit was reached"):
        sc.explain(small("Qwen2"), prompt_length=64)
    assert recompile_limit.was_reached(second)
    torch._dynamo.reset()
    assert not recompile_limit.was_reached(second)


def disabled(model: Any) -> Any:
    """Graphs that Dynamo has compiled still run while Dynamo is disabled."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=True):
        return generate(model, prompt(40))


def forced(model: Any) -> Any:
    with torch.compiler.set_stance("force_eager"):
        return generate(model, prompt(40))


@pytest.mark.quick_for("stance")
@pytest.mark.parametrize(
    ("call", "reason"),
    [(disabled, "Dynamo is disabled"), (forced, "stance is 'force_eager'")],
    ids=["disabled", "stance"],
)
def test_a_generation_that_runs_no_graph_warns_once_at_the_callers_line(call: Call, reason: str) -> None:
    model = compiled(small())
    generate(model, prompt(40))
    with pytest.warns(sc.SpecacheWarning, match=reason) as warned:
        out = call(model)
    assert not is_held(sc.cache_of(out))
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.raises(sc.SpecacheError, match=reason):
        sc.stats(model)  # not those of the generation before
    with warnings.catch_warnings(action="error"):
        call(model)
        torch._dynamo.reset()  # a frame that was skipped is compiled again
        assert is_held(sc.cache_of(generate(model, prompt(40))))
    assert sc.stats(model).decodes == 2


class Wrapper(torch.nn.Module):
    """Generates with the model inside, as a PeftModel does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, **kwargs)


@pytest.mark.filterwarnings("error::specache_compile.SpecacheWarning")
def test_a_compiled_wrapper_around_a_model_that_is_not_compiled_warns() -> None:
    wrapper = Wrapper(small())
    generate(wrapper, prompt(40))
    wrapper.compile(backend="specache", options=OPTIONS)
    with pytest.warns(sc.SpecacheWarning, match=r"Wrapper was compiled, but it generates with the LlamaForCausalLM"):
        generate(wrapper, prompt(40))
    wrapper.model.compile(backend="specache", options=OPTIONS)
    assert sc.cache_of(generate(wrapper, prompt(40))) is not None
    assert sc.stats(wrapper.model).decodes > 0


def test_the_offloaded_cache_is_refused() -> None:
    with pytest.raises(sc.SpecacheError, match="cache_implementation='offloaded'"):
        generate(compiled(tiny_llama()), prompt(40), cache_implementation="offloaded")


def test_an_exact_model_has_one_graph_for_all_lengths_and_batches() -> None:
    """Mistral's layers slide: they stay as they are, and their sizes are symbols."""
    model = compiled(small("Mistral"))
    with warnings.catch_warnings(action="ignore", category=sc.SpecacheWarning):
        generate(model, several(2))
        graphs = counters["stats"]["unique_graphs"]
        for rows, tokens in ((2, 31), (3, 45), (4, 20)):
            generate(model, several(rows, tokens))
    assert counters["stats"]["unique_graphs"] == graphs
