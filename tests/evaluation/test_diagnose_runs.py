"""`specache diagnose`: bad input, models it cannot look into, going on after a stop, and what its counts count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import specache_compile as sc
from conftest import NEEDLE_LLAMA, prompt, tiny_llama
from specache_compile.cli import main
from specache_compile.evaluation.diagnostics import agreement, jaccard
from specache_compile.evaluation.diagnostics.inspected import Inspected
from specache_compile.evaluation.diagnostics.speculation import Greedy
from specache_compile.runtime.stats import HitRate

EXAMPLE = str(NEEDLE_LLAMA)
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


def diagnose(out: Path, *arguments: str) -> int:
    return main(
        ["diagnose", EXAMPLE, "--length", "48", "--steps", "4", "--windows", "1", "--out", str(out), *arguments]
    )


@pytest.mark.parametrize("command", [("diagnose", EXAMPLE), ("eval", EXAMPLE), ("generate", EXAMPLE, "--prompt", "a")])
def test_a_device_that_is_none_is_one_line_and_exit_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--device", "tape"]) == 2
    assert "specache: device tape: Expected one of cpu" in capsys.readouterr().err


def test_pictures_are_drawn_where_a_finished_run_has_none(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for more, drawn in ((("--no-plots",), False), ((), True)):
        assert diagnose(tmp_path, "--which", "coverage", *more) == 0
        assert (tmp_path / "coverage.json").exists()
        assert (tmp_path / "coverage.png").exists() == drawn


def test_a_model_without_groups_of_query_heads_is_its_own_average() -> None:
    torch.manual_seed(0)
    run = Inspected(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).eval(), prompt(24), 4)
    assert all(torch.equal(a, b) for a, b in zip(run.grouped_attention, run.attention, strict=True))


def test_a_model_that_is_rewritten_in_part_is_refused() -> None:
    run = Inspected(tiny_llama(), prompt(24), 4)
    with pytest.warns(sc.SpecacheWarning), pytest.raises(sc.SpecacheError, match="1 of this model's 2 attentions stay"):
        list(run.forced("h2o", 8, exact_layers=(0,)))


def test_counts_are_of_what_was_compared() -> None:
    """With 40 tokens, the last 8 of them fed one by one: 36 pairs may stay, so that the first goes after token 36."""
    run = Inspected(tiny_llama(), prompt(40, batch=2), 8)
    layers, windows, heads = 2, 2, 2
    assert jaccard.similarity(run, "tova", 0.9).count == layers * windows * heads * 3  # before tokens 37, 38, 39
    assert jaccard.similarity(run, "tova", 0.5).count == layers * windows * heads * 8
    found = Greedy(HitRate(1.0, 1.0), 0.5)
    run.results.update({(bits, k, True): found for bits in (1, 2) for k in (4, 16, 64)})
    assert {point.count for point in agreement.points(run)} == {windows * 6}
