"""The cost of drafting and verifying (option verify) by the roofline: computed, not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from specache_compile.generate import look_up
from specache_compile.kernels.costs import Cost, Workload
from specache_compile.options import MethodOptions

from .devices import Device
from .roofline import full_cache_cost, is_launch, is_tier_op, launch_cost, step_costs, total

# The chance that a drafted token is right when those before it are. SmolLM2 under the default options has a higher one
# (docs/verification.md).
ACCEPTED = 0.97
# Drafted tokens in the explanation where the option says "auto".
DRAFTED = 16


@dataclass(frozen=True)
class Round:
    """A draft and its verification.

    drafted, tokens: drafted tokens, and expected tokens of the round.
    draft_seconds, verification_seconds: least seconds of each.
    bytes: from the host.
    offload_seconds, offload_bytes: a step of the method `offload`, to compare with.
    """

    drafted: int
    tokens: float
    draft_seconds: float
    verification_seconds: float
    bytes: float
    offload_seconds: float
    offload_bytes: float

    @property
    def seconds_per_token(self) -> float:
        return (self.draft_seconds + self.verification_seconds) / self.tokens

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens


def drafted_tokens(options: MethodOptions) -> int:
    if options.lookup:
        return look_up.DRAFTED
    return options.verify if isinstance(options.verify, int) else DRAFTED


def seconds_of(graph_module: GraphModule, load: Workload, device: Device) -> float:
    """Seconds of a graph's launches, one after the other."""
    return sum(cost.seconds(device) for cost in step_costs(graph_module, load).values())


def round_of(
    graphs: Mapping[str, GraphModule], load: Workload, device: Device, drafted: int, accepted: float, step: float
) -> Round:
    """The round of these rewritten graphs. step: seconds of a decode step."""
    before = graphs.get("pre-decode")
    draft = drafted * step + (0.0 if before is None else seconds_of(before, load, device))
    fetched = drafted * total(step_costs(graphs["decode"], load).values()).to_device
    streamed = total(step_costs(graphs["extend"], load).values()).to_device
    offload = offload_step(graphs.get("pre-decode", graphs["decode"]), load)
    return Round(
        drafted, sum(accepted**place for place in range(drafted + 1)), draft,
        seconds_of(graphs["extend"], load, device), fetched + streamed,
        sum(cost.seconds(device) for cost in offload), total(offload).to_device,
    )  # fmt: skip


def looked_up_round(graphs: Mapping[str, GraphModule], load: Workload, device: Device, accepted: float) -> Round:
    """The round of a draft that is looked up at no cost, and of the widened decode that verifies it."""
    offload = offload_step(graphs["decode"], load)
    return Round(
        look_up.DRAFTED, sum(accepted**place for place in range(look_up.DRAFTED + 1)), 0.0,
        seconds_of(graphs["widened"], load, device), total(step_costs(graphs["widened"], load).values()).to_device,
        sum(cost.seconds(device) for cost in offload), total(offload).to_device,
    )  # fmt: skip


def offload_step(one_lane: GraphModule, load: Workload) -> list[Cost]:
    """A step of `offload`: the model's products, and each layer's pairs over PCIe."""
    products = [launch_cost(n, load) for n in one_lane.graph.nodes if is_launch(n) and not is_tier_op(n)]
    exact = [full_cache_cost(load, number) for number in range(len(load.layers))]
    return [*products, *(Cost(cost.flops, cost.hbm, to_device=cost.hbm) for cost in exact)]
