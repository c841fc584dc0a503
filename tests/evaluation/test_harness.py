"""EleutherAI's harness drives a compiled model unchanged (examples/harness.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import specache_compile as sc
from conftest import NEEDLE_LLAMA

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'specache-compile[harness]'")

from harness import evaluate, harnessed, pass_keys, tokenizer_for  # noqa: E402

MODEL = str(NEEDLE_LLAMA)
LOSSLESS = {"bits": 1, "top_k": 64, "lowering": "eager"}
# Finds some keys, not all: a question that is left out or repeated would change the figure.
LOSSY = {"bits": 1, "setting": "paper", "top_k": 0, "lowering": "eager"}
QUESTIONS, RANKS = 9, 2


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_shipped_tokenizer_ends_and_pads_with_byte_0() -> None:
    tokenizer, text = tokenizer_for(MODEL), "def café():\n\treturn '\x00 two  spaces'"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0)
    assert tokenizer(text)["input_ids"] == list(text.encode())


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


RANK = """
import json, sys
from pathlib import Path
from harness import evaluate, harnessed, tokenizer_for
import specache_compile as sc

model, (options, tasks), folder = sys.argv[1], map(json.loads, sys.argv[2:4]), Path(sys.argv[4])
lm = harnessed(model, tokenizer_for(model), options)
requested, generate = [], lm._model_generate

def note_and_generate(context, **kwargs):
    requested.append(lm.tok_decode(context[0]))
    return generate(context, **kwargs)

lm._model_generate = note_and_generate
reported = {"figures": evaluate(lm, tasks), "requested": requested, "compiles": sc.stats(lm.model).compiles}
(folder / f"rank{lm.rank}.json").write_text(json.dumps(reported, default=float))
"""


def test_the_harness_shares_its_questions_among_ranks(tmp_path: Path) -> None:
    """Each rank asks a compiled model of its own; the figures are those of one process, some right and some wrong."""
    tasks = pass_keys(tmp_path, 1000, QUESTIONS)
    alone = evaluate(harnessed(MODEL, tokenizer_for(MODEL), LOSSY), tasks)
    assert alone is not None
    assert 0 < alone["pass_key_generate"] < 1

    (tmp_path / "rank.py").write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launch, str(tmp_path / "rank.py"), MODEL, json.dumps(LOSSY), json.dumps(tasks), str(tmp_path)]
    on_cpus = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT / "examples")}
    environment = {**os.environ, **on_cpus}
    ended = subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]

    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS))
    assert first["figures"] == alone
    assert second["figures"] is None
    assert first["compiles"] > 0 < second["compiles"]
    assert not set(first["requested"]) & set(second["requested"])
    assert len({*first["requested"], *second["requested"]}) == QUESTIONS
