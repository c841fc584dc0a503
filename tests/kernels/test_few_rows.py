"""Products of a few rows against float64, and the products that they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.testing._internal.two_tensor import TwoTensor

from conftest import greedy, prompt, tiny_llama
from specache_compile.lowering import lower
from specache_compile.lowering.few_rows import few_rows, few_rows_op_by_op, is_linear, is_plain

pytestmark = pytest.mark.pairwise

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "channels", "outputs"), [(1, 576, 192), (2, 64, 5), (3, 40, 1), (4, 7, 9)])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_each_row_times_the_weight(dtype: torch.dtype, rows: int, channels: int, outputs: int, has_bias: bool) -> None:
    """Sums are rounded once, to nearest."""
    torch.manual_seed(rows)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, channels), (outputs, channels), (outputs,)))
    out = torch.ops.specache.few_rows_fused(x, weight, bias if has_bias else None)
    both = torch.ops.specache.few_rows_each_fused(x, [weight[:3], weight], [None, bias if has_bias else None])
    assert torch.equal(both[1], out)
    assert torch.equal(both[0], torch.ops.specache.few_rows_fused(x, weight[:3], None))
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    size = x.double().abs() @ weight.double().abs().T + 1.0
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= TOLERANCE[dtype] * exact.abs() + 1e-6 * size).all()


def test_elements_that_are_not_finite_stay_so() -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16()
    out = torch.ops.specache.few_rows_fused(torch.tensor([[float("nan"), float("inf")]]).bfloat16(), weight, None)
    assert out[0, 0].isnan()
    assert torch.equal(out[0, 1], weight.new_tensor(float("nan"))) or out[0, 1].isnan()  # 0 times NaN is NaN
    big = torch.ops.specache.few_rows_fused(torch.full((1, 2), 3e38).bfloat16(), weight + 1, None)
    assert big.isposinf().all()


@pytest.mark.parametrize(
    ("rows", "dtype", "replaced"),
    [
        (1, torch.float32, 2),
        (2, torch.bfloat16, 2),
        (4, torch.float32, 2),
        (5, torch.float32, 0),
        (2, torch.float64, 0),
    ],
)
def test_products_of_few_rows_and_a_weight_are_replaced_and_no_others(
    rows: int, dtype: torch.dtype, replaced: int
) -> None:
    """A linear layer without bias, one with bias, and a product without a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8)).to(dtype)
    x = torch.randn(rows, 8).to(dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out @ torch.ones(8, 3, dtype=dtype)

    with torch.no_grad():
        graph = make_fx(run, _allow_non_fake_inputs=True)(x)
        for node in graph.graph.nodes:
            node.meta.setdefault("val", node.meta.get("val"))
        expected = run(x)
        assert few_rows(graph) == replaced
        torch.testing.assert_close(graph(x), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("dtype", "replaced"), [(torch.bfloat16, 2), (torch.float64, 0)])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 2, 8)], ids=["one row", "six rows"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "op by op"])
def test_linear_layers_of_a_graph_as_dynamo_captured_it(
    compiled: bool, shape: tuple[int, ...], dtype: torch.dtype, replaced: int
) -> None:
    """Op by op the kernel's wrapper checks the rows; graphs for Inductor have the kernel only for few rows."""
    torch.manual_seed(0)
    first, second, bias = (torch.randn(*shape).to(dtype) for shape in ((16, 8), (8, 16), (8,)))

    def run(x: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.linear(x, first), second, bias)

    given = (torch.randn(shape).to(dtype), first, second, bias)
    graph = symbolic_trace(run)
    FakeTensorProp(graph).propagate(*given)
    replace = few_rows if compiled else few_rows_op_by_op
    assert replace(graph) == (0 if compiled and shape[0] > 1 else replaced)
    torch.testing.assert_close(graph(*given), run(*given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("widened", [False, True])
def test_products_of_one_x_and_one_layers_weights_become_one_op(widened: bool) -> None:
    """Queries and keys of layer 1 are joined; products of another x or another layer are not."""
    names = ("x", "of_layers_1_parameters_q", "of_layers_1_parameters_k", "of_layers_2_parameters_k", "bias")
    given = [torch.randn(shape) for shape in ((1, 1, 8), (16, 8), (4, 8), (4, 8), (4,))]

    def run(x: Tensor, q: Tensor, k: Tensor, other: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        queries = F.linear(x, q)
        return queries, F.linear(x, k, bias), F.linear(x, other), F.linear(queries[..., :8], k)

    graph = make_fx(run)(*given) if widened else symbolic_trace(run)
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = name
    if not widened:
        FakeTensorProp(graph).propagate(*given)
    assert few_rows(graph) == 4
    each = graph.graph.find_nodes(op="call_function", target=torch.ops.specache.few_rows_each.default)
    assert [len(node.args[1]) for node in each] == [2]
    for found, expected in zip(graph(*given), run(*given), strict=True):
        torch.testing.assert_close(found, expected)


def test_products_that_the_kernel_would_misread_stay() -> None:
    """A broadcast bias, a weight or a row without its first dimension, weights of a subclass."""
    x, weight = torch.randn(1, 8), torch.randn(4, 8)
    assert is_linear(x, weight, torch.randn(4))
    assert not is_linear(x, weight, torch.randn(1))
    assert not is_linear(x, weight[0])
    assert not is_linear(x[0], weight)
    assert not is_linear(x, weight, torch.randn(4).double())
    assert is_plain(weight)
    assert not is_plain(TwoTensor(weight, weight))


@pytest.mark.slow
def test_a_pre_decode_multiplies_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(lower, "few_rows_op_by_op", lambda graph: counts.append(few_rows_op_by_op(graph)))
    llama = tiny_llama(num_hidden_layers=1)
    llama.compile(backend="specache", options={"speculate": True})
    greedy(llama, prompt(200), 3)
    assert counts == [7 + 1], "a layer's linear layers, and the head"
