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
from specache_compile.explaining.plan import step_time
from specache_compile.explaining.schedule import Launch, Schedule, check_order, launches_of

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
    dag = explained.schedule().dag
    assert check_order(dag) == []
    assert nx.is_directed_acyclic_graph(dag)
    assert {step for step, _ in dag.nodes} == {0, 1}
    assert {stream for _, stream in dag.nodes(data="stream")} == {"compute", "copy"}
    assert sum(kind == "wait" for _, _, kind in dag.edges(data="kind")) == 2  # the second step's, one a layer


@pytest.mark.whole
@pytest.mark.parametrize("options", [{"hit_rate": True}, {"speculate": False}, {"bits": 16}, {"top_k": 0}])
def test_every_access_is_ordered_under_other_options(options: dict) -> None:
    other = sc.explain(tiny_llama(), prompt_length=200, options=options)
    assert check_order(other.schedule().dag) == []


@pytest.mark.parametrize("layer", [0, 1])
def test_without_a_wait_the_check_names_the_slots_that_are_read_too_early(
    explained: sc.Explanation, layer: int
) -> None:
    graph = changed(explained)
    graph.graph.erase_node(graph.graph.find_nodes(op="call_function", target=WAIT)[layer])
    problems = check_order(Schedule(launches_of(graph)).dag)
    assert any(f"s slots_{layer} unordered after prefetch" in problem for problem in problems)
    assert not any(f"slots_{1 - layer}" in problem for problem in problems)


def test_a_wait_behind_its_attention_is_too_late(explained: sc.Explanation) -> None:
    graph = changed(explained)
    wait = graph.graph.find_nodes(op="call_function", target=WAIT)[0]
    op = getattr(torch.ops.specache, ATTENTION[explained.options.setting]).default
    graph.graph.find_nodes(op="call_function", target=op)[0].append(wait)
    assert any("s slots_0 unordered" in problem for problem in check_order(Schedule(launches_of(graph)).dag))


@pytest.mark.parametrize("kind", ["wait", "launch"])
def test_no_edge_of_these_kinds_can_be_spared(explained: sc.Explanation, kind: str) -> None:
    dag = explained.schedule().dag
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
    assert any("writes wanted_0 unordered after prefetch" in p for p in check_order(Schedule(launches_of(graph)).dag))


def test_what_it_cannot_be_saved_as_is_one_clear_line(explained: sc.Explanation, tmp_path: Path) -> None:
    with pytest.raises(sc.SpecacheError, match=r"\.html for the report or \.json for the timeline; the schedule is"):
        explained.save(tmp_path / "step.dot")


def two_layers(fetch: float, work: float) -> tuple[list[Launch], dict[str, float]]:
    """Per layer: wait, attend (`work` seconds), fetch (`fetch` seconds)."""
    launches = []
    for i in range(2):
        slots = (f"slots_{i}",)
        launches += [
            Launch(f"wait_{i}", "wait", "compute", str(i), (), (), guards=slots[0]),
            Launch(f"attend_{i}", "decode_attention", "compute", str(i), slots, ()),
            Launch(f"fetch_{i}", "prefetch", "copy", str(i), (), slots, brings=slots[0]),
        ]
    return launches, {f"attend_{i}": work for i in range(2)} | {f"fetch_{i}": fetch for i in range(2)}


def test_short_fetches_hide_behind_the_other_layer() -> None:
    step = step_time(*two_layers(fetch=1.0, work=2.0))
    assert (step.seconds, step.waited, step.hidden) == (4.0, 0.0, 1.0)
    assert all(name.startswith(("attend", "wait")) for _, name in step.critical_path)


def test_long_fetches_bound_the_step() -> None:
    """By hand: the link is never idle, so two fetches of 5 s are a step of 10 s, of which 2 s compute."""
    step = step_time(*two_layers(fetch=5.0, work=1.0))
    assert (step.seconds, step.compute, step.copy, step.waited) == (10.0, 2.0, 10.0, 8.0)
    assert step.hidden == pytest.approx(0.2)
    assert any(name.startswith("fetch") for _, name in step.critical_path)


def test_the_critical_path_has_no_gap(explained: sc.Explanation) -> None:
    schedule = explained.schedule()
    times = schedule.times()
    path = schedule.critical_path(times)
    assert times[path[0]][0] == 0.0
    assert times[path[-1]][1] == max(times[key][1] for key in times if schedule.dag.nodes[key]["stream"] == "compute")
    for before, after in itertools.pairwise(path):
        assert times[before][1] == times[after][0]


def test_the_predicted_timeline_opens_in_perfetto(explained: sc.Explanation, tmp_path: Path) -> None:
    explained.save(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == explained.schedule().dag.number_of_nodes()
    assert any("not measured" in str(event.get("args")) for event in events if event["ph"] == "M")
    assert sum(e["args"]["pcie_bytes"] for e in slices if e["name"] == "prefetch") == 2 * explained.bytes_fetched
    for stream in (0, 1):  # a stream does one thing at a time
        lane = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == stream)
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in itertools.pairwise(lane))


@pytest.mark.whole
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
