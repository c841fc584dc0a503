"""Own texts of thousands of tokens: their distance from the full cache behind the same text, by position."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from conftest import byte_tokenizer, prompt, tiny_llama
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.settings import parse_setting, running
from specache_compile.evaluation.tasks import long
from specache_compile.evaluation.tasks.long import measure, own_text
from specache_compile.evaluation.tasks.task import Bench, Outcome

SMALL = "group_size=32,residual_length=32"
EXACT = f"specache:bits=1,verify=4,top_k=8,{SMALL}"
LOSSY = f"kivi:bits=1,{SMALL}"
SEED = 3
TOKENS = 100


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(tiny_llama(), Reader(byte_tokenizer()), batch_size=2)


def outcome(runner: Runner, method: str) -> Outcome:
    with running(runner.model, parse_setting(method), "eager"):
        return measure(runner, prompt(64, 3).tolist(), TOKENS, SEED)


def texts(outcome: Outcome) -> list[list[int]]:
    return [one["tokens"] for one in outcome.detail["each"]]


def test_the_distance_is_the_full_caches_along_the_methods_own_text(runner: Runner) -> None:
    """Position by position, against one pass of the uncompiled model over the whole text; the method's logits, against
    those of a second run that is forced along it."""
    ids = prompt(64, 2)
    with running(runner.model, parse_setting(LOSSY), "eager"):
        said, kl = own_text(runner, ids, TOKENS, SEED)
        ours = runner.forced_logits(torch.cat([ids, said], 1), 64)
        with runner.uncompiled(), torch.no_grad():
            full = runner.model(torch.cat([ids, said], 1)).logits[:, 63:-1]
    expected = torch.nn.functional.kl_div(
        ours.log_softmax(-1), full[:, 1:].log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(kl[:, 1:], expected, atol=1e-4, rtol=1e-3)
    assert kl[:, 0].abs().max() < 1e-6, "behind the prompt, which is read exactly"
    assert kl[:, 60:].mean() > 0.01


def test_methods_that_agree_draw_the_same_tokens_at_no_distance(runner: Runner) -> None:
    full, exact, lossy = (outcome(runner, method) for method in ("uncompiled", EXACT, LOSSY))
    assert texts(full) == texts(exact) != texts(lossy)
    assert max(abs(full.score), abs(exact.score)) < 1e-5
    assert all(a[0] == b[0] for a, b in zip(texts(full), texts(lossy), strict=True)), "the prompt is read exactly"


def test_a_text_ends_where_the_model_ends_it(runner: Runner) -> None:
    text = texts(outcome(runner, "uncompiled"))[0]
    with patch.object(runner.model.generation_config, "eos_token_id", text[10]):
        each = outcome(runner, "uncompiled").detail["each"]
    assert each[0]["length"] == text.index(text[10]) + 1
    assert each[0]["tokens"] == text[: each[0]["length"]]


def test_stretches_cover_all_positions_and_texts_that_came_so_far() -> None:
    kls = [[float(place) for place in range(80)], [float(place) for place in range(15)]]
    found = dict(long.by_stretch(kls, 80))
    assert list(found) == ["0", "10", "20", "30", "40", "50", "60", "70"]
    assert found["0"] == [4.5, 4.5]
    assert found["10"] == [14.5, 12.0]
    assert found["20"] == [24.5]


def test_a_context_no_longer_than_the_prompt_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 200)
    bench = Bench(Reader(byte_tokenizer()), 2, 0, (text,))
    with pytest.raises(SpecacheError, match="128 tokens are too few"):
        long.cell(bench, 128)
    assert [long.cell(bench, length).name for length in (192, 256)] == ["192 sampled", "256 sampled"]
