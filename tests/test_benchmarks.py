"""The benchmarks run end to end at small sizes on any machine, where GPU figures are meaningless."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from specache_compile.bench.results import Results
from specache_compile.errors import SpecacheError

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> str:
    """Return a benchmark's output. It runs in this process, since a new process takes seconds for imports."""
    with mock.patch.object(sys, "argv", [script, *arguments]), contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(script).main()
    return printed.getvalue()


@pytest.mark.slow
def test_the_kernel_benchmark_checks_and_times_every_kernel(tmp_path: Path) -> None:
    run("gpu_kernels", "--smoke", "--bits", "1", "--out", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    assert {row["kernel"] for row in report["rows"]} == {
        "attention", "scores alone", "attention from scores", "selection", "gather", "write through", "quantise",
    }  # fmt: skip
    assert all(row["ms"] > 0 and row["share"] >= 0 for row in report["rows"])
    assert report["provenance"]["command"].startswith("python benchmarks/gpu_kernels.py --smoke")


@pytest.mark.slow
def test_the_decode_benchmark_runs_its_methods_at_two_batch_sizes(tmp_path: Path) -> None:
    methods = ["16 bits, k = 0", "specache 2-bit"]
    printed = run("gpu_decode", "--smoke", "--methods", *methods, "--out", str(tmp_path / "out.json"))
    assert "break-even at batch 1" in printed
    report = json.loads((tmp_path / "out.json").read_text())
    assert not report["not captured"], "no CUDA graph is requested on a CPU"
    rows = report["rows"]
    assert [row["method"] for row in rows] == [method for method in methods for _ in range(2)]
    assert [row["at"] for row in rows[:2]] == ["1", "largest"]
    assert all(row["bytes to device"] > 0 for row in rows[2:])
    assert rows[-1]["batch"] > rows[-2]["batch"] == 1


@pytest.mark.slow
def test_the_benchmark_of_batches_reports_the_throughput_of_all_rows(tmp_path: Path) -> None:
    loads = ("--tokens", "60", "--requests", "4", "--rows", "1", "4", "--answer", "6", "--repeats", "1")
    run("batching", *loads, "--model", "examples/needle-llama", "--lowering", "eager", "--out", str(tmp_path / "out"))
    report = json.loads((tmp_path / "out").read_text())
    assert [row["as_alone"] for row in report["rows"]] == [4, 4]


@pytest.mark.slow
def test_the_cold_start_benchmark_times_each_way_with_empty_and_filled_caches(tmp_path: Path) -> None:
    """Six processes, started from this one."""
    printed = run(
        "cold_start", "--lowering", "eager", "--layers", "1", "--warms", "1", "--out", str(tmp_path / "out.json")
    )
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["caches"], row["way"]) for row in rows] == [
        (state, way) for state in ("cold", "warm") for way in ("torch.compile", "specache", "specache, traces kept")
    ]
    assert rows[-1]["seconds"] < rows[-2]["seconds"]
    assert all(row["way"] in printed for row in rows)


@pytest.mark.parametrize(("reuse", "corrected"), [(0.0, 0.0), (0.5, 0.25), (0.75, 1.0), (1.0, 0.5)])
def test_a_forced_gather_brings_its_share_in_every_step(reuse: float, corrected: float) -> None:
    from gpu_decode import forced_gather

    from held_tiers import in_pages
    from specache_compile.kernels.movement.tier_ops import prefetch
    from specache_compile.kernels.state.cursor import CURSOR_SIZE

    k, pairs = 8, torch.randn(2, 3, 512, 2, 4)
    host, slots = in_pages(pairs), torch.zeros(2, 3, k, 2, 4)
    cursor = torch.cat([torch.zeros(2, CURSOR_SIZE, dtype=torch.int64), host.table], 1)

    def gather(*operands: torch.Tensor, **grid: int) -> None:
        prefetch(*operands)

    index = torch.full((2, 3, k), -1, dtype=torch.int32)
    forced = forced_gather(gather, reuse, corrected)
    moved = []
    for _ in range(5):
        for grid in ({}, {"programs": 6}):
            traffic = torch.zeros(1, dtype=torch.int64)
            forced(index, cursor, host.pages, slots, index, traffic, **grid)
            moved.append(traffic.item() / (6 * 2 * 4 * 4))
            assert torch.equal(slots[1, 2], pairs[1, 2, index[1, 2].long()])
    assert moved[2:] == [k * (1 - reuse), k * corrected] * 4


@pytest.mark.slow
def test_computed_steps_equal_the_stored_ones(tmp_path: Path) -> None:
    import computed_steps

    computed_steps.main(["--devices", "RTX 4090", "--out", str(tmp_path / "out.json")])
    results = Path(computed_steps.__file__).parent / "results" / "computed_steps.json"
    found, kept = (json.loads(path.read_text()) for path in (tmp_path / "out.json", results))
    assert found["break-even"]["RTX 4090"] == kept["break-even"]["RTX 4090"]
    theirs = [row for row in kept["rows"] if row["device"] == "RTX 4090"]
    assert [row["ms"] for row in found["rows"]] == pytest.approx([row["ms"] for row in theirs], rel=1e-6)


def test_the_break_even_is_the_shortest_context_from_which_on_steps_are_no_longer() -> None:
    from gpu_decode import break_even

    rows = [
        {"method": method, "context": context, "batch": 1, "ms": ms}
        for context, ours in ((4096, 1.0), (8192, 3.0), (16384, 2.0), (32768, 1.0))
        for method, ms in (("16 bits, k = 0", 2.0), ("specache best", ours))
    ]
    assert break_even(rows) == 16384
    assert break_even(rows[:4]) is None


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
    case = gpu_decode.Case("smoke", "specache best", 300, 0, 0.5)
    gpu_decode.run_case(SimpleNamespace(device=cpu), case, SimpleNamespace(host_gib=1), {}, results)
    assert [(row["at"], row["batch"]) for row in results.rows] == [("1", 1), ("largest", 16)]


def test_results_are_there_after_every_row_and_belong_to_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cpu = tmp_path / "out.json", torch.device("cpu")
    first = Results(out, "a benchmark", cpu, resume=True)
    assert first.once("limits", lambda: 7) == 7
    first.add({"context": 5, "ms": 1.0})
    again = Results(out, "a benchmark", cpu, resume=True)
    assert again.once("limits", lambda: 8) == 7
    assert (len(again.find(context=5)), again.find(context=6)) == (1, [])
    assert not Results(out, "a benchmark", cpu, resume=False).rows
    monkeypatch.setattr(torch, "__version__", "0.0")
    with pytest.raises(SpecacheError, match=r"torch .*, not 0\.0; name another file"):
        Results(out, "a benchmark", cpu, resume=True)
    with pytest.raises(SpecacheError, match="is a folder; name a file in it"):
        Results(tmp_path, "a benchmark", cpu, resume=False)


def test_a_soak_compares_its_calls_and_reports_what_it_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import soak

    names = ("greedy", "decode steps", "crop", "fork", "interrupted step")
    monkeypatch.setattr(soak, "OPERATIONS", [entry for entry in soak.OPERATIONS if entry[0] in names])
    assert soak.main(["--calls", "13", "--seed", "39", "--recompile-limit", "100"]) == 0
    printed = capsys.readouterr()
    assert "13 operations" in printed.err
    figures = {name.strip(): int(number) for name, number in re.findall(r"^([a-z ]+?) +(\d+)$", printed.out, re.M)}
    assert figures["sessions alive at the end"] == figures["caches in the pool"]
    assert figures["steps interrupted"] > 0
    assert re.search(r"^all +13 ", printed.out, re.M)


@pytest.mark.slow
def test_a_soak_of_the_server_compares_each_answer(capsys: pytest.CaptureFixture[str]) -> None:
    import serve_soak

    assert serve_soak.main(["--minutes", "1.5", "--clients", "4"]) == 0
    assert "turn 2" in capsys.readouterr().out
