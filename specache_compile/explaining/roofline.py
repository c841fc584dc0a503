"""What each node of a rewritten graph costs: FLOPs, bytes from device memory, bytes over PCIe. Computed, not measured.

A node's time is the largest of what each of the three would take alone. Pointwise nodes count nothing: the compiler
fuses them into their neighbours, whose reads and writes are counted. So every time is a floor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from specache_compile.kernels.evict import HISTORY_SIZE
from specache_compile.kernels.quantize import value_group
from specache_compile.passes.context import value_of
from specache_compile.passes.overlap import is_work

from .devices import Device
from specache_compile.options import Options
from specache_compile.runtime.state import FIELDS, LayerShape


@dataclass(frozen=True)
class Cost:
    """flops; hbm: bytes read and written on the device; to_device, to_host: bytes over PCIe."""

    flops: float = 0.0
    hbm: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def times(self, device: Device) -> dict[str, float]:
        """Seconds that each resource would take alone."""
        return {
            "arithmetic": self.flops / (device.tflops * 1e12),
            "memory": self.hbm / (device.hbm_gbps * 1e9),
            "PCIe": max(self.to_device, self.to_host) / (device.pcie_gbps * 1e9),
        }

    def seconds(self, device: Device) -> float:
        return max(self.times(device).values())

    def bound(self, device: Device) -> str:
        """The resource that takes longest."""
        times = self.times(device)
        return max(times, key=times.__getitem__)


@dataclass(frozen=True)
class Workload:
    """How a step is run. length: tokens cached before it; reuse: the share of wanted pairs in the slots already."""

    options: Options
    layers: tuple[LayerShape, ...]
    query_heads: tuple[int, ...]
    batch: int
    length: int
    reuse: float = 0.0

    def at(self, length: int) -> Workload:
        return replace(self, length=length)


def size_of(size: int | torch.SymInt) -> int:
    """A size; for a symbol, what it was when the graph was traced. Makes no guard."""
    return size if isinstance(size, int) else int(size.node.hint)


def elements(value: Any) -> int:
    count = 1
    for size in value.shape:
        count *= size_of(size)
    return count


def bytes_of(value: Any) -> int:
    return elements(value) * value.dtype.itemsize if isinstance(value, Tensor) else 0


def operator_name(node: Node) -> str:
    """`mm` of aten.mm.default, `decode_attention` of specache.decode_attention.default, `linear` of F.linear."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0]


def is_tier_op(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "specache"


def is_launch(node: Node) -> bool:
    """What a step launches and this model of it counts: tier ops, matrix products, attentions, embeddings."""
    name = operator_name(node)
    return node.op in ("call_function", "call_method") and (
        is_tier_op(node) or is_work(node) or name == "embedding" or "grouped_mm" in name
    )


def launch_cost(node: Node, load: Workload) -> Cost:
    """The cost of a launch under `load`: tier ops by their tiers' lengths, the rest by the graph's own shapes."""
    if is_tier_op(node):
        name = operator_name(node).removesuffix("_fused")
        # Not every tier op takes a layer's state by name: `layer_of_tier_op` reads it off the placeholders.
        return TIER_COSTS[name](node, load, layer_of_tier_op(node))
    tensors = [value_of(argument) for argument in node.all_input_nodes]
    result = value_of(node)
    out = result if isinstance(result, Tensor) else next((r for r in result if isinstance(r, Tensor)), None)
    name = operator_name(node)
    if name == "embedding":
        return Cost(hbm=2 * bytes_of(out))
    moved = sum(map(bytes_of, tensors)) + bytes_of(out)
    if name == "scaled_dot_product_attention":
        q, keys = value_of(node.args[0]), value_of(node.args[1])  # type: ignore[arg-type]
        tokens, seen = size_of(q.shape[2]), size_of(keys.shape[2])
        causal = 0.5 if tokens == seen and tokens > 1 else 1.0
        return Cost(4 * causal * elements(q) * seen, moved)
    factor = tensors[-1] if name == "addmm" else tensors[0]
    if "grouped_mm" in name:  # each token meets only its own experts' weights
        factor, weights = tensors[0], tensors[1]
        rows = elements(factor) // size_of(factor.shape[-1])
        unread = max(0, size_of(weights.shape[0]) - rows) * bytes_of(weights) // size_of(weights.shape[0])
        return Cost(2 * elements(out) * size_of(factor.shape[-1]), moved - unread)
    inner = size_of(value_of(node.args[1]).shape[-1] if name == "addmm" else factor.shape[-1])  # type: ignore[arg-type]
    return Cost(2 * elements(out) * inner, moved)


def layer_of_tier_op(node: Node) -> int:
    """The site's number, from the state that the op takes."""
    for argument in node.all_input_nodes:
        found = re.fullmatch(STATE_NAME, argument.name)
        if found:
            return int(found.group(2))
    raise ValueError(f"{node.name} takes no layer's state")


STATE_NAME = rf"({'|'.join(FIELDS)})_(\d+)"


def uses_host(node: Node) -> bool:
    """Whether the pairs that a tier op reads or writes are on the host: a full cache's are on the device."""
    return any(state.name.startswith("host_") for state in node.all_input_nodes)


@dataclass(frozen=True)
class Pair:
    """Bytes of one KV pair of one head: exact in 16 bits (or the model's dtype), low in the low-bit tier."""

    exact: int
    low: float


def pair_bytes(options: Options, layer: LayerShape) -> Pair:
    exact = 2 * layer.head_dim * layer.dtype.itemsize
    if options.bits == 16:
        return Pair(exact, exact)
    codes = 2 * layer.head_dim * options.bits / 8
    keys = exact / options.group_size
    values = exact / value_group(layer.head_dim, options.group_size)
    return Pair(exact, codes + keys + values)


def fetched_pairs(options: Options, length: int) -> int:
    """Pairs that one head wants for its slots when `length` tokens are cached: k, or all there are."""
    return min(options.top_k, options.low_bit_length(length))


def decode_attention_cost(node: Node, load: Workload, number: int) -> Cost:
    layer, pair = load.layers[number], pair_bytes(load.options, load.layers[number])
    low = load.options.low_bit_length(load.length)
    read = low * pair.low + (load.length - low + fetched_pairs(load.options, load.length)) * pair.exact
    q, k = (value_of(node.args[i]) for i in (0, 1))  # type: ignore[arg-type]
    rows = load.batch * layer.heads
    scores = 4 * rows * low if load.options.top_k else 0
    seen = load.length + size_of(q.shape[2])
    return Cost(4 * elements(q) * seen, rows * read + 2 * bytes_of(q) + 2 * bytes_of(k) + scores)


def extend_attention_cost(node: Node, load: Workload, number: int) -> Cost:
    layer, q = load.layers[number], value_of(node.args[0])  # type: ignore[arg-type]
    past = load.batch * layer.heads * load.length * pair_bytes(load.options, layer).exact
    seen = load.length + size_of(q.shape[2]) / 2
    return Cost(4 * elements(q) * seen, past + 2 * bytes_of(q), to_device=past if uses_host(node) else 0)


def kcache_attention_cost(node: Node, load: Workload, number: int) -> Cost:
    """All keys from the device; the values that each query head picks cross PCIe."""
    layer, q = load.layers[number], value_of(node.args[0])  # type: ignore[arg-type]
    exact = pair_bytes(load.options, layer).exact
    keys = load.batch * layer.heads * load.length * exact / 2
    picked = load.batch * load.query_heads[number] * min(load.options.top_n, load.length) * exact / 2
    return Cost(2 * elements(q) * load.length, keys + picked + 2 * bytes_of(q), to_device=picked)


def budget_attention_cost(node: Node, load: Workload, number: int) -> Cost:
    """The kept pairs are read, and written again without the evicted ones, as is what is counted of them."""
    layer, q = load.layers[number], value_of(node.args[0])  # type: ignore[arg-type]
    kept = min(load.options.budget_in_tokens(load.length), load.length)
    moved = 2 * load.batch * layer.heads * kept * (pair_bytes(load.options, layer).exact + 4 * (HISTORY_SIZE + 1))
    return Cost(4 * elements(q) * kept, moved + 2 * bytes_of(q))


def keep_keys_cost(node: Node, load: Workload, number: int) -> Cost:
    return Cost(hbm=2 * bytes_of(value_of(node.args[0])))  # type: ignore[arg-type]


def append_cost(node: Node, load: Workload, number: int) -> Cost:
    """A group is quantised once in g steps: an even share of that falls on each token."""
    layer, pair = load.layers[number], pair_bytes(load.options, load.layers[number])
    tokens = size_of(value_of(node.args[0]).shape[2])  # type: ignore[arg-type]
    return Cost(hbm=load.batch * layer.heads * tokens * (3 * pair.exact + pair.low))


def offload_cost(node: Node, load: Workload, number: int) -> Cost:
    layer = load.layers[number]
    tokens = size_of(value_of(node.args[0]).shape[2])  # type: ignore[arg-type]
    moved = load.batch * layer.heads * tokens * pair_bytes(load.options, layer).exact
    return Cost(hbm=moved, to_host=moved) if uses_host(node) else Cost(hbm=2 * moved)


def select_cost(node: Node, load: Workload, number: int) -> Cost:
    rows = load.batch * load.layers[number].heads
    return Cost(hbm=4 * rows * (load.options.low_bit_length(load.length) + load.options.top_k))


def prefetch_cost(node: Node, load: Workload, number: int) -> Cost:
    layer = load.layers[number]
    pairs = fetched_pairs(load.options, load.length) * (1 - load.reuse)
    moved = load.batch * layer.heads * pairs * pair_bytes(load.options, layer).exact
    return Cost(hbm=moved, to_device=moved)


def measure_cost(node: Node, load: Workload, number: int) -> Cost:
    layer = load.layers[number]
    keys = load.batch * layer.heads * load.length * pair_bytes(load.options, layer).exact / 2
    return Cost(hbm=keys, to_device=keys)


def nothing(node: Node, load: Workload, number: int) -> Cost:
    return Cost()


TIER_COSTS: dict[str, Callable[[Node, Workload, int], Cost]] = {
    "decode_attention": decode_attention_cost,
    "extend_attention": extend_attention_cost,
    "kcache_attention": kcache_attention_cost,
    "budget_attention": budget_attention_cost,
    "keep_keys": keep_keys_cost,
    "append": append_cost,
    "offload": offload_cost,
    "select_topk": select_cost,
    "prefetch": prefetch_cost,
    "wait": nothing,
    "measure": measure_cost,
}


def full_cache_cost(load: Workload, number: int) -> Cost:
    """One token's exact attention over a full cache in device memory."""
    layer, heads = load.layers[number], load.query_heads[number]
    kept = load.batch * layer.heads * load.length * pair_bytes(load.options, layer).exact
    return Cost(4 * load.batch * heads * layer.head_dim * load.length, kept)


def step_costs(graph_module: GraphModule, load: Workload) -> dict[Node, Cost]:
    """The cost of each launch of a graph."""
    return {node: launch_cost(node, load) for node in graph_module.graph.nodes if is_launch(node)}


def total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


def full_cache_step(one_lane: GraphModule, load: Workload, device: Device) -> float:
    """Seconds of a decode step of the same model on a full cache: the one-lane graph's products, exact attention."""
    products = [launch_cost(n, load) for n in one_lane.graph.nodes if is_launch(n) and not is_tier_op(n)]
    attention = [full_cache_cost(load, number) for number in range(len(load.layers))]
    return sum(cost.seconds(device) for cost in (*products, *attention))
