"""One model over several ranks: this file, started once as their program, in which they compute, differ, and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import specache_compile as sc
from conftest import compiled_with, greedy, prompt, step, tiny_llama
from families import Family
from specache_compile.compat import cache_of
from specache_compile.compile.captured import capture
from specache_compile.errors import SpecacheError
from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.methods.slots import pairs_to_fetch
from specache_compile.model_key import sampled
from specache_compile.passes.reading.local_shards import local, local_shards
from specache_compile.runtime import tiers
from specache_compile.runtime.ranks import check_heads, check_same, ranks_of
from specache_compile.runtime.records import find_record
from specache_compile.runtime.session import Session
from specache_compile.runtime.state import page_bytes, room

RANKS = 2
LOSSY = {"lowering": "eager", "bits": 2, "group_size": 32, "residual_length": 32, "top_k": 8, "speculate": True}
# Seconds for all of it: a rank that waited for ever would be ended here.
LIMIT = 240


def split(folder: Path, whole: LlamaForCausalLM) -> Any:
    """This rank's part of a model, from a checkpoint."""
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(tp_size=RANKS)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).eval()


def generated(model: Any) -> dict[str, Any]:
    """A compiled model's tokens, the bytes of its cache, and what its ranks call together in a decode step."""

    def collectives(graph_module: GraphModule) -> list[str]:
        targets = [str(node.target) for node in graph_module.graph.nodes]
        return [name for one in targets if "c10d" in one and (name := one.split(".")[1]) != "wait_tensor"]

    tokens = greedy(model, prompt(70), 16).tolist()
    decode = next(graph for graph in find_record(model).graphs if graph.captured.phase.name == "decode")
    graphs = (decode.rewrites.modules["decode"], decode.captured.graph_module)
    stats, few = sc.stats(model), pairs_to_fetch(parse_options({}), decode.captured.layers[0])
    return {
        "tokens": tokens, "lanes": stats.lanes, "ranks": (stats.ranks, few),
        "bytes": (stats.device_bytes, stats.host_bytes), "collectives": [collectives(graph) for graph in graphs],
    }  # fmt: skip


def refusals(folder: Path, model: Any) -> dict[str, str]:
    """This rank's errors where the ranks differ or cannot share a model."""

    def error_of(call: Callable[[], Any]) -> str:
        with pytest.raises(SpecacheError) as raised:
            call()
        return str(raised.value)

    rank, group = dist.get_rank(), ranks_of(list(model.parameters()))
    cache = cache_of(model.generate(prompt(70), max_new_tokens=2, return_dict_in_generate=True))
    lone = torch.compile(split(folder / "lone", tiny_llama(num_key_value_heads=1)), backend="specache")
    session = Session(parse_options(LOSSY), [LayerShape(2, 8, torch.float32, torch.device("cpu"))], 1, 70, group)
    with patch.object(tiers, "allowance", lambda held, asked, ranks: 10 if rank else 1 << 30):
        memory = error_of(lambda: session.reserve(70))
    assert not session.state
    return {
        "prompt": error_of(lambda: greedy(model, prompt(60 + rank), 16)),
        "options": error_of(lambda: check_same(group, parse_options({"top_k": 8 + rank}), {})),
        "host memory": memory,
        "save": error_of(lambda: sc.save(cache, folder / "session")),
        "heads": error_of(lambda: greedy(lone, prompt(70), 16)),
    }


def run_rank(folder: Path) -> None:
    """The program of a rank: generate, store what it has seen, and let the last rank die in a further generation."""
    dist.init_process_group("gloo")
    whole = tiny_llama(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    model = torch.compile(split(folder / "llama", whole), backend="specache", options=LOSSY)
    found = {"split": generated(model), "refusals": refusals(folder, model)}
    if dist.get_rank() == 0:
        found["whole"] = generated(compiled_with(whole, LOSSY))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()

    def die(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 75 and dist.get_rank() == RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores

    greedy(model, prompt(70), 16, logits_processor=[die])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has seen; in the end one of them has died."""
    folder = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(
        [*launch, __file__, str(folder)], timeout=LIMIT, capture_output=True, text=True, env=environment
    )
    found = sorted(folder.glob("*.json"))
    assert len(found) == RANKS, ended.stderr[-4000:]
    return [{**json.loads(path.read_text()), "code": ended.returncode, "said": ended.stderr} for path in found]


@pytest.mark.slow
def test_ranks_generate_what_one_process_generates_and_each_holds_its_part(ranks: list[dict[str, Any]]) -> None:
    whole = ranks[0]["whole"]
    for case in (rank["split"] for rank in ranks):
        assert case["tokens"] == whole["tokens"]
        assert (case["lanes"], *case["ranks"]) == (1, RANKS, 64), "of four KV heads, not of this rank's two"
        shares = [own / size for own, size in zip(case["bytes"], whole["bytes"], strict=True)]
        assert all(share <= 1 / RANKS + 0.01 for share in shares), "device and host bytes over one process's"


@pytest.mark.slow
def test_the_rewritten_decode_meets_as_often_as_hugging_faces(ranks: list[dict[str, Any]]) -> None:
    ours, plain = ranks[0]["split"]["collectives"]
    assert ours == plain
    *sums, last = plain
    assert sums in (["all_reduce"] * 5, ["all_reduce"] * 4)  # an older transformers leaves the tokens' table whole
    assert last == "all_gather_into_tensor"


@pytest.fixture
def four_alone() -> Iterator[None]:
    """A process that takes itself for the first of four, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def two_kv_heads(config: str, sizes: tuple[int, ...] = (4,), names: tuple[str, ...] = ("tp",)) -> Any:
    """A model of two KV heads whose key projections lie on a mesh."""
    made = Family("two KV heads", config, {"num_hidden_layers": 1}).model()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    projection = made.model.layers[0].self_attn.k_proj
    weight = distribute_tensor(projection.weight.detach(), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
    projection.weight = torch.nn.Parameter(weight)
    made._tp_size = 4 if "tp" in names else 1
    return made


def test_heads_need_not_divide_where_each_rank_has_all_of_them(four_alone: None) -> None:
    """Where a plan gathers keys before they are heads, and where weights alone are split (FSDP)."""
    with pytest.raises(SpecacheError, match="2 KV heads cannot be split over 4 ranks"):
        check_heads(two_kv_heads("LlamaConfig"))
    gathered = two_kv_heads("Olmo2Config")
    check_heads(gathered)
    check_heads(two_kv_heads("LlamaConfig", names=("fsdp",)))
    replicas = two_kv_heads("LlamaConfig", (2, 2), ("dp_replicate", "fsdp"))
    check_heads(replicas)
    assert ranks_of(list(replicas.parameters())) is None
    found: list[int] = []

    def backend(graph_module: GraphModule, inputs: Any) -> Any:
        found.append(capture(graph_module, parse_options({}), None).layers[0].ranks)
        return lambda *arguments: graph_module(*map(local, arguments))

    keys = gathered.model.layers[0].self_attn.k_proj
    keys.forward = lambda x: torch.nn.functional.linear(x, keys.weight.full_tensor())
    step(torch.compile(gathered, backend=backend), prompt(20))
    assert found == [1], "top_k of two heads, not of eight"


def test_a_distributed_tensor_is_sampled_by_its_local_shard(four_alone: None) -> None:
    """Newer versions of torch list the mesh among its parts."""
    own = torch.arange(8.0)
    whole = DTensor.from_local(own, init_device_mesh("cpu", (4,)), [Replicate()])
    assert sampled([whole]) == sampled([own])


def test_writes_to_distributed_tensors_are_not_lost(four_alone: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    reasons: list[str | None] = []

    def backend(graph_module: GraphModule, inputs: Any) -> Any:
        reasons.append(local_shards(graph_module))
        return graph_module.forward

    def written(x: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(x.clone(), mesh, [Replicate()])
        whole.add_(1.0)
        return whole.to_local()

    def parted(x: torch.Tensor) -> torch.Tensor:
        left, right = DTensor.from_local(x, mesh, [Replicate()]).split(3, -1)
        return left.to_local() + right.to_local()

    x = torch.randn(4, 6)
    with torch.no_grad():
        for function in (written, parted):
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x), rtol=0, atol=0)
    assert reasons == ["a distributed tensor is written to in place (add_)", None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("prompt", "tokens: 60 on rank 0, 61 on rank 1"),
        ("options", "top_k: 8 on rank 0, 9 on rank 1"),
        ("host memory", "shared by the 2 ranks of this machine"),
        ("save", "split over ranks"),
        ("heads", "1 KV heads cannot be split over 2 ranks"),
    ],
)
def test_what_one_rank_would_refuse_all_refuse(ranks: list[dict[str, Any]], difference: str, words: str) -> None:
    for rank in ranks:
        assert words in rank["refusals"][difference]


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["code"] == 1
    assert "SIGKILL" in ranks[0]["said"], "the one that was killed"


def test_processes_with_a_whole_model_each_have_a_budget_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` starts them for the evaluation."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    layers = [LayerShape(2, 8, torch.float32, torch.device("cpu"))]
    session = Session(parse_options({}), layers, 1, 70)
    needed = room(70) // 256 * page_bytes(session.options, layers)["host"]
    assert needed > 0
    session = Session(parse_options({"host_memory": needed}), layers, 1, 70)
    session.reserve(70)
    assert session.statistics.bytes_by_tier["host"] == needed


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
