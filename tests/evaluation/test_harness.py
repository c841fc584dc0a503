"""EleutherAI's harness drives a compiled model unchanged (examples/harness.py)."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import specache_compile as sc

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'specache-compile[harness]'")

from harness import byte_tokenizer, evaluate, pass_keys  # noqa: E402


def test_the_byte_tokenizer_gives_byte_values() -> None:
    tokenizer = byte_tokenizer()
    text = "def café():\n\treturn '\x00 two  spaces'"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.replace("\x00", "").encode())) == text.replace("\x00", "")


def test_the_harness_scores_a_compiled_model_as_it_scores_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "examples" / "needle-llama").eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend="specache", options={"bits": 1, "top_k": 64, "lowering": "eager"})
    tasks = pass_keys(tmp_path, 400, 3)
    full, ours = (evaluate(each, byte_tokenizer(), tasks) for each in (model, compiled))
    assert full == ours == {"pass_key_generate": 1.0, "pass_key_choose": 1.0}
    assert sc.stats(compiled).compiles > 0  # and it was the compiled model that answered
