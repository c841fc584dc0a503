"""The shipped model and the programs around it, as a person runs them."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import train_needle
from conftest import NEEDLE_LLAMA, byte_tokenizer, eager
from needle_samples import sample
from quality import TABLES, arguments
from specache_compile.checkpoints.names import KNOWN
from specache_compile.cli import parsed
from specache_compile.evaluation.settings import parse_setting
from specache_compile.evaluation.tasks import TASKS
from specache_compile.evaluation.tasks.haystack import library_source
from specache_compile.evaluation.tasks.needle import KEY_DIGITS
from train_needle import TrainingStage

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(NEEDLE_LLAMA, dtype=torch.bfloat16).eval()


def recalled(runner: Any, length: int, count: int) -> float:
    """Share of pass keys found, needles at evenly spread depths."""
    source, rng = library_source(held_out=True), random.Random(5)
    requested = [sample(source, length - KEY_DIGITS, i / (count - 1), rng) for i in range(count)]
    ids = torch.tensor([list(one.prompt) for one in requested])
    out = runner.generate(ids, max_new_tokens=KEY_DIGITS, do_sample=False)
    right = [bytes(row[-KEY_DIGITS:].tolist()) == one.answer for row, one in zip(out, requested, strict=True)]
    return sum(right) / count


@pytest.mark.slow
def test_specache_brings_back_what_one_bit_alone_loses(model: Any) -> None:
    """The paper's claim: within 2 points of the full cache, where plain 1-bit KIVI loses a fifth of the keys."""

    def overall(runner: Any) -> float:
        return sum(recalled(runner, length, 20) for length in (256, 2048)) / 2

    full = overall(model)
    assert full >= 0.99
    assert overall(eager(model, setting="paper", bits=1, top_k=0)) < full - 0.2
    assert overall(eager(model, setting="paper", bits=1, top_k=64)) >= full - 0.02


def test_training_and_evaluation_texts_do_not_overlap() -> None:
    assert len(library_source(held_out=False)) > 5_000_000
    assert len(library_source(held_out=True)) > 300_000


@pytest.mark.slow
def test_the_training_script_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_needle, "STAGES", (TrainingStage(256, 1), TrainingStage(512, 1)))
    monkeypatch.setattr(train_needle, "TOKENS_PER_STEP", 1024)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_needle", "--out", "model", "--samples", "2"])
    train_needle.main()
    assert all((tmp_path / "model" / name).exists() for name in ("model.safetensors", "tokenizer.json"))


def test_the_shipped_tokenizer_gives_byte_values() -> None:
    """And replacement characters for what is no UTF-8."""
    tokenizer, text = byte_tokenizer(), "def café():\n\treturn '\x00Ā two  spaces , <s>'"
    assert list(tokenizer("")["input_ids"]) == tokenizer.all_special_tokens == []
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer(text).keys() == {"input_ids", "attention_mask"}
    assert tokenizer.decode(list(text.encode()), skip_special_tokens=True) == text
    every = [*range(256), *b"\xe2\x82", *b"\xf0\x9f\x98"]
    assert tokenizer.decode(every) == bytes(every).decode(errors="replace")
    assert len(tokenizer) == 256


@pytest.mark.parametrize("name", TABLES)
def test_a_quality_table_is_a_command_that_parses(name: str) -> None:
    args = parsed(arguments(name))
    assert args.model in KNOWN or (ROOT / args.model / "config.json").exists()
    assert set(args.tasks) <= set(TASKS)
    assert args.methods[0] == "uncompiled"
    assert [str(parse_setting(method)) for method in args.methods]
