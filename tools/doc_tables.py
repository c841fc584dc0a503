"""Generate the tables of README.md and docs/*.md, each between two markers, from the code and benchmarks/results.

    python tools/doc_tables.py --check     exit status 1 if a table is out of date
    python tools/doc_tables.py --write     write the tables and draw the demo's plot

The markers are <!-- table: NAME --> and <!-- end: NAME -->.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

import tests_path  # noqa: F401
from families import FAMILIES
from specache_compile.bench.table import answers_table, draw, profile_table, steps_table
from specache_compile.demo import show
from specache_compile.errors import OptionError
from specache_compile.evaluation.baselines.policies import POLICIES
from specache_compile.evaluation.cell_tables import table as results_table
from specache_compile.evaluation.result_rows import ResultRow
from specache_compile.evaluation.tasks import TASKS
from specache_compile.explaining.times.devices import DEVICES
from specache_compile.methods import declared_options, defaults_of, every_method, parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.passes.pipeline import PIPELINE
from specache_compile.runtime.state import full_cache_bytes, predicted_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLE = re.compile(r"<!-- table: (?P<name>\S+) -->\n(?P<text>.*?)<!-- end: (?P=name) -->", re.DOTALL)
MARKER = re.compile(r"<!-- (?:table|end): \S+ -->")
# What the device's share of the cache is computed for: 32,768 tokens of a Llama-3-8B's shape, in 16 bits.
SHAPE = [LayerShape(8, 128, torch.bfloat16, torch.device("meta"), number) for number in range(32)]
TOKENS = 32_768


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A Markdown table; its last `right` columns are numbers. Nothing is padded, so that a change is one line."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    rule = ["---"] * (len(headers) - right) + ["--:"] * right
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (list(headers), rule, *cells))


def fenced(text: str) -> str:
    return f"```\n{text}\n```"


def load(path: str) -> Any:
    return json.loads((RESULTS / path).read_text())


def summary_of(thing: Any) -> str:
    """The first paragraph of a docstring, as one line without its full stop."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).removesuffix(".")


def named(methods: Sequence[str]) -> str:
    """Methods in words: all of them, or their names, the eviction policies under one."""
    if len(methods) == len(every_method()):
        return "all"
    policies = set(POLICIES) <= set(methods)
    names = [f"`{name}`" for name in methods if not (policies and name in POLICIES)]
    return ", ".join([*names, *(["the eviction policies"] if policies else [])])


def families() -> str:
    """What a family's tiny test model has rewritten and exact, its lanes in decode, remarks."""
    headers = ("family", "attentions rewritten", "lanes", "")
    return markdown(headers, [
        (
            family.name,
            f"{family.absorbed} of {family.absorbed}, absorbed" if family.absorbed
            else f"{family.rewritten} of {family.rewritten + family.exact}",
            {2: "two", 1: "one"}[family.lanes] if family.rewritten else "–", family.note,
        )
        for family in FAMILIES
    ])  # fmt: skip


def every_family() -> str:
    """What benchmarks/every_family.py has found: the counts, and the families that are compressed, or left exact."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from every_family import counts, newest

    rows = newest([json.loads(line) for line in (RESULTS / "every_family.jsonl").read_text().splitlines()])
    ran = [row for row in rows if row["outcome"] == "ran"]
    named = {
        "Compressed": [row["family"] for row in ran if row["rewritten"]],
        "Left exact": [row["family"] for row in ran if not row["rewritten"]],
    }
    return "\n\n".join([counts(rows), *(f"{kind}: {', '.join(names)}." for kind, names in named.items())])


def versions() -> str:
    """The versions that the tests run on, as they are pinned."""

    def pinned(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text().splitlines()
        requirements = [Requirement(line) for line in lines if re.match(r"\w", line)]
        return {one.name: str(one.specifier).removeprefix("==") for one in requirements}

    kinds = ("", "-oldest", "-newest")
    pins = [pinned(f"constraints{kind}.txt") for kind in kinds]
    rows = [(n, *(one.get(n, "–") for one in pins)) for n in ("torch", "transformers", "triton")]
    return markdown(("", *(f"`make test{kind}`" for kind in kinds)), rows)


def accepted(name: str, declared: Any) -> str:
    """What an option accepts, in the words of the error that refuses other values."""
    for refused in (-1, "?"):
        try:
            declared.metadata["check"](name, refused)
        except OptionError as error:
            return str(error).split(": ", 1)[1].removeprefix("accepted are ").removeprefix("give ")
    return ""


# Options of every method that no command line can give.
IN_PYTHON = ("disable_passes", "inductor")


def options() -> str:
    """Each option: its default (and other defaults of single methods), accepted values, methods, and help."""
    rows = [("`method`", "`'specache'`", ", ".join(map(repr, every_method())), "all", "what is kept where: methods.md")]
    experiments: list[tuple[str, ...]] = []
    for name, takers in declared_options().items():
        usual, exceptions = defaults_of(takers)
        by_default: dict[str, list[str]] = {}
        for method, value in exceptions.items():
            by_default.setdefault(repr(value), []).append(method)
        others = [f"{named(methods)}: `{value}`" for value, methods in by_default.items()]
        declared = next(iter(takers.values()))
        (rows if declared.metadata["flag"].get("flag", True) or name in IN_PYTHON else experiments).append(
            (
                f"`{name}`", "; ".join([f"`{usual!r}`", *others]), accepted(name, declared), named(list(takers)),
                declared.metadata["help"],
            )
        )  # fmt: skip
    headers = ("option", "default", "accepted", "taken by", "")
    more = "Parts of `setting`, for experiments, without flags on the command line (`specache eval` accepts them):"
    return f"{markdown(headers, rows)}\n\n{more}\n\n{markdown(headers, experiments)}"


def methods() -> str:
    """Each method: the summary of its file, its tiers, and the computed share of the cache on the device."""
    rows = []
    for name, method in every_method().items():
        tiers = predicted_bytes(parse_options({"method": name}), SHAPE, 1, TOKENS)
        used = [tier for tier, size in tiers.items() if size]
        device = [tier for tier in used if tier != "host"]
        share = sum(tiers[tier] for tier in device) / full_cache_bytes(SHAPE, 1, TOKENS)
        source = POLICIES.get(name, method.options)
        rows.append(
            (
                f"`{name}`", summary_of(sys.modules[source.__module__]), ", ".join(device) or "–",
                "host" if "host" in used else "–", f"{share:.3f}",
            )
        )  # fmt: skip
    return markdown(("method", "", "tiers on the device", "on the host", "device KV"), rows, right=1)


def summary() -> str:
    """The demo's rows, as the README shows them: quality, bytes, time."""
    rows = load("demo.json")["rows"]
    return markdown(show.headers(rows), show.lines(rows), right=3)


def demo() -> str:
    """The tables that `make demo` prints."""
    rows = load("demo.json")["rows"]
    return fenced(f"{show.answers_table(rows)}\n{show.summary_table(rows)}")


def bench(dtype: str) -> str:
    """What `make bench` prints of a dtype."""
    rows = load(f"bench_{dtype}.json")["rows"]
    steps, answers = ([row for row in rows if row["part"] == part] for part in ("step", "answer"))
    parts = (steps_table(steps), answers_table(answers) if answers else "", profiles(steps))
    return fenced("\n\n".join(part for part in parts if part))


def profiles(steps: list[dict[str, Any]]) -> str:
    """Where a step of torch.compile's goes, and one of the default's; nothing where none was profiled."""
    shown = [row for row in steps if row["method"] in ("compiled", "specache") and row.get("profile")]
    return profile_table(shown) if shown else ""


def printed(program: str, results: str, name: str = "table", of: str = "rows") -> str:
    """What a benchmark prints of some of its results: its function of this name makes it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    table: str = getattr(import_module(program), name)(load(f"{results}.json")[of])
    return fenced(table)


def figures(name: str) -> str:
    """The figures of a benchmark with one row."""
    rows = [(what, f"{figure:,}") for what, figure in load(f"{name}.json").items() if what != "provenance"]
    return markdown(("", "measured"), rows, right=1)


def gpu() -> str:
    """The measurements of a GPU; a smoke run or a simulated device has none."""
    if not (RESULTS / "gpu_table.json").exists() or load("gpu_table.json")["no figures"] is not None:
        return "Nothing has been measured on a GPU yet."
    tables: str = load("gpu_table.json")["tables"]
    return tables


def gains() -> str:
    """The computed number of sequences on a 24 GB GPU, and their combined tokens per second."""
    names = {
        "16 bits": "16-bit cache",
        "fp8": "FP8 cache",
        "KIVI, 2 bits": "KIVI, 2 bits",
        "default": "specache, the default",
    }
    lengths = {8_192: "8k", 32_768: "32k", 131_072: "128k"}
    rows = [row for row in load("computed_steps.json")["rows"] if row["device"] == "RTX 4090"]

    def cell(cache: str, length: int) -> str:
        fitting = [row for row in rows if (row["cache"], row["length"]) == (cache, length)]
        most = max(fitting, key=lambda row: row["batch"], default=None)
        return "none fits" if most is None else f"{most['batch']} → {most['tokens/s']:,.0f}"

    body = [(name, *(cell(cache, length) for length in lengths)) for cache, name in names.items()]
    return markdown(("", *(f"of {length} tokens" for length in lengths.values())), body, right=len(lengths))


COMPUTED_ON = ("H100", "A100", "RTX 4090")


def computed_steps() -> str:
    """Computed steps of an 8B model on three devices."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from computed_steps import HEADERS, table_of

    report = load("computed_steps.json")
    parts = []
    for device in COMPUTED_ON:
        contexts = report["break-even"][device]
        parts += [
            f"{device}, {report['settings']['host GiB']:g} GiB of host memory; the default gains on 16 bits from "
            f"{contexts['default']:,} tokens of one row on:",
            markdown(HEADERS, table_of(report["rows"], device), right=len(HEADERS) - 1),
        ]
    return "\n\n".join(parts)


def quality(folder: str, task: str) -> str:
    """One task of an evaluation of `make quality`, as `specache eval` prints it."""
    rows = [ResultRow(**row) for row in load(f"quality/{folder}/results.json")["rows"]]
    return fenced(results_table([row for row in rows if row.task == task]))


def tasks() -> str:
    """The tasks of `specache eval`, with the summaries of their files."""
    rows = [(f"`{name}`", summary_of(sys.modules[cells.__module__])) for name, cells in TASKS.items()]
    return markdown(("task", ""), rows)


def devices() -> str:
    """The devices of `specache explain`, from their data sheets."""
    headers = ("device", "memory, GB/s", "PCIe one way, GB/s", "dense 16-bit TFLOP/s", "VRAM, GiB")
    rows = [
        (d.name, f"{d.hbm_gbps:g}", f"{d.pcie_gbps:g}", f"{d.tflops:g}", f"{d.vram_gib:g}") for d in DEVICES.values()
    ]
    return markdown(headers, rows, right=4)


def passes() -> str:
    """The pipeline in its order."""
    return markdown(("pass", ""), [(f"`{p.__name__}`", summary_of(sys.modules[p.__module__])) for p in PIPELINE])


QUALITY = (("closeness", "closeness"), ("needles_smollm2", "needle"), ("needles_blind", "needle"))
# Benchmarks with one table.
PRINTED = ("cold_start", "batching", "serve_load")
GENERATORS: dict[str, Callable[[], str]] = {
    **{
        made.__name__: made
        for made in (
            families, every_family, versions, options, methods, summary, demo, gpu, gains, computed_steps,
            tasks, devices, passes,
        )
    },
    **{name: partial(printed, name, name) for name in PRINTED},
    "batching_fits": partial(printed, "batching", "batching", "fits_table", "fits"),
    "latents": partial(printed, "latent_attention", "latents"),
    "verification": partial(printed, "verify_drafts", "verify"),
    **{f"figures-{name}": partial(figures, name) for name in ("restarts", "serve")},
    **{f"quality-{folder}-{task}": partial(quality, folder, task) for folder, task in QUALITY},
    **{f"bench-{dtype}": partial(bench, dtype) for dtype in ("bfloat16", "float32")},
}  # fmt: skip


def renewed(text: str) -> str:
    """A page with current tables; ValueError for a marker without a partner or for an unknown table."""
    found = list(TABLE.finditer(text))
    markers = [f"<!-- {side}: {table['name']} -->" for table in found for side in ("table", "end")]
    if MARKER.findall(text) != markers:
        raise ValueError("a marker has no partner, or is inside another table")
    for table in found:
        if table["name"] not in GENERATORS:
            raise ValueError(f"unknown table {table['name']!r}; known tables are {', '.join(sorted(GENERATORS))}")
    return TABLE.sub(lambda table: between(table["name"], GENERATORS[table["name"]]()), text)


def between(name: str, table: str) -> str:
    return f"<!-- table: {name} -->\n{table}\n<!-- end: {name} -->"


def differing(old: str, new: str) -> list[str]:
    """The names of the tables that differ between two versions of a page."""
    return [a["name"] for a, b in zip(TABLE.finditer(old), TABLE.finditer(new), strict=True) if a["text"] != b["text"]]


def main(arguments: Sequence[str] | None = None, pages: Sequence[Path] = PAGES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    args = parser.parse_args(arguments)
    status, used = 0, set()
    for page in pages:
        text = page.read_text()
        try:
            current = renewed(text)
        except ValueError as error:
            print(f"{page.name}: {error}", file=sys.stderr)
            return 2
        used |= {table["name"] for table in TABLE.finditer(text)}
        if args.write and current != text:
            page.write_text(current)
        elif current != text:
            names = ", ".join(differing(text, current))
            print(f"{page.name}: out of date: {names}: python tools/doc_tables.py --write", file=sys.stderr)
            status = 1
    if args.write and tuple(pages) == PAGES:
        draw(load("demo.json")["rows"], ROOT / "docs" / "demo.png", show.METHODS)
    if args.check and (idle := sorted(set(GENERATORS) - used)) and tuple(pages) == PAGES:
        print(f"no page has table {', '.join(idle)}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
