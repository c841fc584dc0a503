"""Equal layers are compiled once, and the folded graph computes the same as the whole graph."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from conftest import LOSSLESS, greedy, prompt, step, tiny_llama
from families import BY_NAME, Family
from specache_compile.compat import GENERATE_MASKS_ALL, cache_of
from specache_compile.lowering import lower
from specache_compile.lowering.fold_layers import fold_layers
from specache_compile.passes.reading.in_place import mutated
from specache_compile.runtime.records import find_record
from specache_compile.runtime.session import session_of

# Family → number of kinds of layers.
FOLDED = {"gemma2": 2, "smollm3": 2, "glm4_moe": 1, "gpt_neox": 1, "opt": 1}


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Collect the graphs for Inductor, and run them directly, only for the shapes that they were compiled for."""
    made: list[GraphModule] = []

    def compile_fx(part: GraphModule, inputs: list[Any], config_patches: dict[str, Any]) -> Any:
        made.append(part)

        def run(*values: Any) -> Any:
            for value, fake in zip(values, inputs, strict=True):
                assert layout(value, fake) == layout(fake, fake)
            return Interpreter(part).run(*values)

        return run

    monkeypatch.setattr(lower, "compile_fx", compile_fx)
    return made


def layout(value: Any, fake: Any) -> Any:
    """Return the properties that compiled code asserts about an input, without symbolic or irrelevant strides."""
    if not isinstance(fake, Tensor):
        return type(fake) is torch.SymInt or value
    known = [dim for dim, size in enumerate(fake.shape) if isinstance(size, int)]
    sizes = [value.shape[dim] for dim in known]
    strides = [value.stride(dim) for dim in known if fake.shape[dim] > 1 and isinstance(fake.stride(dim), int)]
    return value.dtype, value.device, value.dim(), sizes, strides


def of_depth(family: Family, layers: int) -> Any:
    """Return a model of the family with this many layers, of alternating kinds."""
    settings = {**family.settings, "num_hidden_layers": layers}
    for name in ("layer_types", "no_rope_layers"):
        if name in settings:
            settings[name] = settings[name] * (layers // 2)
    return dataclasses.replace(family, settings=settings).model()


def compiled(model: Any, **options: Any) -> Any:
    model.compile(backend="specache", options={**LOSSLESS, "lowering": "inductor", **options})
    return model


def two_are_unlike(name: str) -> bool:
    """Return whether two parts of a decode are kinds of their own, since `generate` masks every step."""
    return GENERATE_MASKS_ALL and name == "gemma2"


@pytest.mark.quick_for("opt")
@pytest.mark.filterwarnings("ignore::specache_compile.SpecacheWarning")
@pytest.mark.parametrize("name", FOLDED)
def test_a_family_compiles_once_per_kind_of_layer(name: str, compiles: list[GraphModule]) -> None:
    """One region before the layers, one per kind, one after them, in prefill and decode; none for a new bucket."""
    model, plain = (of_depth(BY_NAME[name], 6 if two_are_unlike(name) else 4) for _ in range(2))
    assert torch.equal(greedy(compiled(model), prompt(245), 20), greedy(plain, prompt(245), 20))
    assert len(compiles) == 2 * (FOLDED[name] + 2) + 2 * two_are_unlike(name)


@pytest.mark.quick_for("h2o-3", "random-1")
@pytest.mark.parametrize(("method", "parts"), [("h2o", 3), ("snapkv", 3), ("kcache", 3), ("random", 1)])
def test_layers_that_draw_no_numbers_are_alike(method: str, parts: int, compiles: list[GraphModule]) -> None:
    """Layers of random eviction are compiled whole, since each draws separate numbers."""
    model = tiny_llama(num_hidden_layers=4)
    model.compile(backend="specache", options={"method": method, "lowering": "inductor"})
    step(model, prompt(70))
    assert len(compiles) == parts


def test_few_layers_are_compiled_whole(compiles: list[GraphModule]) -> None:
    greedy(compiled(tiny_llama(num_hidden_layers=3)), prompt(70), 3)
    assert len(compiles) == 2


def test_the_ops_run_in_overlaps_order_on_their_layers_state(
    compiles: list[GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step's ops ran in the order of the rewritten graph, each with its writes."""
    ran: list[tuple[str, int]] = []
    run_node = Interpreter.run_node

    def note(self: Interpreter, node: Node) -> Any:
        for written in mutated(node)[:1]:
            if not isinstance(self.env[written], FakeTensor):
                ran.append((node.target.name().removesuffix("_fused"), self.env[written].data_ptr()))
        return run_node(self, node)

    monkeypatch.setattr(Interpreter, "run_node", note)
    model = compiled(tiny_llama(num_hidden_layers=4), top_k=8)
    out = step(model, prompt(70))
    for _ in range(2):
        ran.clear()
        out = step(model, out.logits[:, -1:].argmax(-1), cache_of(out))
    graph = next(graph for graph in find_record(model).graphs if graph.captured.phase.name == "decode")
    session = session_of(cache_of(out))
    state = {f"{field}_{layer}": value for layer, fields in enumerate(session.state) for field, value in fields.items()}
    expected = [
        (node.target.name(), state[mutated(node)[0].name].data_ptr())
        for node in graph.rewrites.modules["decode"].graph.nodes
        if mutated(node)
    ]
    assert len(expected) == 4 * 5
    assert ran == expected


def layers_of(count: int, change: Any = None) -> tuple[GraphModule, list[Any]]:
    """Return a graph of `count` layers h = relu(h + h @ w), with fakes of its inputs; `change` edits it."""
    mode = FakeTensorMode()
    graph = Graph()
    hidden = graph.placeholder("x")
    names = [f"l_self_modules_layers_modules_{i}_parameters_weight_" for i in range(count)]
    weights = [graph.placeholder(name) for name in names]
    for weight in weights:
        product = graph.call_function(torch.matmul, (hidden, weight))
        hidden = graph.call_function(torch.relu, (graph.call_function(torch.add, (hidden, product)),))
    graph.output((hidden, None, 7))
    if change is not None:
        change(graph)
    module = GraphModule({}, graph)
    with mode, torch.set_grad_enabled(torch.is_grad_enabled()):  # a graph may switch it
        inputs = [torch.empty(3, 4), *(torch.empty(4, 4) for _ in weights)]
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
    return module, inputs


def values_of_several_layers(graph: Graph) -> None:
    relus = graph.find_nodes(op="call_function", target=torch.relu)
    output = next(iter(graph.find_nodes(op="output")))
    with graph.inserting_before(output):
        difference = graph.call_function(torch.sub, (relus[1], relus[3]))
    output.args = ((difference,),)


def sizes_that_are_returned_and_used(graph: Graph) -> None:
    """A size that is an output, a size computed from it, and a tensor of that size before the layers."""
    x = next(iter(graph.find_nodes(op="placeholder")))
    first = next(iter(graph.find_nodes(op="call_function", target=torch.matmul)))
    output = next(iter(graph.find_nodes(op="output")))
    with graph.inserting_before(first):
        size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
        more = graph.call_function(operator.add, (size, 1))
        counted = graph.call_function(torch.arange, (size,))
        moved = graph.call_function(torch.add, (x, size))
    first.args = (moved, first.args[1])
    output.args = ((more, size, counted, *output.args[0]),)


@pytest.mark.parametrize("change", [None, values_of_several_layers, sizes_that_are_returned_and_used])
def test_a_folded_graph_returns_what_the_whole_graph_does(change: Any) -> None:
    """Equal layers return equal fakes. If these were one object, a part with both inputs would read only one."""
    module, inputs = layers_of(6, change)
    taken: list[list[Any]] = []
    folded = fold_layers(module, inputs, lambda part, fakes: taken.append(fakes) or part)
    assert folded is not None
    assert change is not None or len(taken) == 1
    assert all(len({id(fake) for fake in fakes}) == len(fakes) for fakes in taken)
    values = [torch.randn(value.shape) for value in inputs]
    torch.testing.assert_close(list(folded(*values)), list(module(*values)), atol=0, rtol=0)


def in_place_across_a_border(graph: Graph) -> None:
    relus = graph.find_nodes(op="call_function", target=torch.relu)
    with graph.inserting_before(relus[2].next):
        graph.call_function(operator.iadd, (relus[1], 1))


def weights_that_come_back(graph: Graph) -> None:
    products = graph.find_nodes(op="call_function", target=torch.matmul)
    products[-1].args = (products[-1].args[0], products[0].args[1])


def a_gradient_switch(graph: Graph) -> None:
    with graph.inserting_before(graph.find_nodes(op="call_function", target=torch.relu)[2]):
        graph.call_function(torch._C._set_grad_enabled, (False,))


def autocast_over_layers(graph: Graph) -> None:
    first, *_, last = graph.find_nodes(op="call_function", target=torch.relu)
    with graph.inserting_before(first):
        entered = graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, None))
    with graph.inserting_after(last):
        graph.call_function(_exit_autocast, (entered,))


def weights_of_two_layers_in_one_node(graph: Graph) -> None:
    products = graph.find_nodes(op="call_function", target=torch.matmul)
    with graph.inserting_before(products[1]):
        both = graph.call_function(torch.add, (products[1].args[1], products[2].args[1]))
    products[2].args = (products[2].args[0], both)


@pytest.mark.parametrize(
    "change",
    [
        in_place_across_a_border, weights_that_come_back, a_gradient_switch, autocast_over_layers,
        weights_of_two_layers_in_one_node,
    ],
)  # fmt: skip
def test_a_graph_whose_parts_are_not_independent_is_not_cut(change: Any) -> None:
    module, inputs = layers_of(6, change)
    assert fold_layers(module, inputs, pytest.fail) is None
    assert not torch.is_autocast_enabled("cpu"), "looking at a graph leaves no mode behind"


def test_compiling_prints_each_phase_and_its_seconds(
    compiles: list[GraphModule], capsys: pytest.CaptureFixture[str]
) -> None:
    greedy(compiled(tiny_llama(num_hidden_layers=1)), prompt(70), 2)
    printed = capsys.readouterr().err
    assert re.search(r"specache: compiling graph\d+, prefill, first run only", printed)
    assert re.search(r"specache: compiled graph\d+, prefill in [\d.]+ s\n", printed)
