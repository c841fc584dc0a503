"""EleutherAI's harness drives a compiled model unchanged (examples/harness.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import specache_compile as sc
from conftest import NEEDLE_LLAMA

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'specache-compile[harness]'")

from harness import evaluate, harnessed, pass_keys, tokenizer_for  # noqa: E402

MODEL = str(NEEDLE_LLAMA)
LOSSLESS = {"bits": 1, "top_k": 64, "lowering": "eager"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_harness_scores_a_compiled_model_as_it_scores_the_model(tmp_path: Path) -> None:
    tasks = pass_keys(tmp_path, 400, 3)
    plain, compiled = (harnessed(MODEL, tokenizer_for(MODEL), options) for options in (None, LOSSLESS))
    assert evaluate(plain, tasks) == evaluate(compiled, tasks) == {"pass_key_generate": 1.0, "pass_key_choose": 1.0}
    assert sc.stats(compiled.model).compiles > 0  # and it was the compiled model that answered


def test_a_longbench_task_of_the_harness_runs_on_a_local_file(tmp_path: Path) -> None:
    """LongBench v2's own prompt and scoring, on records in its format."""
    record = {
        "question": "Which is it?", "choices": ["red", "green", "blue", "grey"], "answer": "A",
        "context": "It is red. " * 20,
    }  # fmt: skip
    path = tmp_path / "longbench2.jsonl"
    path.write_text("".join(json.dumps({**record, "answer": letter}) + "\n" for letter in "ABCD"))
    shipped = Path(lm_eval.__file__).parent / "tasks" / "longbench2" / "_longbench_common_yaml"
    local = {
        **yaml.safe_load(shipped.read_text()), "task": "longbench2_many_shot",
        "dataset_path": "json", "dataset_name": None, "test_split": "train",
        "dataset_kwargs": {"data_files": str(path), "cache_dir": str(tmp_path)},
    }  # fmt: skip
    plain, compiled = (harnessed(MODEL, tokenizer_for(MODEL), options) for options in (None, LOSSLESS))
    # The same context with each of the four letters as the right answer: one of them is the model's.
    assert evaluate(plain, [local]) == evaluate(compiled, [local]) == {"longbench2_many_shot": 0.25}
    assert sc.stats(compiled.model).compiles > 0
