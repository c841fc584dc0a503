"""What `explain` found about a model, as figures to query and compare; `explanation.py` prints and saves them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from specache_compile.errors import SpecacheError
from specache_compile.kernels.costs import Cost, Workload, fetched_pairs, pair_bytes
from specache_compile.methods.field import LayerShape
from specache_compile.methods.low_bit import LowBitOptions
from specache_compile.methods.specache import SpecacheOptions
from specache_compile.options import MethodOptions
from specache_compile.passes.pipeline import Trace
from specache_compile.passes.reading.sites import LeftAlone
from specache_compile.runtime.state import device_total, full_cache_bytes, predicted_bytes

from .plan import StepTime, break_even, fits, largest_batch, step_time
from .schedule import Launch, Schedule, launches_of
from .times.devices import Device
from .times.roofline import full_cache_step, launch_cost, step_costs, total
from .times.step_kernels import Traced, is_captured
from .times.step_time import StepRow, assumed, break_even_context, rows_of
from .times.verification import ACCEPTED, Round, drafted_tokens, looked_up_round, round_of


@dataclass(frozen=True)
class SiteRow:
    """One rewritten attention.

    layer: its number among the rewritten attentions.
    model_layer: its layer's number in the model.
    """

    layer: int
    model_layer: str
    query_heads: int
    heads: int
    head_dim: int
    mask: bool
    softcap: float | None
    sinks: bool


@dataclass(frozen=True)
class NodeCost:
    """One launch of a graph under the roofline of a device."""

    name: str
    op: str
    layer: str
    stream: str
    cost: Cost
    seconds: float
    bound: str


@dataclass(frozen=True)
class Alternative:
    """The same model, context and batch with other options.

    step: seconds.
    speedup: full cache's step / this step.
    """

    bits: float
    group_size: int
    top_k: int
    device_bytes: int
    kv_ratio: float
    fetched_bytes: int
    step: float
    speedup: float
    largest_batch: int


@dataclass(frozen=True)
class Figures:
    """What the backend does to a model, with `prompt_length` tokens and `batch_size` rows.

    Every figure is computed, not measured: bytes from shapes, times from the roofline of `device`. With several `ranks`
    all figures are one rank's.
    """

    options: MethodOptions
    prompt_length: int
    batch_size: int
    sites: tuple[SiteRow, ...]
    left_alone: tuple[LeftAlone, ...]
    traces: Mapping[str, Trace]
    graphs: Mapping[str, GraphModule]
    layers: tuple[LayerShape, ...]
    lanes: int
    device: Device
    weight_bytes: int
    working_bytes: Mapping[str, int]
    reuse: float = 0.0
    corrected: float = 0.0
    accepted: float = ACCEPTED
    host_gib: float = 128.0
    name: str = ""
    ranks: int = 1

    @functools.cached_property
    def bytes_by_tier(self) -> dict[str, int]:
        return predicted_bytes(self.options, list(self.layers), self.batch_size, self.prompt_length)

    @property
    def bytes_by_layer(self) -> list[dict[str, int]]:
        """Bytes of each tier, site by site."""
        return [predicted_bytes(self.options, [x], self.batch_size, self.prompt_length) for x in self.layers]

    @property
    def full_cache_bytes(self) -> int:
        return full_cache_bytes(list(self.layers), self.batch_size, self.prompt_length)

    @property
    def device_bytes(self) -> int:
        """KV bytes on the device: low-bit, recent and slots."""
        return device_total(self.bytes_by_tier)

    @property
    def prefill_bytes(self) -> int:
        """The most device memory that a prefill of the prompt needs beside the weights: its temporaries, with nothing
        fused, the tiers, and the two buffers through which a layer's pairs go to the host."""
        pairs = max((full_cache_bytes([x], self.batch_size, self.prompt_length) for x in self.layers), default=0)
        staging = 2 * pairs if self.bytes_by_tier["host"] else 0
        return self.working_bytes.get("prefill", 0) + self.device_bytes + staging

    @property
    def kv_ratio(self) -> float:
        """Device KV bytes / bytes of the same tokens in Hugging Face's cache."""
        return self.device_bytes / self.full_cache_bytes if self.full_cache_bytes else 1.0

    @property
    def corrects(self) -> bool:
        """Whether a step fetches the pairs that its own token wants and the fetch ahead did not bring."""
        return self.options.correct != "never"

    @property
    def bytes_fetched(self) -> int:
        """Bytes that a decode step fetches from the host tier when no pair is in the slots already."""
        pairs = self.batch_size * fetched_pairs(self.options, self.prompt_length)
        return sum(pairs * layer.heads * pair_bytes(self.options, layer).on_host for layer in self.layers)

    @property
    def hashes(self) -> dict[str, str]:
        """The hash of each phase's rewritten graph, as recorded for a compiled model."""
        return {phase: trace.hash for phase, trace in self.traces.items()}

    def trace(self, phase: str) -> Trace:
        if phase not in self.traces:
            raise SpecacheError(f"no phase {phase!r}: there are {', '.join(self.traces) or 'none'}")
        return self.traces[phase]

    def graph(self, phase: str, after: str | None = None) -> GraphModule | str:
        """The rewritten graph of a phase; with `after`, its text as it stood after that pass ("captured": before)."""
        trace = self.trace(phase)
        if after is None:
            return self.graphs[phase]
        if after not in trace.graphs:
            raise SpecacheError(f"no pass {after!r}: there are {', '.join(trace.graphs)}")
        return trace.graphs[after]

    def diff(self, phase: str, pass_name: str) -> str:
        """A unified diff of the readable graph before and after one pass; empty where the pass changed nothing."""
        names = list(self.trace(phase).graphs)
        if pass_name not in names[1:]:
            raise SpecacheError(f"no pass {pass_name!r}: there are {', '.join(names[1:])}")
        before = names[names.index(pass_name) - 1]
        old, new = (str(self.graph(phase, name)).splitlines(keepends=True) for name in (before, pass_name))
        return "".join(difflib.unified_diff(old, new, f"{phase}/{before}", f"{phase}/{pass_name}", n=1))

    def load(self, **changes: Any) -> Workload:
        """The workload of the explained decode step."""
        heads = tuple(site.query_heads for site in self.sites)
        load = Workload(
            self.options, self.layers, heads, self.batch_size, self.prompt_length, self.reuse, self.corrected
        )
        return replace(load, **changes)

    @functools.cached_property
    def launches(self) -> list[Launch]:
        self.trace("decode")
        return launches_of(self.graphs["decode"])

    def roofline(self, phase: str = "decode") -> list[NodeCost]:
        """Each launch of a phase with its FLOPs, bytes and least time."""
        self.trace(phase)
        launches = {launch.name: launch for launch in launches_of(self.graphs[phase])}
        rows = []
        # A prefill starts from an empty cache.
        for node, cost in step_costs(self.graphs[phase], self.load(length=self.length_before(phase))).items():
            launch = launches[node.name]
            seconds, bound = cost.seconds(self.device), cost.bound(self.device)
            rows.append(NodeCost(node.name, launch.op, launch.layer, launch.stream, cost, seconds, bound))
        return rows

    def length_before(self, phase: str) -> int:
        return 0 if phase == "prefill" else self.prompt_length

    def step_cost(self) -> Cost:
        """All that a decode step reads, computes and moves."""
        return total(row.cost for row in self.roofline("decode"))

    def seconds_at(self, load: Workload) -> dict[str, float]:
        names = {launch.name for launch in self.launches}
        nodes = [node for node in self.graphs["decode"].graph.nodes if node.name in names]
        return {node.name: launch_cost(node, load).seconds(self.device) for node in nodes}

    def schedule(self) -> Schedule:
        """Two consecutive decode steps over two streams, with the roofline's seconds."""
        return Schedule(self.launches, self.seconds_at(self.load()))

    def step(self, load: Workload | None = None) -> StepTime:
        """The decode step's least time, and the share of the fetches that it hides."""
        return step_time(self.launches, self.seconds_at(load or self.load()))

    def full_step(self, length: int | None = None) -> float:
        """Seconds of the same step on a full 16-bit cache in device memory (which may not fit there)."""
        one_lane = self.graphs.get("pre-decode", self.graphs["decode"])
        return full_cache_step(one_lane, self.load(length=length or self.prompt_length), self.device)

    def traced(self, phase: str = "decode") -> Traced:
        """A phase's graph, with the shares of the wanted pairs that travel as `step_time.assumed` has them."""
        self.trace(phase)
        return Traced(self.graphs[phase], assumed(self.load(), self.lanes), self.weight_bytes)

    @functools.cached_property
    def computed_steps(self) -> list[StepRow]:
        """This model's and full caches' steps at other lengths and batches, by events (`step_time.py`); none where a
        CUDA graph cannot hold the step."""
        if "decode" not in self.graphs or not self.sites or not is_captured(self.graphs["decode"]):
            return []
        return rows_of(self.traced(), self.traced_one_lane, self.device, self.host_gib * 2**30 / self.ranks)

    @property
    def traced_one_lane(self) -> Traced:
        """The one-lane graph, whose products are also those of a full cache's step."""
        return self.traced("pre-decode" if "pre-decode" in self.graphs else "decode")

    @functools.cached_property
    def computed_break_even(self) -> int | None:
        """Tokens of context from which a computed step of one row takes no longer than on a 16-bit cache; None: not up
        to 128k."""
        return break_even_context(self.traced(), self.traced_one_lane, self.device)

    def round(self, accepted: float | None = None) -> Round | None:
        """A draft and its verification, where the options ask for them. accepted: replaces the given chance that a
        drafted token is right."""
        chance = self.accepted if accepted is None else accepted
        if self.options.lookup and "widened" in self.graphs:
            return looked_up_round(self.graphs, self.load(), self.device, chance)
        if self.options.verify is None or "extend" not in self.graphs:
            return None
        drafted = drafted_tokens(self.options)
        return round_of(self.graphs, self.load(), self.device, drafted, chance, self.step().seconds)

    def break_even(self) -> int | None:
        """Tokens of context from which a step takes no longer than on a full cache, at this batch; None: never."""
        return break_even(lambda n: self.step(self.load(length=n)).seconds, self.full_step)

    def largest_batch(
        self, vram_gib: float | None = None, host_gib: float | None = None, options: MethodOptions | None = None
    ) -> int:
        """Rows of this context that fit: weights, the decode step's temporaries and the tiers."""
        vram = fits(self.device) if vram_gib is None else vram_gib * 2**30
        host = (self.host_gib if host_gib is None else host_gib) * 2**30 / self.ranks
        row = self.working_bytes.get("decode", 0) // self.batch_size
        chosen = options or self.options
        return largest_batch(chosen, self.layers, self.prompt_length, self.weight_bytes, row, vram, host)

    def full_cache_batch(self, vram_gib: float | None = None) -> int:
        """Rows of this context that fit with a full 16-bit cache in device memory."""
        vram = fits(self.device) if vram_gib is None else vram_gib * 2**30
        row = self.full_cache_bytes // self.batch_size + self.working_bytes.get("decode", 0) // self.batch_size
        return max(0, int((vram - self.weight_bytes) / max(1, row)))

    def compare(
        self, bits: Sequence[int] = (2, 1), group_sizes: Sequence[int] = (64, 32), top_k: Sequence[int] = (32, 64, 128)
    ) -> list[Alternative]:
        """The same with other bits, group sizes and k, as far as the method has these options."""
        rows: list[Alternative] = []
        chosen = self.options
        if not isinstance(chosen, LowBitOptions):
            return rows
        top_k = top_k if isinstance(chosen, SpecacheOptions) else (chosen.top_k,)
        every = [(b, g, k) for b in bits for g in group_sizes for k in top_k]
        own = (sum(chosen.layout[:2]) / 2, chosen.group_size, chosen.top_k)
        for b, g, k in dict.fromkeys([own, *every]):
            options = chosen
            if (b, g, k) != own:
                options = replace(chosen.with_bits(b), group_size=g)
            if isinstance(options, SpecacheOptions):
                options = replace(options, top_k=k, correct=options.correct if k else "never")
            other = replace(self, options=options)
            step = other.step().seconds
            rows.append(
                Alternative(b, g, k, other.device_bytes, other.kv_ratio, other.bytes_fetched, step,
                            self.full_step() / step, other.largest_batch())
            )  # fmt: skip
        return rows
