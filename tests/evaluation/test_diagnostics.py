"""`specache diagnose`: each figure against plain PyTorch on a small random model, and the command as it is typed."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import NEEDLE_LLAMA, greedy, prompt, tiny_llama
from specache_compile.cli import main
from specache_compile.evaluation.diagnostics import (
    DIAGNOSTICS,
    command,
    coverage,
    deviation,
    hits,
    jaccard,
    speculation,
)
from specache_compile.evaluation.diagnostics.inspected import Inspected
from specache_compile.evaluation.diagnostics.point import Point

MODEL = str(NEEDLE_LLAMA)
QUICK = ("--length", "48", "--steps", "6", "--windows", "1")


def inspected(length: int = 60, steps: int = 12, windows: int = 2, **changes: Any) -> Inspected:
    return Inspected(tiny_llama(**changes), prompt(length, windows), steps)


def curve(points: list[Point], name: str) -> dict[float, float]:
    return {point.x: point.y for point in points if point.curve == name}


def causal(attention: Tensor) -> Tensor:
    return attention.tril() / attention.tril().sum(-1, keepdim=True)


def test_the_attention_is_that_of_the_model() -> None:
    run = inspected()
    before = run.model.config._attn_implementation
    layers = run.attention
    assert run.model.config._attn_implementation == before
    assert [layer.shape for layer in layers] == [(2, 4, 60, 60)] * 2
    for layer in layers:
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 4, 60))
        assert torch.equal(layer, layer.tril())


def test_even_attention_is_covered_in_proportion() -> None:
    even = causal(torch.ones(1, 2, 200, 200))
    found = coverage.covered(even, 100)
    for share, mass in zip(coverage.SHARES, found.tolist(), strict=True):
        expected = sum(max(1, math.ceil(share * seen)) / seen for seen in range(101, 201)) / 100
        assert mass == pytest.approx(expected, rel=1e-5)


def test_coverage_sorts_each_querys_keys() -> None:
    run = inspected()
    points = coverage.points(run)
    one = run.attention[1][:, :, run.prefill :]
    expected = [row[: math.ceil(0.1 * (t + 1))].sum()
                for t, rows in enumerate(one.sort(-1, descending=True).values.movedim(2, 0).flatten(1, 2), run.prefill)
                for row in rows]  # fmt: skip
    assert curve(points, "layer 1")[10] == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    assert curve(points, "all layers")[100] == pytest.approx(1)


@pytest.mark.whole
def test_each_querys_own_top_k_covers_most_and_a_whole_budget_everything() -> None:
    run = inspected()
    best = hits.own_top_k(run, 12)
    assert all(hits.kept_mass(run, policy, 12) <= best for policy in ("h2o", "tova", "random"))
    assert hits.kept_mass(run, "h2o", 61) == pytest.approx(1, abs=1e-5)
    assert hits.own_top_k(run, 60) == pytest.approx(1, abs=1e-5)


def test_the_mass_under_streaming_llm_is_that_of_the_first_four_and_the_newest() -> None:
    """What this policy keeps is known without running it."""
    run, pairs = inspected(), 16
    kept = [[*range(4), *range(t - (pairs - 1 - 4), t + 1)] for t in range(run.prefill, run.length)]
    masses = [layer[:, :, t, tokens].sum(-1).mean() for layer in run.attention
              for t, tokens in zip(range(run.prefill, run.length), kept, strict=True)]  # fmt: skip
    assert hits.kept_mass(run, "streaming_llm", pairs) == pytest.approx(float(torch.stack(masses).mean()), abs=1e-5)


def test_with_an_exact_low_bit_tier_every_guess_is_the_token_then_said() -> None:
    """Then both lanes compute what the uncompiled model does. It repeats no token, so that no other step's would do."""
    run = inspected(length=150, steps=16)
    said = greedy(run.model, run.ids[:, : run.prefill], run.steps)[:, run.prefill :]
    assert (said[:, 1:] != said[:, :-1]).float().mean() > 0.5
    found = speculation.continue_greedily(run, {"bits": 16, "top_k": 8, "speculate": True, "hit_rate": True})
    assert found.agreement == 1.0


def test_without_a_speculative_token_there_is_no_agreement() -> None:
    run = inspected(length=150, steps=4)
    found = speculation.continue_greedily(run, {"bits": 1, "top_k": 8, "speculate": False, "hit_rate": True})
    assert math.isnan(found.agreement)
    assert 0 < found.hit_rate.mass < 1


def test_every_pair_fetched_is_a_hit_rate_of_one() -> None:
    run = inspected(length=150, steps=4)
    found = speculation.continue_greedily(run, {"bits": 1, "top_k": 512, "speculate": True, "hit_rate": True})
    assert found.hit_rate.mass == pytest.approx(1, abs=1e-5)
    assert found.hit_rate.top_k == pytest.approx(1)


def test_jaccard_counts_common_tokens() -> None:
    ours, theirs = torch.tensor([[[0, 1, 2, -1]]]), torch.tensor([[[1, 2, 3, 4]]])
    assert float(jaccard.jaccard(ours, theirs)) == pytest.approx(2 / 5)


def test_the_history_of_a_full_cache_is_a_sum_over_its_queries() -> None:
    attention = causal(torch.rand(1, 2, 20, 20) + 0.1)
    history = jaccard.full_history(attention, 12)[15]
    for token in range(15):
        received = attention[0, 1, token:15, token]
        assert float(history.total[0, 1, token]) == pytest.approx(float(received.sum()), rel=1e-5)
        assert float(history.squares[0, 1, token]) == pytest.approx(float(received.square().sum()), rel=1e-5)
        average = torch.tensor([1 / (q + 1) for q in range(token, 15)])
        assert float(history.above[0, 1, token]) == float((received > average).sum())
        assert float(history.seen[0, 1, token]) == 15 - token
        assert float(history.last[0, 1, token]) == pytest.approx(float(attention[0, 1, 14, token]))


@pytest.mark.parametrize("policy", jaccard.CHOSEN)
def test_before_anything_was_evicted_a_policy_keeps_what_it_would_choose(policy: str) -> None:
    """One token past the budget, block by block: the first eviction saw all that the full cache saw."""
    run = Inspected(tiny_llama(num_hidden_layers=1), prompt(41), 3)
    budget = run.prefill - 1
    assert torch.equal(kept_first(run, policy, budget), chosen_first(run, policy, budget))


@pytest.mark.parametrize("policy", jaccard.CHOSEN)
def test_a_policy_that_read_the_prompt_exactly_keeps_what_it_would_choose_of_it(policy: str) -> None:
    """Whatever the budget; block by block, the first evictions have seen less than the last query has."""
    run = Inspected(tiny_llama(num_hidden_layers=1), prompt(41), 3, eviction_block="prompt")
    assert torch.equal(kept_first(run, policy, 12), chosen_first(run, policy, 12))


def kept_first(run: Inspected, policy: str, budget: int) -> Tensor:
    """Behind the prefill, of the first layer: [windows, H, budget]."""
    _, session = next(iter(run.forced(policy, budget)))
    return session.state[0]["kept_token"].long()


def chosen_first(run: Inspected, policy: str, budget: int) -> Tensor:
    """The same, had nothing gone."""
    history = jaccard.full_history(run.grouped_attention[0], run.prefill)[run.prefill]
    return jaccard.chosen(policy, history, budget).sort(-1).values


def test_the_running_deviation_is_that_of_the_first_queries() -> None:
    attention = causal(torch.rand(2, 2, 40, 40) + 0.1)
    found = deviation.running_deviation(attention, 10)
    assert found.shape == (2, 2, 29, 10)
    for token, steps in ((1, 1), (5, 4), (29, 10)):
        received = attention[1, 0, token : token + steps + 1, token]
        assert float(found[1, 0, token - 1, steps - 1]) == pytest.approx(float(received.std(correction=0)), abs=1e-6)


# The command


def diagnose(out: Path, *more: str) -> int:
    return main(["diagnose", MODEL, "--out", str(out), *QUICK, *more])


def test_data_pictures_tables_and_provenance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(tmp_path, "--which", "coverage", "deviation", "--seed", "5") == 0
    printed = capsys.readouterr().out
    for name in ("coverage", "deviation"):
        assert f"{name}: {DIAGNOSTICS[name].what}" in printed
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert "specache diagnose" in found["provenance"]
        assert "seed 5" in found["provenance"]
        with (tmp_path / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["y"]) for row in rows] == [point["y"] for point in found["points"]]
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_what_is_on_disk_is_not_measured_again_unless_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert diagnose(tmp_path, "--which", "coverage", "--no-plots") == 0
    before = (tmp_path / "coverage.json").stat().st_mtime_ns

    def interrupted(run: Inspected) -> list[Point]:
        raise KeyboardInterrupt

    changed = {**DIAGNOSTICS, "deviation": DIAGNOSTICS["deviation"].__class__("", interrupted, "", "", 1)}
    monkeypatch.setattr(command, "DIAGNOSTICS", changed)
    assert diagnose(tmp_path, "--which", "coverage", "deviation", "--no-plots") == 130
    assert (tmp_path / "coverage.json").stat().st_mtime_ns == before
    assert not (tmp_path / "deviation.json").exists()
    assert diagnose(tmp_path, "--which", "coverage", "--no-plots", "--seed", "1") == 0
    assert (tmp_path / "coverage.json").stat().st_mtime_ns != before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--which", "entropy"), "unknown diagnostic 'entropy': known are coverage, hits"),
        (("--steps", "0"), "--steps 0: give a whole number, 1 or more"),
        (("--steps", "48"), "--steps 48: give more than 2, and fewer than --length"),
        (("--eviction-block", "all"), "eviction_block='all': give a number of tokens, 1 or more, or 'prompt'"),
        (("--length", "99999"), "--length 99,999: the model's context is"),
        (("--text", "no/such/file"), "no text file no/such/file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert diagnose(tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
