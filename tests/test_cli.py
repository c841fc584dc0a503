"""The `specache` command, as a person types it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import NEEDLE_LLAMA
from specache_compile.cli import main
from specache_compile.explaining import explain as explaining
from specache_compile.serving import command as serving

MODEL = str(NEEDLE_LLAMA)


_explained: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def explanations_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What several tests ask `explain` for is explained once."""
    explain = explaining.explain

    def explain_once(*given: Any, **more: Any) -> Any:
        asked = repr((given, more))
        if asked not in _explained:
            _explained[asked] = explain(*given, **more)
        return _explained[asked]

    monkeypatch.setattr(explaining, "explain", explain_once)


def test_explain_prints_tables_of_at_most_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", MODEL, "--prompt-length", "2048", "--bits", "1"]) == 0
    out = capsys.readouterr().out
    assert "4 attentions rewritten" in out
    assert max(map(len, out.splitlines())) <= 100


def test_explain_prints_a_graph_after_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["explain", MODEL, "--prompt-length", "64", "--speculate", "--graph", "decode", "--after", "overlap"]) == 0
    )
    assert "specache.prefetch" in capsys.readouterr().out


def test_explain_as_json_holds_what_the_tables_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", MODEL, "--prompt-length", "2048", "--json", "--device", "l4", "--tflops", "100"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["note"] == "every figure is computed, not measured"
    figures = {"name": "L4, changed", "hbm_gbps": 300, "pcie_gbps": 12.5, "tflops": 100, "vram_gib": 24}
    assert data["device"].items() >= figures.items()
    assert data["memory"]["full_cache"] > sum(data["memory"]["by_tier"].values()) > 0
    assert sum(node["cost"]["to_device"] for node in data["nodes"]) == data["step"]["to_device"] > 0
    assert data["step"]["critical_path"]


@pytest.mark.parametrize("flag", [["--nodes"], ["--diff", "decode", "prefetch"]])
def test_explain_prints_nodes_and_diffs(capsys: pytest.CaptureFixture[str], flag: list[str]) -> None:
    assert main(["explain", MODEL, "--prompt-length", "64", "--speculate", *flag]) == 0
    out = capsys.readouterr().out
    assert "prefetch" in out
    assert flag[0] != "--nodes" or max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("drafts", "told"),
    [(["--verify", "4"], "Verification(verifications=1, acceptance=1.0"), (["--lookup"], "widened          1")],
)
def test_generate_finds_the_pass_key_and_verifies(
    capsys: pytest.CaptureFixture[str], drafts: list[str], told: str
) -> None:
    filler = "def nothing():\n    return None\n" * 20
    prompt = f"{filler}\nThe pass key is 40712. Remember it.\n{filler}\nWhat is the pass key? The pass key is "
    how = ["--max-new-tokens", "5", "--lowering", "eager", *drafts, "--stats"]
    assert main(["generate", MODEL, "--prompt", prompt, *how]) == 0
    captured = capsys.readouterr()
    assert "40712" in captured.out
    assert "bytes_to_device" in captured.err
    assert told in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "/no/such/model"], "no checkpoint at /no/such/model"),
        (["explain", MODEL, "--top-k", "-3"], "top_k=-3: give a whole number"),
        (["explain", MODEL, "--prompt-length", "64", "--graph", "encode"], "no phase 'encode'"),
        (["explain", MODEL, "--prompt-length", "64", "--graph", "decode", "--after", "sort"], "no pass 'sort'"),
        (["explain", MODEL, "--prompt-length", "0"], "prompt_length=0"),
        (["explain", MODEL, "--device", "TPU"], "unknown device 'TPU': known are A6000"),
        (["explain", MODEL, "--reuse", "2"], "reuse=2.0"),
        (["explain", MODEL, "--pcie-gbps", "0"], "pcie_gbps=0.0"),
        (["explain", MODEL, "--prompt-length", "64", "--diff", "decode", "sort"], "no pass 'sort'"),
        (["explain", MODEL, "--prompt-length", "64", "--save", "report.pdf"], "report.pdf"),
        (["explain", str(Path(__file__))], "no usable config at"),
        (["explain", str(Path(__file__).parent)], "no usable config at"),
        (["generate", MODEL, "--prompt-file", "/no/such/file"], "/no/such/file"),
        (["generate", MODEL, "--prompt", "a", "--verify", "0"], "verify=0: give a number of tokens, 1 to 1024"),
        (["serve", "/no/such/model", "--port", "0"], "no checkpoint at /no/such/model"),
        (["serve", MODEL, "--port", "0", "--sessions", "0"], "--sessions 0: give a number, 1 or more"),
        (["serve", MODEL, "--port", "70000"], "--port 70000"),
        (["serve", MODEL, "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["explain", MODEL, "--verify", "8", "--accepted", "2"], "accepted=2.0: give a share"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert error[-1].startswith("specache: ")


def test_serve_names_what_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NEEDED", ("no_such_module",))
    assert main(["serve", MODEL, "--port", "0"]) == 2
    assert "no_such_module: not installed; pip install 'specache-compile[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"], ["generate", "--help"], ["serve", "--help"]])
def test_help_teaches(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "specache" in capsys.readouterr().out


def test_commands_stand_in_the_order_in_which_a_person_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "{demo,generate,bench,explain,serve,eval,compile,cache}" in help_of(capsys)


@pytest.mark.parametrize("command", ["explain", "bench", "demo"])
def test_a_help_shows_a_dozen_options_and_where_the_rest_stands(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = help_of(capsys, command)
    assert len(re.findall(r"^  -", told, re.MULTILINE)) <= 13
    if command == "explain":
        assert "specache generate --help" in told
        assert "--corrected" in told.split("examples:")[1], "what is not listed is named, with its page"


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    return capsys.readouterr().out
