"""`specache bench` on a tiny config with random weights: its rows, what it keeps, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config

from conftest import prompt, tiny_llama
from specache_compile.bench import measurements, run_bench, runners
from specache_compile.cli import main
from specache_compile.errors import SpecacheError

SMALL = ("--rounds", "1", "--lowering", "eager", "--extend", "20", "--methods", "uncompiled", "specache")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    tiny_llama().config.to_json_file(path)
    return str(path)


@pytest.fixture(scope="module")
def file(config: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of two methods at two contexts."""
    path = tmp_path_factory.mktemp("bench") / "steps.json"
    assert main(["bench", config, "--contexts", "100", "300", *SMALL, "--json", str(path)]) == 0
    return path


def test_a_row_has_times_and_bytes(file: Path) -> None:
    report = json.loads(file.read_text())
    assert report["provenance"]["command"].startswith("specache ")
    assert [(row["method"], row["context"]) for row in report["rows"]] == [
        (method, context) for context in (100, 300) for method in ("uncompiled", "specache")
    ]
    for row in report["rows"]:
        low, high = row["step_ms_half"]
        assert 0 < low <= row["step_ms"] <= high
        assert min(row["first_token_s"], row["second_token_s"], row["extend_ms"]) > 0


def test_the_full_cache_has_its_tensors_bytes_and_the_compressed_one_a_host_tier(file: Path) -> None:
    full, ours = (row for row in json.loads(file.read_text())["rows"] if row["context"] == 300)
    tokens = 300 + measurements.WARM_UP + measurements.IN_A_ROW
    assert (full["device_bytes"], full["host_bytes"]) == (2 * 2 * 2 * tokens * 16 * 2, 0)
    assert ours["host_bytes"] >= full["device_bytes"]


def test_the_next_call_measures_what_the_file_has_not(
    file: Path, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurements, "prefill", lambda *given: pytest.fail("it is measured already"))
    picture = file.with_name("steps.png")
    command = ["bench", config, "--contexts", "100", "300", *SMALL, "--json", str(file), "--plot", str(picture)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.count("specache") == 2
    assert "several, ms" in out
    assert picture.stat().st_size > 10_000


def test_an_interruption_keeps_the_contexts_that_are_finished(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(model: Any, ids: torch.Tensor, *tell: Any) -> Any:
        if ids.shape[1] == 200:
            raise KeyboardInterrupt
        return runners.prefill(model, ids)

    monkeypatch.setattr(measurements, "prefill", read)
    file = tmp_path / "steps.json"
    command = ["bench", config, *SMALL[:-1], "--json", str(file), "--no-first-tokens", "--contexts"]
    assert main([*command, "200"]) == 130
    assert not file.exists()
    capsys.readouterr()
    assert main([*command, "100", "200"]) == 130
    assert f"the same command resumes from {file}" in capsys.readouterr().err
    assert [row["context"] for row in json.loads(file.read_text())["rows"]] == [100]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--methods", "faster"], "baselines are uncompiled"),
        (["--contexts", "9000"], "--contexts 9000: the model has 8,192 tokens"),
        (["--extend", "9000"], "--extend 9000: give at most the shortest of --contexts"),
        (["--layers", "3"], "--layers 3: the model has 2"),
        (["--json", f"{__file__}/steps.json"], f"File exists: '{__file__}'"),
        (["--plot", "steps.unknown"], "--plot steps.unknown: matplotlib writes no such file"),
        (["--contexts", "100", *SMALL, "--json", "{file}", "--rounds", "2"], "was measured with rounds 1, not 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_before_anything_is_measured(
    config: str, file: Path, given: list[str], reason: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(measurements, "prefill", lambda *given: pytest.fail("too late"))
    assert main(["bench", config, "--methods", "uncompiled", *(word.format(file=file) for word in given)]) == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


@torch.no_grad()
@pytest.mark.parametrize("name", ["uncompiled", "specache:setting=paper,bits=1,top_k=256", "snapkv:budget=256"])
def test_every_way_starts_behind_the_context(name: str) -> None:
    model, ids = tiny_llama(), prompt(150)
    prefill = runners.prefill(model, ids)
    token = prefill.token
    assert torch.equal(token, model(ids).logits[:, -1:].argmax(-1))
    expected = model(torch.cat([ids, token], 1)).logits[:, -1:].argmax(-1)
    one = runners.runner(name, runners.twin_of(model, name, "eager"), prefill, 8)
    one.step()
    assert torch.equal(one.token, expected)


def test_a_cache_that_no_window_fits_into_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer that slides has kept its window alone, where these caches hold a prompt whole."""
    config = Gemma2Config(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(SpecacheError, match="none of them is available on this machine"):
        run_bench.usable(["compiled-static"], config)
    assert "compiled-static: left out: the model has sliding layers" in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_baselines_and_a_batch(config: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    given = ("--contexts", "100", "--batch-sizes", "2", "--rounds", "1", "--no-first-tokens")
    assert main(["bench", config, *given, "--methods", "compiled", "compiled-static", "--json", str(file)]) == 0
    assert [row["batch"] for row in json.loads(file.read_text())["rows"]] == [2, 2]


def test_other_methods_are_measured_beside_those_that_the_file_has(config: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    for methods in (["uncompiled"], ["full"]):
        given = ("--contexts", "100", "--rounds", "1", "--no-first-tokens", "--methods", *methods)
        assert main(["bench", config, *given, "--json", str(file)]) == 0
    assert [row["method"] for row in json.loads(file.read_text())["rows"]] == ["uncompiled", "full"]
