"""The short examples run, on the model of this repository that compiles in seconds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDLE = str(ROOT / "examples" / "needle-llama")
PRINTED = {
    "generate": "of a 16-bit cache's bytes",
    "batch": "request 3",
    "inspect_graph": "attentions rewritten",
    "new_method": "of the full cache's bytes",
}
# The models of the two others have a chat template, which the byte-level model lacks.
CHATS = {"chat": ("What is the capital of France?\n\n", "Paris"), "serve": ("", "Paris")}


def run(name: str, *arguments: str, folder: Path, typed: str = "") -> str:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    return subprocess.run(command, cwd=folder, input=typed, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", [*PRINTED, *CHATS])
def test_an_example_is_short_and_its_imports_exist(name: str) -> None:
    assert len(Path(importlib.import_module(name).__file__ or "").read_text().splitlines()) <= 40


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "generate" else pytest.mark.slow) for name in PRINTED]
)
def test_an_example_prints_its_result(name: str, tmp_path: Path) -> None:
    assert PRINTED[name] in run(name, NEEDLE, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_answers(name: str, tmp_path: Path) -> None:
    typed, answer = CHATS[name]
    assert answer in run(name, "smollm2-135m", folder=tmp_path, typed=typed)
