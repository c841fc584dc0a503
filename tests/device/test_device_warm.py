"""Stored traces on a CUDA device: the second process traces nothing and generates the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import prompt, tiny_llama
from kept_traces import TESTS, in_new_process
from specache_compile.compat import cache_of, with_cache

pytestmark = [pytest.mark.gpu, pytest.mark.one_process]

STEPS, TURN = 5, 20
ONE_PROCESS = """
import json, os, sys
sys.path[:0] = {paths!r}
from conftest import LOSSLESS, tiny_llama
os.environ["SPECACHE_CACHE"] = {cache!r}  # conftest removes it
from torch._dynamo.utils import counters
import specache_compile as sc
from test_device_warm import generated
model = tiny_llama().cuda()
model.compile(backend="specache", options={{**LOSSLESS, "lowering": {lowering!r}, "mode": "reduce-overhead"}})
tokens = generated(model)
print(json.dumps([tokens, counters["stats"]["unique_graphs"], sc.stats(model).replays]))
"""


def generated(model: Any) -> list[int]:
    """Return the next tokens after a prefill, after decode steps and after each token of a further turn."""
    ids, cache, start, found = prompt(90).cuda(), None, 0, []
    for size in (*[1] * STEPS, TURN, 0):
        positions = torch.arange(start, start + ids.shape[1], device="cuda")[None]
        with torch.no_grad():
            out = model(ids, **with_cache(cache), position_ids=positions, use_cache=True)
        start, cache, newest = start + ids.shape[1], cache_of(out), out.logits.argmax(-1)
        found += newest[0, -TURN:].tolist()
        ids = newest[:, -1:] if size == 1 else prompt(size, seed=2).cuda()
    return found


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.quick_for("eager")
def test_the_second_process_traces_nothing_and_generates_equal_tokens(tmp_path: Path, lowering: str) -> None:
    paths = [str(TESTS), str(TESTS / "device")]
    code = ONE_PROCESS.format(paths=paths, cache=str(tmp_path), lowering=lowering)
    (first, graphs, replays), (second, none, again) = (json.loads(in_new_process(code).splitlines()[-1]) for _ in "ab")
    assert first == second == generated(tiny_llama().cuda())
    assert graphs >= 3, "a prefill, a decode and an extend"
    assert none == 0
    assert replays == again >= STEPS - 2, "a graph's first step runs without a recording"
