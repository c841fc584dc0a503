"""The result of `explain`: figures of a model to query and compare, their text for one screen, and their tables of at
most 100 columns."""

from __future__ import annotations

import difflib
import functools
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tabulate import tabulate
from torch.fx import GraphModule

from specache_compile.errors import SpecacheError
from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions
from specache_compile.passes.pipeline import readable
from specache_compile.passes.reading.sites import LeftAlone
from specache_compile.runtime.state import device_total, full_cache_bytes, predicted_bytes

from .graph_text import layer_text, spans
from .times.devices import Device
from .times.step_kernels import Traced, is_captured, kernels_of
from .times.step_time import (
    ComputedStep,
    Span,
    break_even_context,
    full_cache_batch,
    largest_batch,
    share_ahead,
    simulated,
    step_of,
)
from .times.workload import CORRECTED, Workload

# The most lines of a layer's text.
SCREEN = 60
COMPUTED = "computed, not measured"
WIDTH = 100
FURTHER = "--layer {0}, --nodes, --graph decode; in Python e.layer({0}), e.spans, e.graph('decode')"
ABSORBED = "latent attention, absorbed and exact; Hugging Face's own cache, nothing is compressed"


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


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`: print it, query its figures, or compare passes.

    Example:
        import specache_compile as sc

        explanation = sc.explain("examples/needle-llama", prompt_length=8192)
        print(explanation.bytes_by_tier)
        print(explanation.layer(0))  # one layer's graph, before and after
    """

    # Every figure is computed, not measured: bytes from shapes, times from the event simulation (`times/step_time.py`)
    # of `device`.
    # reuse, corrected: see `explain`; None: the defaults of `load`.
    # absorbed: the layers with absorbed latent attention, which use Hugging Face's cache.
    options: MethodOptions
    prompt_length: int
    batch_size: int
    sites: tuple[SiteRow, ...]
    left_alone: tuple[LeftAlone, ...]
    stages: Mapping[str, Mapping[str, GraphModule]]
    graphs: Mapping[str, GraphModule]
    layers: tuple[LayerShape, ...]
    lanes: int
    device: Device
    weight_bytes: int
    reuse: float | None = None
    corrected: float | None = None
    host_gib: float = 128.0
    name: str = ""
    absorbed: tuple[str, ...] = ()

    @functools.cached_property
    def bytes_by_tier(self) -> dict[str, int]:
        return predicted_bytes(self.options, list(self.layers), self.batch_size, self.prompt_length)

    @property
    def full_cache_bytes(self) -> int:
        """Bytes of the same tokens in a 16-bit cache, whatever the model's dtype is."""
        return full_cache_bytes(self.layers, self.batch_size, self.prompt_length, itemsize=2)

    @property
    def device_bytes(self) -> int:
        """KV bytes on the device: low-bit, recent and slots."""
        return device_total(self.bytes_by_tier)

    @property
    def kv_ratio(self) -> float:
        """Device KV bytes / bytes of the same tokens in a 16-bit cache."""
        return self.device_bytes / self.full_cache_bytes if self.full_cache_bytes else 1.0

    def stages_of(self, phase: str) -> Mapping[str, GraphModule]:
        if phase not in self.stages:
            raise SpecacheError(f"no phase {phase!r}: there are {', '.join(self.stages) or 'none'}")
        return self.stages[phase]

    def graph(self, phase: str, after: str | None = None, layer: int | None = None) -> GraphModule | str:
        """The rewritten graph of a phase.

        Args:
            phase: "prefill", "decode", or another phase of `graphs`.
            after: the name of a pass, or "captured": return the graph's text as it was after that pass.
            layer: return only this layer of the model, as short Python (`graph_text.py`).
        """
        stages = self.stages_of(phase)
        if after is not None and after not in stages:
            raise SpecacheError(f"no pass {after!r}: there are {', '.join(stages)}")
        if layer is not None:
            return layer_text(stages[after or list(stages)[-1]], layer)
        return self.graphs[phase] if after is None else readable(stages[after])

    def diff(self, phase: str, pass_name: str | None = None, layer: int | None = None) -> str:
        """A unified diff of a phase's graph before and after one pass; empty where the pass changed nothing.

        Args:
            phase: as for `graph`.
            pass_name: the pass; None: all passes together.
            layer: compare only this layer of the model, as short Python.
        """
        names = list(self.stages_of(phase))
        if pass_name is not None and pass_name not in names[1:]:
            raise SpecacheError(f"no pass {pass_name!r}: there are {', '.join(names[1:])}")
        new = pass_name or names[-1]
        return self.compared(phase, names[names.index(new) - 1] if pass_name else names[0], new, layer)

    def layer(self, number: int, phase: str = "decode") -> str:
        """One layer of the model before and after all passes, as a diff of short Python in at most `SCREEN` lines."""
        first, *_, last = self.stages_of(phase)
        lines = self.compared(phase, first, last, number, context=SCREEN).splitlines()
        if len(lines) > SCREEN:
            lines = self.compared(phase, first, last, number).splitlines()
        if len(lines) > SCREEN:
            lines[SCREEN - 1 :] = [f"# {len(lines) - SCREEN + 1} more lines: --graph {phase} --layer {number}"]
        return "\n".join([*lines, ""]) if lines else f"# left as it is\n{self.graph(phase, last, number)}"

    def compared(self, phase: str, old: str, new: str, layer: int | None, context: int | None = None) -> str:
        """A unified diff of a phase's graph after two passes. context: unchanged lines around a change."""
        before, after = (str(self.graph(phase, name, layer)).splitlines(keepends=True) for name in (old, new))
        lines = context or (1 if layer is None else 3)
        return "".join(difflib.unified_diff(before, after, f"{phase}/{old}", f"{phase}/{new}", n=lines))

    def load(self) -> Workload:
        """The workload of the explained decode step, with the assumed shares of the selected pairs that travel where
        none were given."""
        heads = tuple(site.query_heads for site in self.sites)
        reuse = 1 - share_ahead(self.options, self.lanes) if self.reuse is None else self.reuse
        corrected = CORRECTED[min(self.lanes, 2)] if self.corrected is None else self.corrected
        return Workload(self.options, self.layers, heads, self.batch_size, self.prompt_length, reuse, corrected)

    def traced(self, phase: str = "decode") -> Traced:
        """A phase's graph with its workload, for `times/step_time.py`."""
        self.stages_of(phase)
        return Traced(self.graphs[phase], self.load(), self.weight_bytes)

    @property
    def traced_one_lane(self) -> Traced:
        """The one-lane graph, whose products are also those of a full cache's step."""
        return self.traced("pre-decode" if "pre-decode" in self.graphs else "decode")

    @functools.cached_property
    def is_timed(self) -> bool:
        """Whether the decode step's time can be computed: a CUDA graph must be able to hold the step."""
        return bool(self.sites) and "decode" in self.graphs and is_captured(self.graphs["decode"])

    @functools.cached_property
    def spans(self) -> list[Span]:
        """Each launch of a decode step with its start and end; none where the step is not timed."""
        if not self.is_timed:
            return []
        kernels = kernels_of(self.traced(), self.device, self.prompt_length, self.batch_size)
        return simulated(kernels, self.device)[0]

    def check_timed(self) -> None:
        """Raise SpecacheError where the step is not timed."""
        if not self.is_timed:
            raise SpecacheError(
                f"method {self.options.method!r}: no time is computed for its decode step, because a CUDA graph cannot "
                "hold it"
            )

    def step(self, batch: int | None = None) -> ComputedStep:
        """The decode step. batch: rows, if not `batch_size`."""
        self.check_timed()
        return step_of(self.traced(), self.device, self.prompt_length, batch or self.batch_size)

    def __str__(self) -> str:
        """Return the explanation, on one screen."""
        parts = [title(self), attentions(self)]
        if self.sites:
            further = f"Look further: {FURTHER.format(self.sites[0].model_layer)}"
            parts += [memory_table(self), time_text(self), further]
        return "\n\n".join(filter(None, parts))


def size(count: float) -> str:
    """Bytes for a person, in powers of ten: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    return f"{count:,.2f} TB"


def duration(seconds: float) -> str:
    """Seconds for a person: µs or ms."""
    return f"{seconds * 1e3:,.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} µs"


def grouped(rows: Iterable[tuple[str, tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Join equal rows of several layers into one, with the layers' span before it."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer, row in rows:
        groups.setdefault(row, []).append(layer)
    return [(spans(layers), *row) for row, layers in groups.items()]


def title(e: Explanation) -> str:
    rows = f"{e.batch_size} row{'s' if e.batch_size > 1 else ''}"
    return (
        f"{e.name[:60] or 'model'}, method {e.options.method}: {e.prompt_length:,} tokens, {rows}. "
        f"All figures are {COMPUTED}."
    )


def attentions(e: Explanation) -> str:
    """How many of the attentions are rewritten, and the reasons for the rest."""
    rewritten = len(e.sites) + len(e.absorbed)
    every, lanes = rewritten + len(e.left_alone), f"{e.lanes} lane{'s' if e.lanes > 1 else ''}"
    lines = [f"{rewritten} of {every} attentions rewritten" + (f", {lanes} in decode" if e.sites else "")]
    shapes = ((site.model_layer, (site.query_heads, site.heads, site.head_dim)) for site in e.sites)
    for layers, heads, kv_heads, width in grouped(shapes):
        lines.append(f"  layers {layers}: {heads} query heads, {kv_heads} KV heads of {width}")
    if e.absorbed:
        lines.append(f"  layers {spans(e.absorbed)}: {ABSORBED}")
    reasons: dict[str, list[str]] = {}
    for item in e.left_alone:
        reasons.setdefault(item.reason, []).append(item.node.split(":")[0].removeprefix("layer "))
    for reason, where in reasons.items():
        lines += textwrap.wrap(f"left exact, {len(where)} ({spans(where)}): {reason}", WIDTH,
                               initial_indent="  ", subsequent_indent="    ")  # fmt: skip
    return "\n".join(lines)


def memory_table(e: Explanation) -> str:
    """Bytes by tier, beside a 16-bit cache."""
    full = max(1, e.full_cache_bytes)

    def row(name: str, count: float) -> tuple[str, str, str]:
        return name, size(count), f"{count / full:.3f}"

    rows = [row(f"device: {tier}", count) for tier, count in e.bytes_by_tier.items() if tier != "host" and count]
    rows += [row("device, all tiers", e.device_bytes)]
    rows += [row("host", e.bytes_by_tier["host"])] if e.bytes_by_tier["host"] else []
    rows += [row("16-bit cache", full)]
    table = tabulate(rows, ("KV memory", "bytes", "of a 16-bit cache"), colalign=("left", "right", "right"),
                     disable_numparse=True)  # fmt: skip
    return f"{table}\nbesides: weights {size(e.weight_bytes)}"


def time_text(e: Explanation) -> str:
    """The step's time beside a 16-bit cache's, at the batch that was given and at the largest one."""
    if "decode" not in e.graphs:
        return ""
    if not e.is_timed:
        return "Time of a decode step: not computed, because a CUDA graph cannot hold this method's step"
    traced, plain, length = e.traced(), e.traced_one_lane, e.prompt_length
    most, limit = largest_batch(traced, e.device, length, e.host_gib * 2**30)
    full, full_most = partial(step_of, plain, e.device, length, full=2), full_cache_batch(plain, e.device, length)
    rows = [
        time_row(e.options.method, e.step(), most, limit, e.step(most) if most else None),
        time_row("16-bit cache", full(e.batch_size), full_most, "device", full(full_most) if full_most else None),
    ]
    headers = (
        f"decode step on {e.device.name}", "time", "bound by", "largest batch", "limited by", "its step",
        "tokens/s",
    )  # fmt: skip
    aligned = ("left", "right", "left", "right", "left", "right", "right")
    table = tabulate(rows, headers, colalign=aligned, disable_numparse=True)
    even = break_even_context(traced, plain, e.device)
    where = "at no context up to 128k tokens" if even is None else f"from {even:,} tokens of context on"
    return (
        f"{table}\nA step of one sequence is no slower than on a 16-bit cache {where}.\n"
        f"Simulated launch by launch, right to some 30 %; {e.device.vram_gib:.0f} GiB of device memory, "
        f"{e.host_gib:.0f} GiB of host memory"
    )


def time_row(name: str, step: ComputedStep, most: int, limit: str, largest: ComputedStep | None) -> tuple[str, ...]:
    last = ("-", "-") if largest is None else (duration(largest.seconds), f"{most / largest.seconds:,.0f}")
    return name, duration(step.seconds), step.bound, f"{most:,}", limit, *last


def nodes_table(e: Explanation) -> str:
    """Each launch of a decode step, in the order of its start."""
    e.check_timed()
    rows = [
        (kernel.name[:34], kernel.layer, kernel.stream, f"{kernel.flops / 1e9:,.2f}",
         *map(size, (kernel.memory, kernel.to_device, kernel.to_host)), duration(span.end - span.start), span.bound)
        for span in sorted(e.spans, key=lambda span: span.start)
        for kernel in [span.kernel]
    ]  # fmt: skip
    headers = ("launch", "layer", "stream", "GFLOP", "memory", "to device", "to host", "time", "bound by")
    aligned = ("left", "right", "left", *("right",) * 5, "left")
    return f"Launches of a decode step on {e.device.name} ({COMPUTED})\n" + tabulate(
        rows, headers=headers, colalign=aligned, disable_numparse=True
    )
