"""The benchmarks run end to end at small sizes on any machine, where GPU figures are meaningless."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from conftest import NEEDLE_LLAMA, byte_tokenizer, prompt, tiny_llama
from specache_compile.bench.results import Results
from specache_compile.compat import with_cache
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import Reader
from specache_compile.methods.field import LayerShape
from specache_compile.runtime.session import Session
from specache_compile.runtime.tiers import Tiers

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))


def run(script: str, *arguments: str) -> str:
    """Return a benchmark's output. It runs in this process, since a new process takes seconds for imports."""
    with mock.patch.object(sys, "argv", [script, *arguments]), contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(script).main()
    return printed.getvalue()


@pytest.mark.slow
def test_latent_attention_is_timed_beside_plain_compile(tmp_path: Path) -> None:
    flags = ("--contexts", "64", "--dtypes", "float32", "--shapes", "MiniCPM3", "--rounds", "1", "--lowering", "eager")
    printed = run("latent_attention", *flags, "--out", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"compiled", "specache"}
    assert all(row["step_ms"] > 0 for row in rows)
    assert "MiniCPM3" in printed


@pytest.mark.slow
def test_the_kernel_benchmark_checks_and_times_every_kernel(tmp_path: Path) -> None:
    run("gpu_kernels", "--smoke", "--bits", "1", "--out", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    assert {row["kernel"] for row in report["rows"]} == {
        "attention", "scores alone", "attention from scores", "selection", "gather", "write through", "quantise",
        "center's share",
    }  # fmt: skip
    assert all(row["ms"] > 0 and row["share"] >= 0 for row in report["rows"])
    assert report["provenance"]["command"].startswith("python benchmarks/gpu_kernels.py --smoke")


OURS = ["HF DynamicCache", "16 bits, k = 0", "specache 2-bit"]
RUNS, SKIPPED = ["fp8 StaticCache, compiled"], ["HF DynamicCache, offloaded"]
MAYBE = [f"HF QuantizedCache, {name}" for name in ("quanto 2-bit", "fp8")]


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Return the output and the report of the decode benchmark."""
    out = tmp_path_factory.mktemp("decode") / "out.json"
    printed = run("gpu_decode", "--smoke", "--methods", *OURS, *SKIPPED, *MAYBE, *RUNS, "--out", str(out))
    return printed, json.loads(out.read_text())


@pytest.mark.slow
def test_the_decode_benchmark_runs_its_methods_at_three_batch_sizes(decode: tuple[str, dict[str, Any]]) -> None:
    printed, report = decode
    assert "break-even at batch 1" in printed
    assert not report["not captured"], "no CUDA graph is requested on a CPU"
    rows = report["rows"][: 3 * len(OURS)]
    assert [row["method"] for row in rows] == [method for method in OURS for _ in range(3)]
    assert [row["at"] for row in rows[:3]] == ["1", "equal", "largest"]
    fetching = [row for row in rows if row["method"] == "specache 2-bit"]
    assert all(row["bytes to device"] > 0 for row in fetching)
    assert fetching[-1]["batch"] > fetching[0]["batch"] == 1


@pytest.mark.slow
def test_the_decode_benchmark_runs_the_baselines_it_can_and_reports_why_others_do_not_run(
    decode: tuple[str, dict[str, Any]],
) -> None:
    printed, report = decode
    ran = {row["method"] for row in report["rows"]}
    assert ran.isdisjoint(report["skipped"])
    assert ran | report["skipped"].keys() == {*OURS, *SKIPPED, *MAYBE, *RUNS}
    assert ran >= set(RUNS)
    assert torch.cuda.is_available() or report["skipped"].keys() >= set(SKIPPED)
    assert all(f"skipped {method}: {reason}" in printed for method, reason in report["skipped"].items())


@pytest.mark.parametrize("method", ["fp8 StaticCache, compiled", "HF StaticCache, compiled"])
def test_a_baseline_equals_a_plain_cache_of_the_same_pairs(
    method: str,
) -> None:
    from baselines import FULL, forced_cache

    model = tiny_llama()
    layers = [LayerShape(2, 16, torch.float32, torch.device("cpu"))] * 2
    answers = []
    for name in (method, FULL):
        torch.manual_seed(0)
        cache = forced_cache(name, model.config, layers, 2, 40, 64)
        with torch.no_grad():
            for place in (40, 41):
                out = model(prompt(1, 2), **with_cache(cache), position_ids=torch.full((2, 1), place))
        answers.append(out.logits.softmax(-1))
    close = 0.1 if "fp8" in method else 1e-4  # three bits of mantissa
    torch.testing.assert_close(*answers, atol=close, rtol=0)


@pytest.mark.slow
def test_the_benchmark_of_batches_reports_the_throughput_of_all_rows(tmp_path: Path) -> None:
    loads = ("--tokens", "60", "--requests", "4", "--rows", "1", "4", "--answer", "6", "--repeats", "1")
    run("batching", *loads, "--model", "examples/needle-llama", "--lowering", "eager", "--out", str(tmp_path / "out"))
    report = json.loads((tmp_path / "out").read_text())
    assert [row["as_alone"] for row in report["rows"]] == [4, 4]


@pytest.mark.slow
def test_the_server_benchmark_reports_a_second_turns_share(tmp_path: Path) -> None:
    small = ("--tokens", "1000", "--layers", "1", "--repeats", "1", "--lowering", "eager")
    printed = run("serve", *small, "--out", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    cold, second = (report[f"{turn} turn: seconds to the first token, median"] for turn in ("first", "second"))
    assert report["share"] == pytest.approx(second / cold, rel=0.05)
    assert 0 < second < cold
    assert str(report["share"]) in printed


@pytest.mark.slow
def test_the_prefill_benchmark_compares_with_plain_compilation(tmp_path: Path) -> None:
    run("gpu_prefill", "--smoke", "--out", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["torch.compile", "uncompiled", "specache best", "specache 2-bit"]
    cache = 2 * 2 * 2 * 256 * 16 * 4  # two layers, K and V, two heads, float32
    assert all(cache < row["predicted bytes"] < 20 * cache for row in rows)


@pytest.mark.slow
def test_the_cold_start_benchmark_times_each_way_with_empty_and_filled_caches(tmp_path: Path) -> None:
    """Six processes, started from this one."""
    printed = run("cold_start", "--smoke", "--layers", "1", "--out", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["caches"], row["way"]) for row in rows] == [
        (state, way) for state in ("cold", "warm") for way in ("torch.compile", "specache", "specache, traces kept")
    ]
    assert rows[-1]["seconds"] < rows[-2]["seconds"]
    assert all("of plain" in printed and row["way"] in printed for row in rows)


@pytest.mark.parametrize(("reuse", "corrected"), [(0.0, 0.0), (0.5, 0.25), (0.75, 1.0), (1.0, 0.5)])
def test_a_forced_gather_brings_its_share_in_every_step(reuse: float, corrected: float) -> None:
    from gpu_decode import forced_gather

    from held_tiers import in_pages
    from specache_compile.kernels.movement.tier_ops import refill
    from specache_compile.kernels.state.page_table import Pages

    k, pairs = 8, torch.randn(2, 3, 512, 2, 4)
    host, slots = in_pages(pairs), torch.zeros(2, 3, k, 2, 4)

    def gather(selected: torch.Tensor, pages: torch.Tensor, *rest: torch.Tensor, **grid: int) -> None:
        refill(selected, Pages(pages, host.table), *rest)

    index = torch.full((2, 3, k), -1, dtype=torch.int32)
    forced = forced_gather(gather, reuse, corrected)
    moved = []
    for _ in range(5):
        for grid in ({}, {"programs": 6}):
            traffic = torch.zeros(1, dtype=torch.int64)
            forced(index, host.pages, slots, index, traffic, **grid)
            moved.append(traffic.item() / (6 * 2 * 4 * 4))
            assert torch.equal(slots[1, 2], pairs[1, 2, index[1, 2].long()])
    assert moved[2:] == [k * (1 - reuse), k * corrected] * 4


def test_a_row_reports_which_pairs_its_steps_move() -> None:
    """A correction moves more pairs if nothing is fetched ahead."""
    from gpu_decode import case_of

    cases = {
        method: case_of("llama-3-8b", method, 8192, 0, 0.5, None)
        for method in ("kivi 2-bit", "specache 2-bit", "specache best", "specache best, two lanes")
    }
    moves = [(case.reuse, case.corrected) for case in cases.values()]
    assert moves == [(0.5, 0), (0.5, 0), (0.5, 0.44), (0.5, 0.34)]


@pytest.mark.slow
def test_computed_steps_equal_the_stored_ones(tmp_path: Path) -> None:
    import computed_steps

    computed_steps.main(["--devices", "RTX 4090", "--out", str(tmp_path / "out.json")])
    results = Path(computed_steps.__file__).parent / "results" / "computed_steps.json"
    found, kept = (json.loads(path.read_text()) for path in (tmp_path / "out.json", results))
    assert found["break-even"]["RTX 4090"] == kept["break-even"]["RTX 4090"]
    theirs = [row for row in kept["rows"] if row["device"] == "RTX 4090"]
    assert [row["ms"] for row in found["rows"]] == pytest.approx([row["ms"] for row in theirs], rel=1e-6)


@pytest.mark.slow
def test_a_checkpoints_tokens_are_compared_up_to_ties(tmp_path: Path) -> None:
    run("gpu_checkpoint", "--smoke", "--out", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["setting"] for row in rows} == set(importlib.import_module("gpu_checkpoint").LOSSLESS)
    assert all(row["holds"] and (row["equal"] == 8 or row["gap"] <= 2 * row["rounding"]) for row in rows)


def test_keys_found_are_compared_prompt_by_prompt() -> None:
    beside = importlib.import_module("gpu_checkpoint").beside

    def row(*scores: float) -> dict[str, Any]:
        each = [{"score": score} for score in scores]
        return {"method": "m", "context": 9, "score": sum(scores) / len(scores), "detail": {"each": each}}

    known = row(*[1, 0] * 10)
    assert beside(known, known, 12)["holds"]
    assert beside(row(*[1, 0] * 9, 0, 1), known, 12)["holds"], "as many, of other prompts"
    lost = beside(row(*[0] * 20), known, 12)
    assert (lost["difference"], lost["holds"]) == (-0.5, False)


@pytest.mark.parametrize("script", ["gpu_kernels", "gpu_decode", "gpu_prefill", "gpu_checkpoint"])
def test_without_a_gpu_only_the_smoke_run_is_offered(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as stopped:
        run(script)
    assert stopped.value.code == 2
    assert "no CUDA device: only --smoke runs here" in capsys.readouterr().err


def test_a_day_with_a_gpu_is_one_command_that_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu

    written, tables = tmp_path / "written", tmp_path / "tables"
    steps = {
        "probe": ["pass"],
        "tests": ["import os; os.abort()"],
        "kernels": ["import time; time.sleep(99)"],
        "decode": [f"open({str(written)!r}, 'a').write('once ')"],
        "table": [f"open({str(tables)!r}, 'a').write('table ')"],
    }
    monkeypatch.setattr(gpu, "command", lambda name, *rest: [sys.executable, "-c", *steps[name]])
    monkeypatch.setattr(gpu, "SHORTEST", 0.01)
    day = ["--smoke", "--only", *steps, "--out", str(tmp_path)]
    assert gpu.main([*day, "--limit", "3"]) == gpu.TIME_IS_UP
    assert "ended by SIGABRT" in (tmp_path / "tests.log").read_text()
    assert "killed after" in (tmp_path / "kernels.log").read_text()
    assert "time was up: kernels, decode, table; run the same again" in capsys.readouterr().out
    steps["kernels"] = ["pass"]
    assert gpu.main(day) == gpu.FAILED
    assert "failed: tests" in capsys.readouterr().out
    steps |= {"tests": ["pass"], "probe": ["raise SystemExit(1)"]}
    assert gpu.main(day) == gpu.DONE, "what is done is not done again"
    assert written.read_text() == "once "
    assert tables.read_text() == "table table ", "it is of what there is by then"
    with pytest.raises(SpecacheError, match="smoke True, not False; name another file"):
        gpu.Results(tmp_path / "summary.json", "benchmarks/gpu.py", torch.device("cpu"), resume=True, smoke=False)


def test_a_failed_probe_ends_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    monkeypatch.setattr(gpu, "command", lambda *given: [sys.executable, "-c", "raise SystemExit(1)"])
    assert gpu.main(["--smoke", "--out", str(tmp_path)]) == gpu.FAILED
    assert len(json.loads((tmp_path / "summary.json").read_text())["rows"]) == 1


@pytest.mark.parametrize(("device", "smoke"), [("a GPU", True), ("a GPU (simulated)", False), ("a GPU", False)])
def test_a_break_even_is_reported_only_for_measured_settings(
    device: str, smoke: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_table

    rows = [
        {"model": "m", "method": method, "context": 8192, "cap": 1 << 30, "batch": 1, "at": "largest", "ms": ms,
         "tokens/s": 1e3 / ms, "roofline share": 0.5, "captured": True}
        for method, ms in (("16 bits, k = 0", 2.0), ("specache 2-bit", 1.0))
    ]  # fmt: skip
    report = {"provenance": {"device": device, "torch": "2.11"}, "settings": {"smoke": smoke}, "rows": rows}
    (tmp_path / "gpu_decode.json").write_text(json.dumps(report))
    gpu_table.main(["--out", str(tmp_path / "table.json")])
    measured = device == "a GPU" and not smoke
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "table.json").read_text())
    assert ("in break_even.py: MEASURED = {'a GPU': 8192}" in printed) == measured
    assert ("which mean nothing" in printed) != measured
    assert found["break-even"] == (8192 if measured else None)


def test_a_probe_that_failed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_probe

    answers = iter([{"holds": False, "says": "no"}, {"holds": True, "says": "yes"}])
    monkeypatch.setattr(gpu_probe, "run", lambda name, smoke: next(answers))
    monkeypatch.setattr(gpu_probe, "ANYWHERE", ("gather by programs",))
    monkeypatch.setattr(gpu_probe, "PROBES", dict.fromkeys(gpu_probe.ANYWHERE))
    given = ["--smoke", "--resume", "--out", str(tmp_path / "out.json")]
    assert [gpu_probe.main(given) for _ in range(3)] == [1, 0, 0]


def test_a_batch_that_does_not_fit_is_made_smaller_until_each_kind_has_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_decode

    def measure(model: Any, case: Any, batch: int, args: Any) -> dict[str, Any]:
        if batch > 16:
            raise torch.OutOfMemoryError
        return {"batch": batch, "ms": 1.0}

    monkeypatch.setattr(gpu_decode, "measure", measure)
    monkeypatch.setattr(gpu_decode, "sequence_bytes", lambda model, case: (1, 0))
    monkeypatch.setattr(gpu_decode, "largest_batch", lambda model, case, host: 20)
    monkeypatch.setattr(gpu_decode, "roofline_share", lambda *given: 0.5)
    cpu = torch.device("cpu")
    results = Results(tmp_path / "out.json", "a benchmark", cpu, resume=False)
    case, args = (
        gpu_decode.Case("smoke", "HF DynamicCache", 300, 0, 0.5),
        SimpleNamespace(host_gib=1, at=gpu_decode.BATCHES),
    )
    gpu_decode.run_case(SimpleNamespace(device=cpu), case, 20, args, {}, results)
    assert [(row["at"], row["batch"]) for row in results.rows] == [("1", 1), ("equal", 16), ("largest", 16)]


def test_tests_that_have_passed_are_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-p", "gpu_tests", "--passed", "passed", "--rootdir", ".", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    lines = [
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
        for _ in range(2)
    ]
    assert "1 failed, 1 passed" in lines[0]
    assert "1 failed, 1 deselected" in lines[1]


def test_results_are_there_after_every_row_and_belong_to_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cpu = tmp_path / "out.json", torch.device("cpu")
    first = Results(out, "a benchmark", cpu, resume=True)
    assert first.once("limits", lambda: 7) == 7
    first.add({"context": 5, "ms": 1.0})
    again = Results(out, "a benchmark", cpu, resume=True)
    assert again.once("limits", lambda: 8) == 7
    assert (again.has(context=5), again.has(context=6)) == (True, False)
    assert not Results(out, "a benchmark", cpu, resume=False).rows
    monkeypatch.setattr(torch, "__version__", "0.0")
    with pytest.raises(SpecacheError, match=r"torch .*, not 0\.0; name another file"):
        Results(out, "a benchmark", cpu, resume=True)


@pytest.fixture
def soak() -> Any:
    import soak

    return soak


def restrict(soak: Any, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr(soak, "OPERATIONS", [entry for entry in soak.OPERATIONS if entry[0] in names])


def test_a_soak_compares_its_calls_and_reports_what_it_did(
    soak: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    restrict(soak, monkeypatch, ["greedy", "decode steps", "crop", "fork", "interrupted step", "failing copy"])
    out = tmp_path / "out.json"
    assert soak.main(["--calls", "13", "--seed", "39", "--recompile-limit", "100", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "13 operations" in printed.err
    report = json.loads(out.read_text())
    assert report["failed"] == ""
    assert sum(report["calls"].values()) == 13
    figures = report["figures"]
    assert figures["sessions alive at the end"] == figures["caches in the pool"]
    assert figures["copies failed"] > 0
    assert figures["steps interrupted"] > 0
    assert all(name in printed.out for name in (*report["calls"], *figures))


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "status"), [(False, 0), (True, 1)])
def test_a_soak_of_the_server_compares_each_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: bool, status: int
) -> None:
    import serve_soak

    talks_of = serve_soak.talks_of

    def talks(*given: Any) -> Any:
        found = talks_of(*given)
        for talk in found:
            talk.expected = ["?" if wrong else said for said in talk.expected]
        return found

    monkeypatch.setattr(serve_soak, "talks_of", talks)
    assert serve_soak.main(["--minutes", "1.5", "--clients", "4"]) == status
    printed = capsys.readouterr()
    assert ("not '?'" in printed.err) == wrong
    assert wrong or "turn 2" in printed.out


def test_the_operations_of_a_soak_are_those_of_its_seed(soak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[Any]] = []

    def note(state: Any, draw: random.Random) -> int:
        drawn[-1].append((state.now, draw.random()))
        return 0

    monkeypatch.setattr(soak, "OPERATIONS", [(name, weight, note) for name, weight, _ in soak.OPERATIONS])
    for seed in ("5", "5", "6"):
        drawn.append([])
        assert soak.main(["--calls", "10", "--seed", seed]) == 0
    assert drawn[0] == drawn[1] != drawn[2]


def wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    select = Tiers.select
    monkeypatch.setattr(Tiers, "select", lambda self, rows: select(self, rows.flip(0)))


def kept_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    advance, kept = Session.advance, set()
    monkeypatch.setattr(Session, "advance", lambda self, *given: (kept.add(self), advance(self, *given)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "names", "message"),
    [
        (wrong_rows, ["new cache", "reorder rows", "decode steps"], "(decode steps): logits"),
        (wrong_rows, ["beams"], "(beams): the tokens of rows"),
        (kept_sessions, ["new cache", "drop"], "are still alive"),
    ],
)
def test_a_soak_stops_at_a_planted_fault_and_prints_how_to_reproduce_it(
    soak: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plant: Any, names: Any, message: str
) -> None:
    restrict(soak, monkeypatch, names)
    plant(monkeypatch)
    assert soak.main(["--calls", "60", "--seed", "7", "--recompile-limit", "100"]) == 1
    out = capsys.readouterr().out
    assert message in out
    number = re.search(r"operation (\d+) \(", out)
    again = "python benchmarks/soak.py --seed 7 --calls {} --lowering eager --recompile-limit 100\n"
    assert number
    assert out.endswith(again.format(number[1]))


def verified(text: Path, out: Path) -> list[dict[str, Any]]:
    """Return the rows of two short windows of a text; the file `out` keeps finished ones."""
    model = str(NEEDLE_LLAMA)
    small = ("--model", model, "--contexts", "200", "--samples", "2", "--tokens", "6", "--lowering", "eager")
    run("verify_drafts", *small, "--settings", "specache:verify=3", "--text", str(text), "--out", str(out))
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_windows_that_are_verified_are_kept_for_the_same_text_alone(tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path, word in zip(texts, ("one two three ", "four five six "), strict=True):
        path.write_text(word * 100)
    out = tmp_path / "rows.json"
    first, again = (verified(texts[0], out) for _ in range(2))
    assert [(row["setting"], row["tokens"]) for row in first] == [
        (setting, 6) for setting in ("uncompiled", "specache:verify=3") for _ in range(2)
    ]
    assert all(row["equal"] == 6 for row in first if "equal" in row)
    assert again == first  # the seconds too: nothing was measured again
    with pytest.raises(SpecacheError, match=r"prompts .*; name another file"):
        verified(texts[1], out)


def test_overlapping_windows_are_reported_during_verification(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("one two three " * 20)
    options = argparse.Namespace(contexts=[200], samples=2, seed=0, text=[text])
    with pytest.warns(UserWarning, match="2 windows of 200 tokens overlap in a text of 280"):
        importlib.import_module("verify_drafts").prompts_of(options, Reader(byte_tokenizer()))
