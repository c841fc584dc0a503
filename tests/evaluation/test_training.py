"""The training loop of the small model: a run is a function of its seed, interrupted or not."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import training
from training import TrainingStage

STAGES = (TrainingStage(16, 5), TrainingStage(24, 3))


class Batches:
    """Random tokens; a person interrupts before the n-th batch."""

    def __init__(self, interrupt: int | None = None) -> None:
        self.interrupt, self.drawn = interrupt, 0

    def __call__(self, length: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        if self.drawn == self.interrupt:
            raise KeyboardInterrupt
        self.drawn += 1
        ids = torch.tensor([[rng.randrange(256) for _ in range(length)] for _ in range(2)])
        return ids, torch.full(ids.shape, 1 / length)


def run(work: Path, batches: Batches) -> dict[str, Any]:
    torch.manual_seed(0)
    model = training.byte_llama(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)
    trained = training.train(model, work, STAGES, 0, batches, lambda model, length: "")
    return trained.state_dict()


def test_an_interrupted_run_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    whole = run(tmp_path / "whole", Batches())
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "interrupted", Batches(interrupt=7))
    assert stop.value.code == 130
    assert "interrupted at step 7" in capsys.readouterr().err
    assert torch.load(tmp_path / "interrupted" / "training.pt", weights_only=True)["step"] == 6
    rest = Batches()
    resumed = run(tmp_path / "interrupted", rest)
    assert rest.drawn == 2
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_save_that_is_cut_short_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "training.pt"
    training.save({"step": 1}, path)

    def half(state: Any, target: Path) -> None:
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        training.save({"step": 2}, path)
    assert torch.load(path, weights_only=True)["step"] == 1


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth() -> None:
    rates = [training.learning_rate(step, 1000) for step in range(1001)]
    peak = training.PEAK_LEARNING_RATE
    assert rates[0] == pytest.approx(peak / training.WARMUP_STEPS)
    assert max(rates) == pytest.approx(peak)
    assert rates[-1] == pytest.approx(peak / 20)
