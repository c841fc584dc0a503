"""From which context a session leaves 16 bits where min_context is "auto"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.runtime import break_even

# As it stands; tests have none.
COMPUTED = break_even.COMPUTED
DEFAULT = parse_options({})
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "computed_steps.json"
CUDA = torch.device("cuda:0")
LAYERS = [LayerShape(8, 128, torch.bfloat16, CUDA)] * 32
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A device by its name and free bytes, which a test may change."""
    there = {"name": H100, "free": 80 << 30}
    monkeypatch.setattr(break_even, "COMPUTED", COMPUTED)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: there["name"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (there["free"], 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    return there


def test_it_holds_what_the_benchmark_computed() -> None:
    found = json.loads(RESULTS.read_text())["break-even"]
    caches = ("KIVI, 2 bits", "as in SpeCache's paper, 2 bits", "default")
    tokens = {name: tuple(row[cache] for cache in caches) for name, row in found.items()}
    assert {name.split()[-1]: row for name, row in tokens.items()} == COMPUTED


@pytest.mark.parametrize(
    ("name", "word"),
    [(H100, "H100"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA L4", "L4"),
     ("NVIDIA RTX A6000", "A6000"), ("NVIDIA H200", "H200"), ("NVIDIA L40S", None),
     ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
     ("NVIDIA GeForce RTX 3060", None)],
)  # fmt: skip
def test_a_device_is_known_by_a_word_of_its_name(gpu: dict[str, Any], name: str, word: str | None) -> None:
    gpu["name"] = name
    kinds = (parse_options({"method": "kivi"}), parse_options({"setting": "paper"}), DEFAULT)
    expected = (0, 0, 0) if word is None else COMPUTED[word]
    assert tuple(break_even.min_context(options, CUDA) for options in kinds) == expected


def test_rows_add_up(gpu: dict[str, Any]) -> None:
    least = COMPUTED["H100"][2]
    assert break_even.min_context(DEFAULT, CUDA, rows=4) == least // 4
    assert break_even.min_context(DEFAULT, torch.device("cpu")) == 0
    assert break_even.stays_in_16_bits(DEFAULT, LAYERS, 4, least // 4 - 1)
    assert not break_even.stays_in_16_bits(DEFAULT, LAYERS, 4, least // 4)


def test_no_more_stays_than_the_device_has_room_for(gpu: dict[str, Any]) -> None:
    """A token of these layers is 128 KiB in 16 bits."""
    assert break_even.stays_in_16_bits(DEFAULT, LAYERS, 1, 8000)
    gpu["free"] = 8000 * (128 << 10)
    assert not break_even.stays_in_16_bits(DEFAULT, LAYERS, 1, 8000)
    assert break_even.stays_in_16_bits(DEFAULT, LAYERS, 1, 7999)
    named = parse_options({"min_context": 9000})
    assert break_even.stays_in_16_bits(named, LAYERS, 1, 8000), "whoever names a number gets it"
