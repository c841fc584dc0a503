"""`specache compile` and `specache cache`, as a person types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import NEEDLE_LLAMA
from kept_traces import Traces, llama, run
from specache_compile.cache_folder import VARIABLE
from specache_compile.cli import main

MODEL, LOWERED = str(NEEDLE_LLAMA), ("--lowering", "eager")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_what_compile_keeps_serves_generate(traces: Traces, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of any length, their answers, and a second turn."""
    out = said(capsys, "compile", MODEL, *LOWERED, "--prompt-length", "200")
    (count,) = re.findall(rf"{re.escape(MODEL)}: (\d+) forms kept in {re.escape(str(folder))}, [\d.]+ MiB", out)
    assert int(count) == traces.count == len(list(folder.glob("*/*/*")))
    traces.next_process()
    for text in ("a short prompt", "a longer one, " * 20):
        said(capsys, "generate", MODEL, *LOWERED, "--prompt", text, "--max-new-tokens", "4")
    assert traces.count == 0
    again = said(capsys, "compile", MODEL, *LOWERED, "--prompt-length", "300")
    assert ": 0 forms kept" in again


def test_cache_lists_sizes_and_clears(kept: Traces, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (environment,) = folder.iterdir()
    elsewhere = environment.rename(environment.with_name("0" * 16))
    assert run(llama(), kept) == 1
    first, _, _, here, other = said(capsys, "cache").splitlines()
    assert first == f"{folder}, of at most 4,096 MiB"
    assert re.fullmatch(rf"{environment.name} \(here\) +1 +[\d.]+ +\d{{4}}-\d\d-\d\d \d\d:\d\d", here)
    assert re.fullmatch(rf"{elsewhere.name} +3 +[\d.]+ +\d{{4}}-\d\d-\d\d \d\d:\d\d", other)
    assert re.fullmatch(rf"{re.escape(str(folder))}: [\d.]+ MiB removed\n", said(capsys, "cache", "--clear"))
    assert list(folder.glob("*/*/*")) == []
    assert said(capsys, "cache").splitlines()[1:] == ["nothing is kept"]
    assert run(llama(), kept) == 1


@pytest.mark.parametrize("command", [("cache",), ("compile", MODEL)], ids=["cache", "compile"])
def test_where_nothing_is_kept_they_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert main([*command]) == 2
    assert capsys.readouterr().err == "specache: nothing is kept: set SPECACHE_CACHE to a folder\n"
