"""The step as a graph over two streams: what orders it, and what is found missing when something is taken out."""

from __future__ import annotations

import networkx as nx
import pytest

import specache_compile as sc
from conftest import tiny_llama
from step_order import check_order, schedule_of


@pytest.fixture(scope="module", params=["paper", "best"])
def explained(request: pytest.FixtureRequest) -> sc.Explanation:
    return sc.explain(tiny_llama(), prompt_length=1000, options={"setting": request.param, "speculate": True})


def test_every_access_of_two_steps_is_ordered(explained: sc.Explanation) -> None:
    dag = schedule_of(explained.graphs["decode"])
    assert check_order(dag) == []
    assert nx.is_directed_acyclic_graph(dag)
    assert {step for step, _ in dag.nodes} == {0, 1}
    assert {stream for _, stream in dag.nodes(data="stream")} == {"compute", "copy"}
    # The second step's, one a layer; and those of four corrections, of which the first has no copy before it.
    corrected = 3 * any(op == "correct" for _, op in dag.nodes(data="op"))
    assert sum(kind == "wait" for _, _, kind in dag.edges(data="kind")) == 2 + corrected
