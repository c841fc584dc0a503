"""`specache eval`, as a person types it: its results, its errors, and what an interruption leaves."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

import specache_compile as sc
from conftest import NEEDLE_LLAMA, byte_tokenizer, failing, greedy, prompt, tiny_llama
from specache_compile.cli import main
from specache_compile.errors import OptionError, SpecacheError
from specache_compile.evaluation import run_eval
from specache_compile.evaluation.cell_tables import table
from specache_compile.evaluation.plots import draw
from specache_compile.evaluation.result_rows import ResultRow, config_hash, read_rows, write_rows
from specache_compile.evaluation.settings import parse_setting, running

MODEL = str(NEEDLE_LLAMA)
QUICK = ("--lengths", "200", "--samples", "2", "--no-plots")


def evaluate(out: Path, *more: str) -> int:
    return main(["eval", MODEL, "--out", str(out), *(more or QUICK)])


@pytest.mark.slow
def test_an_interruption_loses_no_finished_row_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the end there are a table, a JSON file and pictures with one line of provenance."""
    command = ("--tasks", "needle", "perplexity", "--methods", "uncompiled", "kivi:bits=1", "--lengths", "256")
    command += ("--samples", "3", "--seed", "5")
    with patch.object(run_eval, "measure", failing(run_eval.measure, KeyboardInterrupt, call=3)):
        assert evaluate(tmp_path, *command) == 130
    captured = capsys.readouterr()
    assert "the same command goes on from here" in captured.err
    assert re.search(r"^uncompiled +256 +100\.0% +1\.000$", captured.out, re.MULTILINE)  # a finished row
    kept = read_rows(tmp_path / "results.json")
    assert len(kept) == 2

    again = Mock(wraps=run_eval.measure)
    monkeypatch.setattr(run_eval, "measure", again)
    for _ in range(2):
        assert evaluate(tmp_path, *command) == 0
        assert again.call_count == 4 - 2
    every = read_rows(tmp_path / "results.json")
    assert {key: every[key] for key in kept} == kept
    assert re.search(r"^kivi:bits=1 +256 .* 0\.\d+$", capsys.readouterr().out, re.MULTILINE)
    line = (tmp_path / "table.txt").read_text().splitlines()[-1]
    for part in ("specache eval", "--seed 5", "torch 2.", "commit", "weights", "seed 5"):
        assert part in line
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["provenance"] == [line]
    assert [(row["task"], row["method"], row["seed"], row["provenance"]) for row in results["rows"]] == [
        (task, method, 5, line) for method in ("uncompiled", "kivi:bits=1") for task in ("needle", "perplexity")
    ]
    for task in ("needle", "perplexity"):
        assert (tmp_path / f"{task}-kv.png").stat().st_size > 5_000
    # Another seed is another row.
    assert evaluate(tmp_path, "--lengths", "200", "--samples", "2", "--methods", "uncompiled", "--seed", "1") == 0
    assert again.call_count == 3


def test_other_defaults_are_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an option that is off, as those are that a later version brings, is none. A setting has one spelling."""
    assert str(parse_setting("specache:top_k=16,bits=1")) == str(parse_setting("specache:bits=1,top_k=16"))
    now = parse_setting("specache").effective
    assert now["sink_tokens"] == 4
    assert parse_setting("specache:sink_tokens=4").effective == now
    assert parse_setting("specache:sink_tokens=0").effective == {k: v for k, v in now.items() if k != "sink_tokens"}
    assert parse_setting("uncompiled").effective == {}


def test_a_model_is_its_configuration_and_its_chat_template_too() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    before = config_hash(model, tokenizer)
    model.config._name_or_path = "elsewhere"
    assert config_hash(model, tokenizer) == before
    tokenizer.chat_template = "{{ messages }}"
    template = config_hash(model, tokenizer)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}
    assert len({before, template, config_hash(model, tokenizer)}) == 3


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The method and cell of each row that is measured; nothing is computed."""
    found: list[tuple[str, str]] = []

    def measure(_: Any, setting: Any, task: str, cell: Any, key: str, *more: Any) -> ResultRow:
        found.append((str(setting), cell.name))
        return ResultRow(key, task, str(setting), cell.name, cell.context, 1.0, "keys found", 3, 0, 1.0, 0.1)

    monkeypatch.setattr(run_eval, "measure", measure)
    return found


def test_a_blind_run_has_rows_of_its_own(tmp_path: Path, measured: list[tuple[str, str]]) -> None:
    """Its eviction policies read the context exactly and evict once, unless their options set a block."""
    methods = ("uncompiled", "snapkv", "h2o", "roco:eviction_block=4")
    for more in ((), ("--blind",), ("--blind",)):
        assert evaluate(tmp_path, "--lengths", "200", "--samples", "3", "--no-plots", "--methods", *methods, *more) == 0
    blind = ["uncompiled", "snapkv", "h2o:eviction_block=prompt", "roco:eviction_block=4"]
    assert [method for method, _ in measured] == [*methods, *blind]


def test_shared_prefills_are_rows_of_their_own_and_go_cell_by_cell(
    tmp_path: Path, measured: list[tuple[str, str]]
) -> None:
    """So that one cell's prefills alone are in memory; the table has the same order as without."""
    requested = ("--lengths", "200", "300", "--samples", "3", "--no-plots", "--methods", "uncompiled", "kivi:bits=1")
    tables = []
    for more in ((), ("--share-prefills",)):
        assert evaluate(tmp_path, *requested, *more) == 0
        tables.append([row["method"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]])
    by_setting = [(s, c) for s in ("uncompiled", "kivi:bits=1") for c in ("200", "300")]
    assert measured == 2 * sorted(by_setting, key=lambda pair: pair[1])
    assert tables[0] == tables[1] == ["uncompiled"] * 2 + ["kivi:bits=1"] * 2


def answered(method: str, cell: str, scores: list[float]) -> ResultRow:
    each = {"each": [{"score": score} for score in scores]}
    mean = sum(scores) / len(scores)
    return ResultRow(f"{method}{cell}", "needle", method, cell, int(cell), mean, "keys found", 4, 0, 0.5, 0.1, each)


def test_a_cell_that_the_model_itself_fails_is_marked() -> None:
    rows = [
        answered("uncompiled", "512", [1, 1, 1, 1]), answered("uncompiled", "8192", [1, 1, 1, 0]),
        answered("kivi", "512", [1, 0, 1, 0]), answered("kivi", "8192", [0, 0, 0, 0]),
    ]  # fmt: skip
    head, _, full, failed, kivi, beyond, foot = table(rows).splitlines()
    assert " ".join(head.split()) == "needle context keys found above uncompiled, points ± pairs device KV"
    assert full.split() == ["uncompiled", "512", "100.0%", "0.500"]
    assert failed.split() == ["uncompiled", "8192", "*", "75.0%", "0.500"]
    # Differences 0, -1, 0, -1: mean -50, deviation 57.7, of which 3.182 / 2 is 91.9.
    assert kivi.split() == ["kivi", "512", "50.0%", "-50.0", "91.9", "4", "0.500"]
    assert beyond.split()[:3] == ["kivi", "8192", "*"]
    assert foot.startswith("* evidence of nothing: the uncompiled model itself is right in less than 80%")


def distant(method: str, task: str, each: list[float]) -> ResultRow:
    """Return a row of a distance from the full cache: `each` window's or text's."""
    kind = {"kl": sum(each) / len(each), "agreement": 0.5, "each": each}
    places = {"0": 0.1, "8": 0.2}
    texts = [{"kl": kl, "length": 10, "tokens": [1]} for kl in each]
    detail: dict[str, Any] = {
        "closeness": {"kinds": {"forced": kind}},
        "long": {"each": texts, "by_position": places, "intervals": places},
    }[task]
    return ResultRow(method, task, method, "160", 160, 0.5, "KL", len(each), 0, 0.2, 1.0, detail, "x")


@pytest.mark.parametrize("task", ["closeness", "long"])
def test_distances_are_paired_with_the_last_methods(task: str, tmp_path: Path) -> None:
    """Two methods that differ by the same in every window differ for certain, however far the windows are apart."""
    far, near = distant("fp8", task, [1.1, 2.1, 9.1]), distant("kivi:bits=2", task, [1.0, 2.0, 9.0])
    head, _, first, second = table([far, near]).splitlines()
    assert "above kivi:bits=2, nats" in head
    assert first.split()[-4:] == ["+0.1000", "0.0000", "3", "0.200"]
    assert "+" not in second
    assert [path.name for path in draw([far, near], tmp_path)] == [f"{task}-kv.png"]


def test_rows_that_this_call_does_not_request_stay_in_the_file(tmp_path: Path) -> None:
    row = ResultRow("a", "needle", "uncompiled", "256", 256, 1.0, "keys found", 3, 0, 1.0, 0.1)
    path, done = tmp_path / "results.json", {key: replace(row, key=key) for key in "abc"}
    write_rows(path, done, ["c", "a", "d"])
    assert read_rows(path) == done
    assert [row["key"] for row in json.loads(path.read_text())["rows"]] == ["c", "a"]
    write_rows(path, {"e": replace(row, key="e")}, ["e"])  # by another call at the same time
    assert read_rows(path).keys() == {*done, "e"}
    for damage in ("{", "[]", '{"rows": [{}]}'):
        path.write_text(damage)
        with pytest.raises(SpecacheError, match=r"results\.json has no rows of an evaluation"):
            read_rows(path)


def test_perplexities_are_compared_window_by_window() -> None:
    full = ResultRow("a", "perplexity", "uncompiled", "512", 512, 3.0, "perplexity", 9, 0, 1.0, 0.1)
    rows = [replace(full, detail={"nats": [1.0, 1.1]}), replace(full, method="kivi", detail={"nats": [1.5, 1.7]})]
    head, _, *lines = table(rows).splitlines()
    assert " ".join(head.split()) == "perplexity context perplexity above uncompiled, nats ± pairs device KV"
    assert [" ".join(line.split()) for line in lines] == [
        "uncompiled 512 3.000 1.000", "kivi 512 3.000 +0.5500 0.6353 2 1.000",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("uncompiled", None),
        ("specache", {}),
        ("specache:top_k=16,bits=1", {"bits": 1, "top_k": 16}),
        ("specache:exact_layers=[0]", {"exact_layers": (0,)}),
        ("specache:speculate=false,zero_point=minimum", {"speculate": False, "zero_point": "minimum"}),
    ],
)
def test_a_setting_is_a_name_and_options(text: str, options: dict[str, Any] | None) -> None:
    given = parse_setting(text).options
    assert (given if given is None else {k: v for k, v in given.items() if k != "method"}) == options


def test_a_model_under_a_setting_is_afterwards_as_it_was() -> None:
    model = tiny_llama()
    ids = prompt(200)
    plain = greedy(model, ids, 8)
    for bits in (1, 2):
        with running(model, parse_setting(f"specache:bits={bits},top_k=1024,host_bits=16"), "eager"):
            assert torch.equal(greedy(model, ids, 8), plain)
            assert sc.stats(model).decodes == 7
        assert model._compiled_call_impl is None
        with pytest.raises(sc.SpecacheError, match="has run no graph"):
            sc.stats(model)


@pytest.mark.parametrize(
    "text",
    ["uncompiled:bits=1", "specache:bits", "specache:=1", "specache:bits=1,bits=2", "specache:bits=3", "specache:[]=1"],
)
def test_a_bad_setting_is_named(text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(repr(text))):
        parse_setting(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "lru"), "method 'lru': "),
        (("--methods", "specache:bits=3"), "option bits=3: accepted are"),
        (("--tasks", "perplexity", "--blind"), "task 'perplexity' has no question for --blind to hide"),
        (("--text", "/no/such/file"), "--text /no/such/file: no such file"),
        (("--text", MODEL + "/model.safetensors"), "is no UTF-8 text"),
        (("--text", MODEL + "/generation_config.json", "--tasks", "perplexity"), "the text has "),
        (("--lengths", "4000"), "needle 4000: 4,000 tokens exceed the model's context of 2,304"),
        (("--lengths", "50"), "this prompt needs at least"),
        (("--prefill-chunk", "64"), "--prefill-chunk needs --share-prefills"),
        (("--out", MODEL + "/config.json"), "File exists: "),
        (("--methods", "uncompiled", "kvzip"), "method='kvzip': its choice takes a second reading"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert evaluate(tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert error[-1].startswith("specache: ")
    assert not any("row" in line for line in error[:-1])  # the progress bar's unit
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_cache_takes_the_full_caches_bytes_in_every_dtype(dtype: torch.dtype) -> None:
    """In a table it stands beside the uncompiled model, whose share is 1."""
    model = tiny_llama(num_hidden_layers=1).to(dtype)
    model.compile(backend="specache", options={"method": "full", "lowering": "eager"})
    with torch.no_grad():
        model(prompt(256), use_cache=True)
    assert run_eval.kv_ratio(model) == 1.0
