"""The step as a graph over two streams: what orders it, and what is found missing when something is taken out."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import networkx as nx
import pytest
import torch
from transformers import LlamaForCausalLM

import specache_compile as sc
from conftest import LOSSLESS, compile_copy, prompt, tiny_llama
from specache_compile.compat import cache_of, with_cache
from specache_compile.explaining.schedule import check_order, launches_of, schedule_of
from specache_compile.explaining.times.step_time import BETWEEN

WAIT = torch.ops.specache.wait.default
PREFETCH = torch.ops.specache.prefetch.default


# What attends over the slots, by setting, of which each runs two lanes.
ATTENTION = {"paper": "decode_attention", "best": "attend_scored"}


@pytest.fixture(scope="module", params=ATTENTION)
def explained(request: pytest.FixtureRequest) -> sc.Explanation:
    return sc.explain(tiny_llama(), prompt_length=1000, options={"setting": request.param, "speculate": True})


def changed(explained: sc.Explanation) -> torch.fx.GraphModule:
    graph = explained.graph("decode")
    assert isinstance(graph, torch.fx.GraphModule)
    return torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))


def test_every_access_of_two_steps_is_ordered(explained: sc.Explanation) -> None:
    dag = explained.schedule()
    assert check_order(dag) == []
    assert nx.is_directed_acyclic_graph(dag)
    assert {step for step, _ in dag.nodes} == {0, 1}
    assert {stream for _, stream in dag.nodes(data="stream")} == {"compute", "copy"}
    assert sum(kind == "wait" for _, _, kind in dag.edges(data="kind")) == 2  # the second step's, one a layer


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"hit_rate": True}, {"speculate": False}, {"bits": 16}, {"top_k": 0}])
def test_every_access_is_ordered_under_other_options(options: dict) -> None:
    other = sc.explain(tiny_llama(), prompt_length=200, options=options)
    assert check_order(other.schedule()) == []


@pytest.mark.parametrize("layer", [0, 1])
def test_without_a_wait_the_check_names_the_slots_that_are_read_too_early(
    explained: sc.Explanation, layer: int
) -> None:
    graph = changed(explained)
    graph.graph.erase_node(graph.graph.find_nodes(op="call_function", target=WAIT)[layer])
    problems = check_order(schedule_of(launches_of(graph)))
    assert any(f"s slots_{layer} unordered after prefetch" in problem for problem in problems)
    assert not any(f"slots_{1 - layer}" in problem for problem in problems)


def test_a_wait_behind_its_attention_is_too_late(explained: sc.Explanation) -> None:
    graph = changed(explained)
    wait = graph.graph.find_nodes(op="call_function", target=WAIT)[0]
    op = getattr(torch.ops.specache, ATTENTION[explained.options.setting]).default
    graph.graph.find_nodes(op="call_function", target=op)[0].append(wait)
    assert any("s slots_0 unordered" in problem for problem in check_order(schedule_of(launches_of(graph))))


@pytest.mark.parametrize("kind", ["wait", "launch"])
def test_no_edge_of_these_kinds_can_be_spared(explained: sc.Explanation, kind: str) -> None:
    dag = explained.schedule()
    edges = [(a, b) for a, b, k in dag.edges(data="kind") if k == kind and dag.nodes[b]["op"] != "offload"]
    assert edges
    for edge in edges:
        fewer = dag.copy()
        fewer.remove_edge(*edge)
        # A launch whose neighbour on the copy stream was issued at the same place is ordered by that one too.
        if not nx.has_path(fewer, *edge):
            assert check_order(fewer), edge


def test_a_fetch_before_its_selection_is_found(explained: sc.Explanation) -> None:
    graph = changed(explained)
    select = graph.graph.find_nodes(op="call_function", target=torch.ops.specache.select_topk.default)[0]
    fetch = graph.graph.find_nodes(op="call_function", target=PREFETCH)[0]
    fetch.append(select)
    assert any("writes selected_0 unordered after prefetch" in p for p in check_order(schedule_of(launches_of(graph))))


def test_what_it_cannot_be_saved_as_is_one_clear_line(explained: sc.Explanation, tmp_path: Path) -> None:
    with pytest.raises(sc.SpecacheError, match=r"\.html for the report or \.json for the timeline; the schedule is"):
        explained.save(tmp_path / "step.dot")


def test_the_predicted_timeline_opens_in_perfetto(explained: sc.Explanation, tmp_path: Path) -> None:
    explained.save(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(explained.spans)
    assert any("not measured" in str(event.get("args")) for event in events if event["ph"] == "M")
    fetched = sum(e["args"]["pcie_bytes"] for e in slices if e["name"] == "prefetch")
    assert fetched == pytest.approx(explained.bytes_fetched * (1 - explained.load().reuse))
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx((explained.step().seconds - BETWEEN) * 1e6)
    for stream in range(3):  # a stream does one thing at a time
        lane = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == stream)
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in itertools.pairwise(lane))


@pytest.mark.slow
def test_a_measured_timeline_stands_beside_the_predicted_one(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    twin = compile_copy(llama)
    with torch.no_grad():
        cache = cache_of(twin(prompt(100), use_cache=True))
        twin(prompt(1), **with_cache(cache))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            twin(prompt(1), **with_cache(cache))
    sc.explain(llama, prompt_length=102, options=LOSSLESS).save(tmp_path / "both.json", profile=profile)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events if event.get("ph") == "X" and event["pid"] != 1}
    assert any("specache::decode_attention" in str(name) for name in names)
    assert min(event["ts"] for event in events if event.get("ph") == "X" and event["pid"] != 1) == 0
    with pytest.raises(sc.SpecacheError, match="give a torch"):
        sc.explain(llama, prompt_length=102).save(tmp_path / "bad.json", profile=object())
