"""The step as a graph over two streams: what orders it, and what is found missing when something is taken out."""

from __future__ import annotations

import copy

import networkx as nx
import pytest
import torch

import specache_compile as sc
from conftest import tiny_llama
from step_order import check_order, schedule_of

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
    dag = schedule_of(explained.graphs["decode"])
    assert check_order(dag) == []
    assert nx.is_directed_acyclic_graph(dag)
    assert {step for step, _ in dag.nodes} == {0, 1}
    assert {stream for _, stream in dag.nodes(data="stream")} == {"compute", "copy"}
    assert sum(kind == "wait" for _, _, kind in dag.edges(data="kind")) == 2  # the second step's, one a layer


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"speculate": False}, {"bits": 16}, {"top_k": 0}])
def test_every_access_is_ordered_under_other_options(options: dict) -> None:
    other = sc.explain(tiny_llama(), prompt_length=200, options=options)
    assert check_order(schedule_of(other.graphs["decode"])) == []


@pytest.mark.parametrize("layer", [0, 1])
def test_without_a_wait_the_check_names_the_slots_that_are_read_too_early(
    explained: sc.Explanation, layer: int
) -> None:
    graph = changed(explained)
    graph.graph.erase_node(graph.graph.find_nodes(op="call_function", target=WAIT)[layer])
    problems = check_order(schedule_of(graph))
    assert any(f"s slots_{layer} unordered after prefetch" in problem for problem in problems)
    assert not any(f"slots_{1 - layer}" in problem for problem in problems)


def test_a_wait_behind_its_attention_is_too_late(explained: sc.Explanation) -> None:
    graph = changed(explained)
    wait = graph.graph.find_nodes(op="call_function", target=WAIT)[0]
    op = getattr(torch.ops.specache, ATTENTION[explained.options.setting]).default
    graph.graph.find_nodes(op="call_function", target=op)[0].append(wait)
    assert any("s slots_0 unordered" in problem for problem in check_order(schedule_of(graph)))


@pytest.mark.parametrize("kind", ["wait", "launch"])
def test_no_edge_of_these_kinds_can_be_spared(explained: sc.Explanation, kind: str) -> None:
    dag = schedule_of(explained.graphs["decode"])
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
    assert any("writes selected_0 unordered after prefetch" in p for p in check_order(schedule_of(graph)))
