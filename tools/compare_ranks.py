"""Compare families split over ranks with one process, on CPUs.

    torchrun --nproc-per-node 4 tools/compare_ranks.py [FOLDER [CASE ...] [--faults]]

A case is family:setting; the default is all cases. Each rank prints its results and writes them to FOLDER/RANK.json,
which `tests/runtime/test_ranks.py` reads. Exit status 1: tokens or bytes differ.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.distributed import DistributedConfig

import specache_compile as sc
import tests_path  # noqa: F401
from conftest import LOSSLESS, tiny_llama  # which also tells Dynamo the sizes that differ
from families import FAMILIES, Family
from specache_compile.compat import cache_of
from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.runtime import tiers
from specache_compile.runtime.ranks import check_same, ranks_of
from specache_compile.runtime.records import find_record
from specache_compile.runtime.session import Session
from specache_compile.runtime.state import device_total, predicted_bytes

SETTINGS = {
    "lossless": LOSSLESS,
    "lossy": {
        "lowering": "eager",
        "bits": 2,
        "group_size": 32,
        "residual_length": 32,
        "top_k": 8,
        "speculate": True,
    },
}
SPLIT = ("llama 3", "qwen2", "qwen3", "gemma2", "mixtral")
# So many that two and four ranks have whole ones.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
PROMPT = torch.randint(0, 128, (1, 70), generator=torch.Generator().manual_seed(1))
NEW = 16


def family(name: str) -> Family:
    found = next(one for one in FAMILIES if one.name == name)
    return replace(found, settings={**found.settings, **HEADS})


def split(folder: Path, whole: Any) -> Any:
    """This rank's part of a model, by way of a checkpoint."""
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).eval()


def tokens_of(model: Any, prompt: torch.Tensor = PROMPT, **settings: Any) -> list[int]:
    return model.generate(prompt, max_new_tokens=NEW, do_sample=False, **settings)[0, prompt.shape[1] :].tolist()


def compiled(model: Any, options: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="specache", options=options)


def collectives(graph_module: Any) -> list[str]:
    """The names of what a graph's ranks call together, in its order."""
    called = [target.split(".")[1] for node in graph_module.graph.nodes if "c10d" in (target := str(node.target))]
    return [name for name in called if name != "wait_tensor"]


def compare(folder: Path, name: str, setting: str) -> tuple[dict[str, Any], Any]:
    """One family under one setting, split over ranks and in one process: tokens and bytes of both; and the compiled
    model."""
    whole, options = family(name).model(), SETTINGS[setting]
    expected = None
    if dist.get_rank() == 0:
        expected = tokens_of(whole if setting == "lossless" else compiled(whole, options))
    model = compiled(split(folder / name.replace(" ", "-"), whole), options)
    tokens = tokens_of(model)
    stats = sc.stats(model)
    decode = next(graph for graph in find_record(model).graphs if graph.phase == "decode")
    layers = [replace(layer, heads=HEADS["num_key_value_heads"]) for layer in decode.captured.layers]
    one = predicted_bytes(parse_options(options), layers, 1, PROMPT.shape[1] + NEW)
    return {
        "case": f"{name}:{setting}",
        "expected": expected,
        "tokens": tokens,
        "lanes": stats.lanes,
        "ranks": stats.ranks,
        "shares": [stats.device_bytes / device_total(one), stats.host_bytes / one["host"]],
        "collectives": collectives(decode.rewrites.modules["decode"]),
        "plain": collectives(decode.captured.graph_module),
    }, model


def problems(seen: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    expected = broadcast(seen["expected"])
    share = 1 / dist.get_world_size()
    right = {
        "tokens": seen["tokens"] == expected,
        "lanes": seen["lanes"] == 1,
        "ranks": seen["ranks"] == dist.get_world_size(),
        "shares": all(part <= share + 0.01 for part in seen["shares"]),
        "collectives": seen["collectives"] == seen["plain"] != [],
    }
    return [name for name, holds in right.items() if not holds]


def broadcast(value: Any) -> Any:
    """What the first rank has here."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def error_of(call: Callable[[], Any]) -> str | None:
    """The text of a SpecacheError; None without one."""
    try:
        call()
    except sc.SpecacheError as error:
        return str(error)
    return None


def refusals(folder: Path, model: Any) -> dict[str, str | None]:
    """Each rank's errors if the ranks differ or cannot share a model."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    errors = {"prompt": error_of(lambda: tokens_of(model, PROMPT[:, : 60 + rank]))}
    group = ranks_of(list(model.parameters()))
    errors["options"] = error_of(lambda: check_same(group, parse_options({"top_k": 8 + rank}), {}))
    layers = [LayerShape(2, 8, torch.float32, torch.device("cpu"))]
    session = Session(parse_options(SETTINGS["lossy"]), layers, 1, 70, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "allowance", lambda held, asked, ranks: 10 if rank == last else 1 << 30)
        errors["host memory"] = error_of(lambda: session.reserve(70))
    assert not session.state
    cache = cache_of(model.generate(PROMPT, max_new_tokens=2, return_dict_in_generate=True))
    errors["save"] = error_of(lambda: sc.save(cache, folder / "session"))
    lone = split(folder / "lone", tiny_llama(num_key_value_heads=1))
    errors["heads"] = error_of(lambda: tokens_of(torch.compile(lone, backend="specache")))
    return errors


class Die(LogitsProcessor):
    """Kill the last rank in the middle of a generation."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 5 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores


def main(folder: Path, cases: list[str], faults: bool) -> int:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    folder = Path(broadcast(str(folder)))
    path = folder / f"{dist.get_rank()}.json"
    results: dict[str, Any] = {"cases": []}
    for case in cases:
        seen, model = compare(folder, *case.split(":"))
        seen["problems"] = problems(seen)
        results["cases"].append(seen)
        if dist.get_rank() == 0:
            print(f"{case}: {', '.join(seen['problems']) or 'as one process'}", flush=True)
    if faults:
        results["refusals"] = refusals(folder, model)
    path.write_text(json.dumps(results))
    dist.barrier()
    if faults:
        tokens_of(model, logits_processor=LogitsProcessorList([Die()]))
    dist.barrier()  # the folder may be the first rank's own
    dist.destroy_process_group()
    return int(any(seen["problems"] for seen in results["cases"]))


if __name__ == "__main__":
    *given, faults = (*sys.argv[1:], False) if "--faults" not in sys.argv else (*sys.argv[1:-1], True)
    everything = [f"{name}:{setting}" for name in SPLIT for setting in SETTINGS]
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(Path(given[0] if given else scratch), given[1:] or everything, faults))
