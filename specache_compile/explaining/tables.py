"""An explanation as text for one screen, as tables of at most 100 columns, and as plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from specache_compile.kernels.codes.records import stored_dim
from specache_compile.passes.plan import PassReport

from .figures import Figures
from .outline import spans
from .times.step_time import ComputedStep, Span, StepRow

COMPUTED = "computed, not measured"
WIDTH = 100
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
        parts += [memory_table(e), time_text(e), round_text(e), further(e)]
    return "\n\n".join(filter(None, parts))


def title(e: Figures) -> str:
    rows = f"{e.batch_size} row{'s' if e.batch_size > 1 else ''}"
    lines = [
        f"{e.name[:60] or 'model'}, method {e.options.method}: {e.prompt_length:,} tokens, {rows}. "
        f"All figures are {COMPUTED}."
    ]
    if e.ranks > 1:
        lines.append(f"One of {e.ranks} ranks: its own part, without the time of collectives.")
    if e.longest is not None and e.prompt_length > e.longest:
        lines.append(f"Note: the model's context is {e.longest:,} tokens (max_position_embeddings).")
    return "\n".join(lines)


def attentions(e: Figures) -> str:
    """How many of the attentions are rewritten, and the reasons for the rest."""
    rewritten = len(e.sites) + len(e.absorbed)
    every, lanes = rewritten + len(e.left_alone), f"{e.lanes} lane{'s' if e.lanes > 1 else ''}"
    lines = [f"{rewritten} of {every} attentions rewritten" + (f", {lanes} in decode" if e.sites else "")]
    shapes = ((site.model_layer, (site.query_heads, site.heads, site.head_dim)) for site in e.sites)
    for layers, heads, kv_heads, width in grouped(shapes):
        lines.append(f"  layers {layers}: {heads} query heads, {kv_heads} KV heads of {width}{padding(e, width)}")
    if e.absorbed:
        lines.append(f"  layers {spans(e.absorbed)}: {ABSORBED}")
    reasons: dict[str, list[str]] = {}
    for item in e.left_alone:
        reasons.setdefault(item.reason, []).append(item.node.split(":")[0].removeprefix("layer "))
    for reason, where in reasons.items():
        lines += textwrap.wrap(f"left exact, {len(where)} ({spans(where)}): {reason}", WIDTH,
                               initial_indent="  ", subsequent_indent="    ")  # fmt: skip
    return "\n".join(lines)


def padding(e: Figures, head_dim: int) -> str:
    """The padding of a head's codes, if there is any."""
    layout, stored = getattr(e.options, "layout", None), stored_dim(head_dim)
    if layout is None or not layout.is_quantised or stored == head_dim:
        return ""
    return f" (low-bit codes padded to {stored}: {stored / head_dim - 1:.0%} more bytes)"


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
    memory = e.options.memory
    chosen = "" if memory is None else f"\nmemory {memory}: bits {e.options.bits} fit"  # type: ignore[attr-defined]
    return f"{table}{chosen}\nbesides: weights {size(e.weight_bytes)}; peak of the prefill {size(e.prefill_bytes)}"


def time_text(e: Figures) -> str:
    """The step's time beside a 16-bit cache's, at the batch that was given and at the largest one."""
    if "decode" not in e.graphs:
        return ""
    if not e.is_timed:
        return "Time of a decode step: not computed, because a CUDA graph cannot hold this method's step"
    (most, limit), full_most = e.largest_batch(), e.full_cache_batch()
    rows = [
        time_row(e.options.method, e.step(), most, limit, e.step(most) if most else None),
        time_row("16-bit cache", e.full_step(), full_most, "device", e.full_step(full_most) if full_most else None),
    ]
    headers = (
        f"decode step on {e.device.name}", "time", "bound by", "largest batch", "limited by", "its step",
        "tokens/s",
    )  # fmt: skip
    aligned = ("left", "right", "left", "right", "left", "right", "right")
    table = tabulate(rows, headers, colalign=aligned, disable_numparse=True)
    even = e.break_even()
    where = "at no context up to 128k tokens" if even is None else f"from {even:,} tokens of context on"
    return (
        f"{table}\nOne row is no slower than on a 16-bit cache {where}.\n"
        f"Simulated launch by launch, right to some 30 %; {e.device.vram_gib:.0f} GiB of device memory, "
        f"{e.host_gib:.0f} GiB of host memory"
    )


def time_row(name: str, step: ComputedStep, most: int, limit: str, largest: ComputedStep | None) -> tuple[str, ...]:
    last = ("-", "-") if largest is None else (duration(largest.seconds), f"{most / largest.seconds:,.0f}")
    return name, duration(step.seconds), step.bound, f"{most:,}", limit, *last


def further(e: Figures) -> str:
    """Three commands, or calls, to look further."""
    layer = next(site.model_layer for site in e.sites)
    commands = (f"{e.command} --layer {layer}", f"{e.command} --nodes", f"{e.command} --save report.html")
    calls = (f"print(e.layer({layer}))", "e.spans", 'e.save("report.html")')
    what = (
        "one layer, before and after",
        "each launch of a decode step",
        "tables, a timeline, each pass's changes",
    )
    lines = [f"  {way}  # {said}" for way, said in zip(commands if e.command else calls, what, strict=True)]
    return "\n".join(["Look further:", *lines])


def counted(report: PassReport) -> str:
    """What a pass did, in words: "moved 160, ..."."""
    return ", ".join(f"{name} {count}" for name, count in report.counts.items())


def cost_cells(flops: float, memory: float, to_device: float, to_host: float) -> tuple[str, ...]:
    return f"{flops / 1e9:,.2f}", size(memory), size(to_device), size(to_host)


def span_cells(spans: Iterable[Span]) -> tuple[str, ...]:
    """What launches compute and move together, and their seconds."""
    every = list(spans)
    kernels = [span.kernel for span in every]
    sums = (sum(getattr(k, name) for k in kernels) for name in ("flops", "memory", "to_device", "to_host"))
    return *cost_cells(*sums), duration(sum(span.end - span.start for span in every))


def by_op(spans: Iterable[Span]) -> list[tuple[str, ...]]:
    """Launches summed by op."""
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.kernel.stream, span.kernel.op), []).append(span)
    return [
        (stream, op, f"{len(same):,}", *span_cells(same), max(same, key=lambda s: s.end - s.start).bound)
        for (stream, op), same in groups.items()
    ]


OP_HEADERS = ("stream", "op", "launches", "GFLOP", "memory", "to device", "to host", "time", "bound by")


STEP_TIME_HEADERS = ("cache", "tokens", "batch 1", "bound by", "largest", "limited by", "step", "bound by", "tokens/s")


def step_time_note(e: Figures) -> str:
    """The assumptions of the computed steps."""
    load = e.traced().load
    notes = [f"{e.host_gib:.0f} GiB of host memory", f"{e.computed_steps[0].step.launches:.0f} launches a layer"]
    if e.options.top_k:
        corrected = f", {load.corrected:.0%} corrected" if e.corrects else ""
        notes.append(f"of the selected pairs {1 - load.reuse:.0%} travel ahead{corrected}")
    return "; ".join(notes)


def step_time_rows(e: Figures) -> list[tuple[str, ...]]:
    """A row for each cache and length: the step of one row and of the largest batch, its exposed part, and what limits
    that batch."""
    together: dict[tuple[str, int], list[StepRow]] = {}
    for row in e.computed_steps:
        together.setdefault((row.cache, row.length), []).append(row)
    rows: list[tuple[str, ...]] = []
    for (cache, length), found in together.items():
        cells = {bool(row.limit): (step_time_cells(row), row) for row in found}
        one = cells[False][0] if False in cells else ("-", "-")
        largest: tuple[str, ...] = ("-",) * 5
        if True in cells:
            shown, row = cells[True]
            largest = (f"{row.batch:,}", row.limit, *shown, f"{row.tokens:,.0f}")
        rows.append((cache, f"{length // 1024}k", *one, *largest))
    return rows


def step_time_cells(row: StepRow) -> tuple[str, str]:
    exposed = f" ({row.step.exposed * 1e3:.1f})" if row.step.exposed > 0.05e-3 else ""
    return f"{row.step.seconds * 1e3:.1f}{exposed}", row.step.bound


def round_text(e: Figures) -> str:
    """The summary of a verification; "" without one."""
    r = e.round()
    if r is None:
        return ""
    how = " (looked up)" if e.options.lookup else " (auto)" if e.options.verify == "auto" else ""
    drafted = f"{r.drafted} tokens drafted{how}"
    passed = "widened decode" if e.options.lookup else "exact pass"
    return "\n".join(
        (
            f"Verification ({COMPUTED}): {drafted}, each right by {e.accepted:.0%}: {r.tokens:.1f} tokens",
            f"  draft {duration(r.draft_seconds)}, {passed} {duration(r.verification_seconds)}: "
            f"{duration(r.seconds_per_token)} a token; offload {duration(r.offload_seconds)}",
            f"  from the host: {size(r.bytes_per_token)} a token; offload {size(r.offload_bytes)}",
        )
    )


def as_dict(e: Figures) -> dict[str, Any]:
    """Everything in the tables, and each launch by itself. Bytes, seconds, FLOPs."""
    load = e.load()
    data: dict[str, Any] = {
        "note": f"every figure is {COMPUTED}",
        "model": e.name,
        "prompt_length": e.prompt_length,
        "batch_size": e.batch_size,
        "ranks": e.ranks,
        "options": {**asdict(e.options), "inductor": dict(e.options.inductor)},
        "device": asdict(e.device),
        "reuse": load.reuse,
        "corrected": load.corrected,
        "lanes": e.lanes,
        "sites": [asdict(site) for site in e.sites],
        "left_alone": [asdict(item) for item in e.left_alone],
        "absorbed": list(e.absorbed),
        "passes": {phase: [asdict(r) for r in trace.reports] for phase, trace in e.traces.items()},
        "hashes": e.hashes,
        "memory": {
            "by_tier": dict(e.bytes_by_tier),
            "by_layer": e.bytes_by_layer,
            "device": e.device_bytes,
            "full_cache": e.full_cache_bytes,
            "kv_ratio": e.kv_ratio,
            "weights": e.weight_bytes,
            "temporaries": dict(e.working_bytes),
            "prefill": e.prefill_bytes,
            "host_gib": e.host_gib,
        },
    }
    if "decode" in e.graphs and e.sites:
        (most, limit), r = e.largest_batch(), e.round()
        data["memory"] |= {"largest_batch": most, "limit": limit, "largest_batch_full_cache": e.full_cache_batch()}
        data["step"] = asdict(e.step_cost())
        data["verification"] = None if r is None else {"accepted": e.accepted, **asdict(r)}
        data["nodes"] = [asdict(row) for row in e.launch_costs()]
    if e.is_timed:
        data["step"] |= {**asdict(e.step()), "full_cache_seconds": e.full_step().seconds,
                         "break_even_tokens": e.break_even()}  # fmt: skip
        data["launches"] = [asdict(span) for span in e.spans]
        data["computed_steps"] = [{**asdict(row), "tokens_per_second": row.tokens} for row in e.computed_steps]
    return data


def nodes_table(e: Figures) -> str:
    """Each launch of a decode step, in the order of its start."""
    e.check_timed()
    rows = [
        (span.kernel.name[:34], span.kernel.layer, span.kernel.stream, *span_cells([span]), span.bound)
        for span in sorted(e.spans, key=lambda span: span.start)
    ]
    headers = ("launch", "layer", "stream", "GFLOP", "memory", "to device", "to host", "time", "bound by")
    aligned = ("left", "right", "left", *("right",) * 5, "left")
    return f"Launches of a decode step on {e.device.name} ({COMPUTED})\n" + tabulate(
        rows, headers=headers, colalign=aligned, disable_numparse=True
    )
