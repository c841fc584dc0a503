"""An explanation as text of at most 100 columns, and as plain data. Both say that nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from specache_compile.kernels.costs import Cost
from specache_compile.passes.plan import PassReport

from .figures import Figures, NodeCost
from .times.roofline import total
from .times.step_time import StepRow

COMPUTED = "computed, not measured"
WIDTH = 100


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


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def spans(numbers: Iterable[str]) -> str:
    """Layers "0", "1", "2", "5" as 0-2, 5."""
    found: list[list[str]] = []
    for number in numbers:
        if found and number.isdigit() and found[-1][1].isdigit() and int(number) == int(found[-1][1]) + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(a if a == b else f"{a}-{b}" for a, b in found)


def grouped(rows: Iterable[tuple[str, tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Join equal rows of several layers into one, with the layers' span before it."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer, row in rows:
        groups.setdefault(row, []).append(layer)
    return [(spans(layers), *row) for row, layers in groups.items()]


def section(title: str, rows: Sequence[Any], headers: Sequence[str], **settings: Any) -> str:
    right = settings.pop("right", 0)
    align = tuple("left" if i < len(headers) - right else "right" for i in range(len(headers)))
    return f"{title}\n" + tabulate(rows, headers=headers, colalign=align, disable_numparse=True, **settings)


def text(e: Figures) -> str:
    lanes = f"{e.lanes} lane{'s' if e.lanes > 1 else ''}"
    part = f"One of {e.ranks} ranks: its own part, without the time of collectives.\n" if e.ranks > 1 else ""
    parts = [
        f"{e.options.method}: {len(e.sites)} attentions rewritten, {len(e.left_alone)} left exact, {lanes} in decode; "
        f"{e.prompt_length:,} tokens x batch {e.batch_size}\n"
        f"{part}{e.name[:60]}: every figure below is {COMPUTED}."
    ]
    if e.sites:
        parts.append(sites_table(e))
    if e.left_alone:
        rows = [(item.node, item.reason) for item in e.left_alone]
        parts.append(section("Left as Hugging Face wrote it", rows, ("where", "why"), maxcolwidths=[40, 54]))
    if e.traces:
        parts.append(passes_table(e))
    if e.sites:
        parts.append(memory_table(e))
    if "decode" in e.graphs:
        parts += [traffic_table(e), step_text(e), step_time_table(e), round_text(e), compare_table(e)]
    return "\n\n".join(filter(None, parts))


def sites_table(e: Figures) -> str:
    phases = ", ".join(e.traces)
    rows = [
        (s.model_layer, (s.query_heads, s.heads, s.head_dim, "yes" if s.mask else "no", s.softcap or "-",
                         "yes" if s.sinks else "no", phases)) for s in e.sites
    ]  # fmt: skip
    headers = ("layer", "q heads", "KV heads", "head dim", "mask", "softcap", "sinks", "rewritten in")
    return section("Attentions rewritten", grouped(rows), headers)


def counted(report: PassReport) -> str:
    """What a pass did, in words: "moved 160, ..."."""
    return ", ".join(f"{name} {count}" for name, count in report.counts.items())


def passes_table(e: Figures) -> str:
    rows = [
        (phase, r.name, counted(r), f"{r.seconds * 1e3:.0f}", "; ".join(r.remarks))
        for phase, trace in e.traces.items()
        for r in trace.reports
    ]  # fmt: skip
    hashes = "  ".join(f"{phase} {value}" for phase, value in e.hashes.items())
    table = section(
        "Passes (the milliseconds are those that this run took)", rows, ("phase", "pass", "what it did", "ms", ""),
        maxcolwidths=[None, None, 34, None, 22],
    )  # fmt: skip
    return f"{table}\ngraph hashes: {hashes}"


def memory_table(e: Figures) -> str:
    tiers = list(e.bytes_by_tier)
    full = e.full_cache_bytes
    per_layer = grouped(
        (site.model_layer, (*(size(tier.get(t, 0)) for t in tiers), size(sum(tier.values()) - tier["host"])))
        for site, tier in zip(e.sites, e.bytes_by_layer, strict=True)
    )
    rows = [(f"layer {row[0]}, each", *row[1:]) for row in per_layer]
    rows.append(("all layers", *(size(e.bytes_by_tier[t]) for t in tiers), size(e.device_bytes)))
    shares = [*(e.bytes_by_tier[t] for t in tiers), e.device_bytes]
    rows.append(("of the full 16-bit cache", *(f"{x / max(1, full):.3f}" for x in shares)))
    host = f"{e.host_gib:.0f} GiB of host memory"
    device = f"{e.device.name} ({e.device.vram_gib:.0f} GiB)"
    asked = e.options.memory
    chosen = "" if asked is None else f"\nmemory {asked}: bits {e.options.bits} fit"  # type: ignore[attr-defined]
    return (
        section(f"KV memory ({COMPUTED})", rows, ("", *tiers, "on the device"), right=len(tiers) + 1)
        + chosen
        + f"\nfull 16-bit cache {size(full)}, weights {size(e.weight_bytes)}, temporaries of a decode step "
        f"{size(e.working_bytes.get('decode', 0))}\n"
        f"peak of a prefill beside the weights, nothing fused: {size(e.prefill_bytes)}\n"
        f"largest batch, {device} and {host}: {e.largest_batch():,} (full cache: {e.full_cache_batch():,})"
    )


def by_op(rows: Iterable[NodeCost]) -> list[tuple[str, str, int, Cost, float, str]]:
    """Launches summed by op: (stream, op, count, cost, seconds, bound)."""
    groups: dict[tuple[str, str], list[NodeCost]] = {}
    for row in rows:
        groups.setdefault((row.stream, row.op), []).append(row)
    return [
        (stream, op, len(same), total(r.cost for r in same), sum(r.seconds for r in same),
         max(same, key=lambda r: r.seconds).bound)
        for (stream, op), same in groups.items()
    ]  # fmt: skip


def cost_cells(cost: Cost) -> tuple[str, ...]:
    return f"{cost.flops / 1e9:,.2f}", size(cost.hbm), size(cost.to_device), size(cost.to_host)


def traffic_table(e: Figures) -> str:
    rows = [
        (stream, op, str(count), *cost_cells(cost), duration(seconds), bound if seconds else "-")
        for stream, op, count, cost, seconds, bound in by_op(e.roofline())
    ]
    every = e.step_cost()
    rows.append(("all", "", str(sum(int(r[2]) for r in rows)), *cost_cells(every), "", ""))
    d = e.device
    title = (
        f"One decode step on {d.name}: {d.hbm_gbps:,.0f} GB/s memory, {d.pcie_gbps:g} GB/s PCIe, "
        f"{d.tflops:,.0f} TFLOP/s\n"
        f"({COMPUTED}; times are the roofline's floor; {e.reuse:.0%} of wanted pairs in the slots already"
        f"{f',{chr(10)}{e.corrected:.0%} of the wanted corrected within the step' if e.corrects else ''})"
    )
    headers = ("stream", "op", "n", "GFLOP", "memory", "to device", "to host", "time", "bound by")
    aligned = ("left", "left", *("right",) * 6, "left")
    return f"{title}\n" + tabulate(rows, headers=headers, colalign=aligned, disable_numparse=True)


def step_text(e: Figures) -> str:
    step, full, even = e.step(), e.full_step(), e.break_even()
    on_path: dict[str, float] = {}
    ops = {row.name: row for row in e.roofline()}
    for _, name in step.critical_path:
        on_path[ops[name].op] = on_path.get(ops[name].op, 0.0) + ops[name].seconds
    biggest = sorted((item for item in on_path.items() if item[1]), key=lambda item: -item[1])[:3]
    path = ", ".join(f"{op} {duration(seconds)}" for op, seconds in biggest)
    where = "at no context up to a million tokens" if even is None else f"from {even:,} tokens of context on"
    return "\n".join(
        (
            f"Step ({COMPUTED}): {duration(step.seconds)}; full cache {duration(full)}; "
            f"{full / step.seconds:.2f}x as fast",
            f"  streams busy: compute {duration(step.compute)}, copy {duration(step.copy)}",
            f"  waited for fetches: {duration(step.waited)}; {share(step.hidden)} of the fetches' time is hidden",
            f"  critical path, {len(step.critical_path)} launches: {path}",
            f"  faster than the full cache at batch {e.batch_size}: {where}",
        )
    )


STEP_TIME_HEADERS = ("cache", "tokens", "batch 1", "bound by", "largest", "step", "bound by", "tokens/s")


def step_time_note(e: Figures) -> str:
    """The assumptions of the computed steps."""
    load = e.traced().load
    notes = [f"{e.host_gib:.0f} GiB of host memory", f"{e.computed_steps[0].step.launches:.0f} launches a layer"]
    if e.options.top_k:
        corrected = f", {load.corrected:.0%} corrected" if e.corrects else ""
        notes.append(f"of the wanted pairs {1 - load.reuse:.0%} travel ahead{corrected}")
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
        largest = ("-", "-", "-", "-")
        if True in cells:
            shown, row = cells[True]
            largest = (f"{row.batch:,} ({row.limit})", *shown, f"{row.tokens:,.0f}")
        rows.append((cache, f"{length // 1024}k", *one, *largest))
    return rows


def step_time_cells(row: StepRow) -> tuple[str, str]:
    exposed = f" ({row.step.exposed * 1e3:.1f})" if row.step.exposed > 0.05e-3 else ""
    return f"{row.step.seconds * 1e3:.1f}{exposed}", row.step.bound


def step_time_table(e: Figures) -> str:
    """The step's time by events, beside the roofline's floor; "" where there is none."""
    if not e.computed_steps:
        return ""
    title = (
        f"The step by events on {e.device.name} ({COMPUTED}; within some 30 %)\n"
        f"(in ms, in a CUDA graph; in brackets those in which compute waits for PCIe;\n{step_time_note(e)})"
    )
    headers, aligned = STEP_TIME_HEADERS, ("left", "right", "right", "left", "right", "right", "left", "right")
    table = tabulate(step_time_rows(e), headers=headers, colalign=aligned, disable_numparse=True)
    even = e.computed_break_even
    where = "at no context up to 128k" if even is None else f"from {even:,} tokens of context on"
    return f"{title}\n{table}\nno slower than 16 bits at batch 1: {where} (see min_context)"


def round_text(e: Figures) -> str:
    """The sum of a verification; "" where none was asked for."""
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


def compare_table(e: Figures) -> str:
    rows = [
        (f"{a.bits}", f"{a.group_size}", f"{a.top_k}", size(a.device_bytes), f"{a.kv_ratio:.3f}", size(a.fetched_bytes),
         duration(a.step), f"{a.speedup:.2f}x", f"{a.largest_batch:,}") for a in e.compare()
    ]  # fmt: skip
    if not rows:
        return ""
    headers = ("bits", "g", "k", "device KV", "ratio", "fetched/step", "step", "speed", "largest batch")
    return section(f"With other options ({COMPUTED}; the first row is as asked)", rows, headers, right=9)


def as_dict(e: Figures) -> dict[str, Any]:
    """Everything in the tables, and each launch by itself. Bytes, seconds, FLOPs."""
    data: dict[str, Any] = {
        "note": f"every figure is {COMPUTED}",
        "model": e.name,
        "prompt_length": e.prompt_length,
        "batch_size": e.batch_size,
        "ranks": e.ranks,
        "options": {**asdict(e.options), "inductor": dict(e.options.inductor)},
        "device": asdict(e.device),
        "reuse": e.reuse,
        "corrected": e.corrected,
        "lanes": e.lanes,
        "sites": [asdict(site) for site in e.sites],
        "left_alone": [asdict(item) for item in e.left_alone],
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
            "largest_batch": e.largest_batch() if e.sites else None,
            "largest_batch_full_cache": e.full_cache_batch() if e.sites else None,
        },
    }
    if "decode" in e.graphs:
        step = asdict(e.step())
        step["critical_path"] = [name for _, name in step["critical_path"]]
        data["step"] = {
            **step,
            **asdict(e.step_cost()),
            "full_cache_seconds": e.full_step(),
            "break_even_tokens": e.break_even(),
        }
        r = e.round()
        data["verification"] = None if r is None else {"accepted": e.accepted, **asdict(r)}
        data["nodes"] = [asdict(row) for row in e.roofline()]
        data["computed_steps"] = [{**asdict(row), "tokens_per_second": row.tokens} for row in e.computed_steps]
        data["computed_break_even_tokens"] = e.computed_break_even if e.computed_steps else None
        data["alternatives"] = [asdict(row) for row in e.compare()]
    return data


def nodes_table(e: Figures) -> str:
    """Each launch of a decode step, in its order."""
    rows = [
        (r.name[:34], r.layer, r.stream, *cost_cells(r.cost)[:3], duration(r.seconds), r.bound if r.seconds else "-")
        for r in e.roofline()
    ]
    headers = ("launch", "layer", "stream", "GFLOP", "memory", "PCIe", "time", "bound by")
    aligned = ("left", "right", "left", *("right",) * 4, "left")
    return f"Launches of a decode step on {e.device.name} ({COMPUTED})\n" + tabulate(
        rows, headers=headers, colalign=aligned, disable_numparse=True
    )
