"""An explanation as text for one screen, and as tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tabulate import tabulate

from .figures import Figures
from .outline import spans
from .times.step_time import ComputedStep, break_even_context, full_cache_batch, full_step_of, largest_batch

COMPUTED = "computed, not measured"
WIDTH = 100
FURTHER = "--layer {0}, --nodes, --graph decode; in Python e.layer({0}), e.spans, e.graph('decode')"
ABSORBED = "latent attention, absorbed and exact; Hugging Face's own cache, nothing is compressed"


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


def text(e: Figures) -> str:
    """What an explanation comes to, on one screen."""
    parts = [title(e), attentions(e)]
    if e.sites:
        parts += [memory_table(e), time_text(e), f"Look further: {FURTHER.format(e.sites[0].model_layer)}"]
    return "\n\n".join(filter(None, parts))


def title(e: Figures) -> str:
    rows = f"{e.batch_size} row{'s' if e.batch_size > 1 else ''}"
    return (
        f"{e.name[:60] or 'model'}, method {e.options.method}: {e.prompt_length:,} tokens, {rows}. "
        f"All figures are {COMPUTED}."
    )


def attentions(e: Figures) -> str:
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


def memory_table(e: Figures) -> str:
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


def time_text(e: Figures) -> str:
    """The step's time beside a 16-bit cache's, at the batch that was given and at the largest one."""
    if "decode" not in e.graphs:
        return ""
    if not e.is_timed:
        return "Time of a decode step: not computed, because a CUDA graph cannot hold this method's step"
    traced, plain, length = e.traced(), e.traced_one_lane, e.prompt_length
    most, limit = largest_batch(traced, e.device, length, e.host_gib * 2**30)
    full, full_most = partial(full_step_of, plain, e.device, length), full_cache_batch(plain, e.device, length)
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
        f"{table}\nOne row is no slower than on a 16-bit cache {where}.\n"
        f"Simulated launch by launch, right to some 30 %; {e.device.vram_gib:.0f} GiB of device memory, "
        f"{e.host_gib:.0f} GiB of host memory"
    )


def time_row(name: str, step: ComputedStep, most: int, limit: str, largest: ComputedStep | None) -> tuple[str, ...]:
    last = ("-", "-") if largest is None else (duration(largest.seconds), f"{most / largest.seconds:,.0f}")
    return name, duration(step.seconds), step.bound, f"{most:,}", limit, *last


def nodes_table(e: Figures) -> str:
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


@dataclass(frozen=True)
class Explanation(Figures):
    """The result of `explain`: print it, query its figures, or compare passes.

    Example:
        import specache_compile as sc

        explanation = sc.explain("examples/needle-llama", prompt_length=8192)
        print(explanation.bytes_by_tier)
        print(explanation.layer(0))  # one layer's graph, before and after
    """

    def __str__(self) -> str:
        return text(self)
