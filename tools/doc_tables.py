"""Generate the tables of README.md, docs/*.md and benchmarks/results/*.md, each between two markers.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from packaging.requirements import Requirement

import tests_path  # noqa: F401
from api_page import api
from families import FAMILIES, Family
from specache_compile.bench.demo import METHODS, summary_table
from specache_compile.bench.table import MIB, draw
from specache_compile.errors import OptionError
from specache_compile.evaluation.baselines.policies import POLICIES
from specache_compile.evaluation.intervals import interval, wilson
from specache_compile.evaluation.result_rows import ResultRow
from specache_compile.evaluation.settings import parse_setting
from specache_compile.explaining.times.devices import DEVICES
from specache_compile.methods import declared_options, defaults_of, every_method, parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.methods.slots import pairs_to_fetch
from specache_compile.passes.pipeline import PIPELINE
from specache_compile.runtime.state import full_cache_bytes, predicted_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(RESULTS.glob("*.md")))
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


def quality(folder: str) -> list[ResultRow]:
    """The rows of a quality table; ValueError if one was measured with other options than its method has today."""
    rows = [ResultRow(**row) for row in load(f"quality/{folder}/results.json")["rows"]]
    for row in rows:
        stated, measured = parse_setting(row.method).effective, json.loads(row.key).get("options", {})
        if stated.get("top_k") == "auto" != measured.get("top_k", "auto"):  # it was the number for this model
            layer = replace(SHAPE[0], heads=1 if "gemma" in folder else 3)
            stated = stated | {"top_k": pairs_to_fetch(parse_options({}), layer)}
        for name in stated.keys() & measured.keys():
            if stated[name] != measured[name]:
                raise ValueError(
                    f"{folder}: {row.method} was measured with {name}={measured[name]!r}, and has {stated[name]!r} "
                    f"today. Delete the folder and run python benchmarks/quality.py {folder}"
                )
    return rows


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


# Models by the name that people know, for the families of `tests/families.py`.
MODELS = {
    "llama 2": "Llama 2", "llama 3": "Llama 3", "llama 3.x": "Llama 3.1 to 3.3", "mistral": "Mistral v0.2 and later",
    "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen2_moe": "Qwen2-MoE", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE",
    "gemma": "Gemma", "phi": "Phi-2", "phi3": "Phi-3 and Phi-4", "granite": "Granite", "granitemoe": "Granite MoE",
    "olmo": "OLMo", "olmo2": "OLMo 2", "olmoe": "OLMoE", "cohere": "Command R", "starcoder2": "StarCoder2",
    "stablelm": "StableLM", "smollm3": "SmolLM3", "glm4": "GLM-4", "glm4_moe": "GLM-4.5", "seed_oss": "Seed-OSS",
    "ernie4_5": "ERNIE 4.5", "gpt_neox": "GPT-NeoX", "opt": "OPT", "hunyuan_v1_dense": "Hunyuan",
    "minimax_m2": "MiniMax-M2", "gptj": "GPT-J", "falcon, alibi": "Falcon",
    "gemma2": "Gemma 2", "gemma3_text": "Gemma 3", "gemma4_text": "Gemma 4", "cohere2": "Command R7B",
    "exaone4": "EXAONE 4", "gpt_oss": "gpt-oss", "olmo3": "OLMo 3",
    "qwen3_5_text": "Qwen3.5", "qwen3_5_moe_text": "Qwen3.5-MoE", "qwen3_next": "Qwen3-Next", "lfm2": "LFM2",
    "falcon_h1": "Falcon-H1", "zamba2": "Zamba2", "granitemoehybrid": "Granite 4 hybrid", "nemotron_h": "Nemotron-H",
    "jamba": "Jamba", "bamba": "Bamba", "minimax": "MiniMax-Text",
    "deepseek_v2": "DeepSeek-V2", "deepseek_v3": "DeepSeek-V3 and R1", "deepseek_v32": "DeepSeek-V3.2",
    "minicpm3": "MiniCPM3", "glm4_moe_lite": "GLM-4 MoE Lite", "kimi_linear": "Kimi Linear",
    "mistral, sliding": "Mistral v0.1",
}  # fmt: skip


# What the backend does with the attentions of a family, and which families that holds for; the first match counts.
TREATMENTS: dict[str, Callable[[Family], bool]] = {
    "Not compressed, but rewritten and exact: latent attention": lambda family: bool(family.absorbed),
    "Not compressed: every layer has a sliding window": lambda family: not family.rewritten,
    "Attention layers compressed, recurrent layers exact": lambda family: "hybrid" in family.note,
    "Global layers compressed, sliding-window layers exact": lambda family: bool(family.exact),
    "Every layer compressed": lambda family: True,
}


def models() -> str:
    """Models by name, grouped by what the backend does with their attentions."""
    groups: dict[str, list[str]] = {treatment: [] for treatment in TREATMENTS}
    by_name = {family.name: family for family in FAMILIES}
    for name, model in MODELS.items():
        groups[next(treatment for treatment, holds in TREATMENTS.items() if holds(by_name[name]))].append(model)
    listed = reversed(groups.items())  # the largest group first
    rows = [(treatment, ", ".join(sorted(names, key=str.lower))) for treatment, names in listed]
    return markdown(("what the backend does", "models"), rows)


def tested_families() -> list[dict[str, Any]]:
    """The rows that benchmarks/every_family.py stored for the newest versions."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from every_family import newest

    return newest([json.loads(line) for line in (RESULTS / "every_family.jsonl").read_text().splitlines()])


def family_counts() -> str:
    """How many families of transformers are rewritten and left exact."""
    rows = tested_families()
    rewritten = sum(bool(row.get("rewritten")) for row in rows)
    ran, not_run = (sum(row["outcome"] == outcome for row in rows) for outcome in ("ran", "not run"))
    unfinished = f", and {failed} did not finish" if (failed := len(rows) - ran - not_run) else ""
    return (
        f"transformers {rows[0]['transformers']} has {len(rows)} families of causal models: {rewritten} are rewritten, "
        f"{ran - rewritten} stay exact, {not_run} do not run uncompiled{unfinished}."
    )


def every_family() -> str:
    """The families of transformers that are rewritten, and those that are left exact."""
    rows = tested_families()
    from every_family import counts

    ran = [row for row in rows if row["outcome"] == "ran"]
    listed = [
        ("rewritten", ", ".join(row["family"] for row in ran if row["rewritten"])),
        ("left exact", ", ".join(row["family"] for row in ran if not row["rewritten"])),
    ]
    return f"{counts(rows)}\n\n{markdown(('result', 'families'), listed)}"


def versions() -> str:
    """The versions that the tests run on, as they are pinned."""

    def pinned(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text().splitlines()
        requirements = [Requirement(line) for line in lines if re.match(r"\w", line)]
        return {one.name: str(one.specifier).removeprefix("==") for one in requirements}

    kinds = ("", "-oldest", "-newest")
    pins = [pinned(f"constraints{kind}.txt") for kind in kinds]
    rows = [(n, *(one.get(n, "–") for one in pins)) for n in ("torch", "transformers", "triton")]
    return markdown(("package", *(f"`make test{kind}`" for kind in kinds)), rows)


def accepted(name: str, declared: Any) -> str:
    """What an option accepts, in the words of the error that refuses other values."""
    for refused in (-1, "?"):
        try:
            declared.metadata["check"](name, refused)
        except OptionError as error:
            return re.sub("^(?:accepted (?:are|is) |give )", "", str(error).split(": ", 1)[1])
    return ""


# The options that people set first, each with the case for it.
OFTEN = {
    "bits": "you trade accuracy (more bits) against VRAM (fewer bits)",
    "top_k": "you trade accuracy (more pairs) against copied bytes (fewer pairs)",
    "host_memory": "the host tier needs more RAM, or must leave RAM free",
    "host_bits": "you trade exact pairs (16) against half of the RAM (8)",
    "verify": "the tokens must equal the full cache's",
    "min_context": "shorter caches must stay in 16 bits",
    "mode": "the decode step must run as one CUDA graph (`reduce-overhead`)",
}
# The options that differ between settings and methods; those without a flag on the command line are here alone.
SETTING = {
    "bits": "bits of the low-bit tier",
    "residual_length": "newest tokens in 16 bits",
    "top_k": "pairs to fetch",
    "sink_tokens": "first tokens in 16 bits",
    "host_bits": "bits of the host tier",
    "center": "mean key before RoPE subtracted before quantisation",
    "zero_point": "position of the levels of a group",
    "key_code": "levels, or a 1-bit trellis, for keys",
    "value_code": "levels, or a 1-bit trellis, for values",
}
Takers = Mapping[str, Any]


def is_flag(takers: Takers) -> bool:
    """Whether an option has a flag on the command line."""
    return bool(next(iter(takers.values())).metadata["flag"].get("flag", True))


def described(options: Mapping[str, Takers], last: Callable[[str, Any], str]) -> list[tuple[str, ...]]:
    """A row for each option: its default, the accepted values, and `last` of its name and declaration."""
    rows = []
    for name, takers in options.items():
        default, declared = defaults_of(takers)[0], next(iter(takers.values()))
        rows.append((f"`{name}`", f"`{default!r}`", accepted(name, declared), last(name, declared)))
    return rows


def options_often() -> str:
    """The options that people set first, with the case for each."""
    declared = declared_options()
    rows = described({name: declared[name] for name in OFTEN}, lambda name, _: OFTEN[name])
    return markdown(("option", "default", "accepted values", "set the option when"), rows)


def options() -> str:
    """The other options of the method specache; `setting` is explained with the options that it sets."""
    found = {
        name: takers for name, takers in declared_options().items()
        if "specache" in takers and name not in (*OFTEN, "setting") and is_flag(takers)
    }  # fmt: skip
    rows = described(found, lambda _, declared: declared.metadata["help"].split("; ")[0])
    return markdown(("option", "default", "accepted values", "effect"), rows)


def options_setting() -> str:
    """The options whose defaults differ between the settings of specache, and the method kivi."""
    requested: tuple[dict[str, Any], ...] = ({}, {"setting": "paper"}, {"method": "kivi"})
    made = [parse_options(given) for given in requested]
    rows = []
    for name, takers in declared_options().items():
        values = [f"`{getattr(options, name)!r}`" if options.method in takers else "–" for options in made]
        if "specache" in takers and name != "setting" and len({*values} - {"–"}) > 1:
            rows.append((f"`{name}`", *values, SETTING[name]))
    return markdown(("option", '`setting="best"`', '`setting="paper"`', '`method="kivi"`', "meaning"), rows)


def options_baselines() -> str:
    """The options that only methods for comparison have."""
    rows = []
    for name, takers in declared_options().items():
        if "specache" not in takers:
            rows.append((f"`{name}`", f"`{defaults_of(takers)[0]!r}`", named(list(takers))))
    return markdown(("option", "default", "methods"), rows)


def methods() -> str:
    """Each method: the first sentence of its file, and the device's share of the cache as computed."""
    rows = []
    for name, method in every_method().items():
        tiers = predicted_bytes(parse_options({"method": name}), SHAPE, 1, TOKENS)
        share = sum(size for tier, size in tiers.items() if tier != "host") / full_cache_bytes(SHAPE, 1, TOKENS)
        source = POLICIES.get(name) or sys.modules[method.options.__module__]
        sentence = re.split(r"(?<! al)\. ", summary_of(source))[0]
        rows.append((f"`{name}`", sentence, f"{share:.3f}"))
    return markdown(("method", "description", "device KV"), rows, right=1)


def demo() -> str:
    """The summary that `make demo` prints."""
    return fenced(summary_table(load("demo.json")["rows"]))


def selected(rows: Iterable[Any], names: int, columns: dict[str, Callable[[Any], str]]) -> str:
    """A Markdown table of rows.

    Args:
        names: how many of the first columns are text; the others are numbers.
        columns: the function from a row to its cell, by the column's header.
    """
    lines = [[cell(row) for cell in columns.values()] for row in rows]
    return markdown(list(columns), lines, right=len(columns) - names)


def bench() -> str:
    """Decode steps and cache sizes in float32, as `make bench` measured them."""
    rows = load("bench_float32.json")["rows"]
    compiled = {row["context"]: row["step_ms"] for row in rows if row["method"] == "compiled"}
    return selected(rows, 1, {
        "method": lambda row: f"`{row['method']}`",
        "context, tokens": lambda row: f"{row['context']:,}",
        "median decode step, ms": lambda row: f"{row['step_ms']:.1f}",
        "step time relative to `compiled`": lambda row: f"{row['step_ms'] / compiled[row['context']]:.2f}",
        "first token, s": lambda row: f"{row['first_token_s']:.1f}",
        "further turn of 512 tokens, s": lambda row: f"{row['extend_ms'] / 1e3:.2f}",
        "device KV cache, MiB": lambda row: f"{row['device_bytes'] / MIB:.1f}",
        "host KV cache, MiB": lambda row: f"{row['host_bytes'] / MIB:.0f}",
    })  # fmt: skip


def cold_start() -> str:
    """Seconds to the first tokens of a process, with empty and with filled caches."""
    rows = load("cold_start.json")["rows"]
    plain = {row["caches"]: row["seconds"] for row in rows if row["way"] == "torch.compile"}
    return selected(rows, 2, {
        "Inductor's cache folder": lambda row: {"cold": "empty", "warm": "filled"}[row["caches"]],
        "compiler": lambda row: row["way"].replace("traces kept", "stored traces"),
        "first 8 tokens, s": lambda row: f"{row['seconds']:.1f}",
        "relative to `torch.compile`": lambda row: f"{row['seconds'] / plain[row['caches']]:.2f}",
        "next 8 tokens, s": lambda row: f"{row['again']:.2f}",
    })  # fmt: skip


def latents() -> str:
    """Decode steps of latent attention, with plain torch.compile and absorbed."""
    steps: dict[tuple[str, int], dict[str, Any]] = {}
    for row in (row for row in load("latents.json")["rows"] if row["dtype"] == "float32"):
        steps.setdefault((row["shape"], row["context"]), {})[row["method"]] = row
    return selected(steps.items(), 1, {
        "attention shape": lambda step: step[0][0],
        "context, tokens": lambda step: f"{step[0][1]:,}",
        "`torch.compile`, ms per step": lambda step: f"{step[1]['compiled']['step_ms']:,.0f}",
        "specache, ms per step": lambda step: f"{step[1]['specache']['step_ms']:.0f}",
        "speed-up": lambda step: f"{step[1]['compiled']['step_ms'] / step[1]['specache']['step_ms']:.1f}",
    })  # fmt: skip


def batching() -> str:
    """The table that benchmarks/batching.py prints of its results."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return fenced(import_module("batching").table(load("batching.json")["rows"]))


# The caches of `gpu`, by their names in gpu_decode.json.
MEASURED = {"16 bits, k = 0": "our 16-bit cache", "specache best": "specache"}


def gpu() -> str:
    """The measurements of a GPU."""
    report = load("gpu_decode.json")
    origin, rows = report["provenance"], report["rows"]
    ours = {row["at"]: row["tokens/s"] for row in rows if row["method"] == "16 bits, k = 0"}
    table = selected(sorted(rows, key=lambda row: (list(MEASURED).index(row["method"]), row["batch"])), 1, {
        "cache": lambda row: MEASURED[row["method"]],
        "sequences": lambda row: f"{row['batch']}",
        "ms per step, measured": lambda row: f"{row['ms']:.1f}",
        "ms per step, simulated": lambda row: f"{row['simulated ms']:.1f}",
        "tokens/s of all": lambda row: f"{row['tokens/s']:,.0f}",
        "tokens/s relative to our 16-bit cache": lambda row: f"{row['tokens/s'] / ours[row['at']]:.2f}",
        "PCIe, MB per step": lambda row: f"{row.get('bytes to device', 0) / 1e6:,.0f}",
        "share of the roofline": lambda row: f"{row['roofline share']:.0%}",
    })  # fmt: skip
    measured = f"{rows[0]['model']}, {rows[0]['context']:,} tokens, {rows[0]['cap'] / 2**30:.0f} GiB of VRAM:"
    return f"{origin['device']}, torch {origin['torch']}\n\n{measured}\n\n{table}"


# The caches of `gains` and `computed_steps`, by their names in computed_steps.json.
CACHES = {"16 bits": "16-bit cache", "fp8": "FP8 cache", "KIVI, 2 bits": "KIVI, 2 bits", "default": "specache"}


def gains() -> str:
    """Sequences that fit on a GPU of 24 GB, and their combined tokens per second; simulated."""
    lengths = {8_192: "8k", 32_768: "32k", 131_072: "128k"}
    rows = [row for row in load("computed_steps.json")["rows"] if row["device"] == "RTX 4090"]

    def cells(cache: str, length: int) -> tuple[str, str]:
        fitting = [row for row in rows if (row["cache"], row["length"]) == (cache, length)]
        most = max(fitting, key=lambda row: row["batch"], default=None)
        return ("0", "–") if most is None else (str(most["batch"]), f"{most['tokens/s']:,.0f}")

    body = [(name, *(cell for length in lengths for cell in cells(cache, length))) for cache, name in CACHES.items()]
    headers = [f"{length} tokens: {unit}" for length in lengths.values() for unit in ("sequences", "tokens/s")]
    return markdown(("", *headers), body, right=len(headers))


def costs() -> str:
    """What caches lose on two models: pass keys found, and the distance to the full cache, by share of its bytes."""
    names = {"uncompiled": "16-bit cache", "fp8": "FP8 cache", "kivi:bits=4": "KIVI, 4 bits", "specache": "specache"}
    keys, smollm2, gemma = ({row.method: row for row in quality(folder)}
                            for folder in ("needles_gemma_16k", "closeness_8k", "closeness_gemma_8k"))  # fmt: skip

    def divergence(rows: Mapping[str, ResultRow]) -> Callable[[str], str]:
        return lambda method: f"{mean(distances(rows[method])):.4f}" if method in rows else "–"

    return selected(names, 1, {
        "": names.__getitem__,
        "keys, Gemma, 16k": lambda method: f"{keys_found(keys[method]):.0f} of {keys[method].samples}",
        f"KL, Gemma, 8k, {gemma['specache'].samples} windows": divergence(gemma),
        f"KL, SmolLM2, 8k, {smollm2['specache'].samples} windows": divergence(smollm2),
        "GPU bytes, Gemma, 16k": lambda method: f"{keys[method].kv_ratio:.2f}",
    })  # fmt: skip


COMPUTED_ON = ("RTX 4090", "H100")
COMPUTED_FOR = 32_768


def computed_steps() -> str:
    """Steps of an 8B model on two of the devices that `explain` lists; computed."""
    rows = [row for row in load("computed_steps.json")["rows"] if row["length"] == COMPUTED_FOR]
    # The first row of each device and cache is of one sequence, the last of as many as fit.
    pairs = [
        (one[0], one[-1]) for device in COMPUTED_ON for cache in CACHES
        if (one := [row for row in rows if (row["device"], row["cache"]) == (device, cache)])
    ]  # fmt: skip
    return selected(pairs, 2, {
        "GPU": lambda pair: pair[0]["device"],
        "cache": lambda pair: CACHES[pair[0]["cache"]],
        "step of one sequence, ms": lambda pair: f"{pair[0]['ms']:.1f}",
        "sequences that fit": lambda pair: f"{pair[1]['batch']}",
        "tokens/s of all": lambda pair: f"{pair[1]['tokens/s']:,.0f}",
    })  # fmt: skip


# The closeness tables, by what their windows are.
WINDOWS = {
    "SmolLM2, 2,048": "closeness", "SmolLM2, 4,096": "closeness_4k", "SmolLM2, 8,192": "closeness_8k",
    "Gemma, 2,048": "closeness_gemma_2k", "Gemma, 8,192": "closeness_gemma_8k", "Gemma, 16,384": "closeness_gemma_16k",
}  # fmt: skip


def distances(row: ResultRow) -> list[float]:
    """The distance to the full cache in each window of forced text, or in each generated text."""
    if row.task == "long":
        return [each["kl"] for each in row.detail["each"]]
    return row.detail["kinds"]["forced"]["each"]


def beyond(row: ResultRow, other: ResultRow) -> str:
    """How much farther a row is from the full cache than another, over the same windows; and its share of the bytes."""
    apart = [own - others for own, others in zip(distances(row), distances(other), strict=True)]
    return f"{mean(apart):+.4f} ± {interval(apart):.4f} ({row.kv_ratio / other.kv_ratio:.2f})"


def paired() -> str:
    """The default's distance to the full cache beyond that of other methods."""
    rows = {name: {row.method: row for row in quality(folder)} for name, folder in WINDOWS.items()}
    return selected(WINDOWS, 1, {
        "model, tokens": str,
        "windows": lambda name: f"{rows[name]['specache'].samples}",
        **{
            f"KL beyond `{other}` (share of its bytes)":
                lambda name, other=other: beyond(rows[name]["specache"], rows[name][other])
            for other in ("kivi:bits=4", "fp8")
        },
    })  # fmt: skip


def at_length(folder: str, row: ResultRow) -> str:
    return f"at {row.context:,} tokens"


def on_model(folder: str, row: ResultRow) -> str:
    return "on Gemma" if "gemma" in folder else "on SmolLM2"


def keys_found(row: ResultRow) -> int:
    return sum(answer["score"] for answer in row.detail["each"])


def share_of_keys(row: ResultRow) -> str:
    """Keys found, and the 95 % interval of their share in percent."""
    low, high = wilson(keys_found(row), row.samples)
    return f"{keys_found(row):.0f} ({100 * low:.0f}–{100 * high:.0f})"


def kl(row: ResultRow) -> str:
    return f"{mean(distances(row)):.4f} ± {interval(distances(row)):.4f}"


def by_columns(
    folders: Sequence[str], what: str, cell: Callable[[ResultRow], str],
    column: Callable[[str, ResultRow], str] = at_length,
) -> str:  # fmt: skip
    """A column for each length or model: what is counted, and of how many; and the device's share of the cache at each.

    A method with a budget for each column is one row. The last line is the time of all methods.
    """
    methods: dict[str, dict[str, ResultRow]] = {}
    seconds: dict[str, float] = {}
    for folder in folders:
        for row in quality(folder):
            name = f"{what.format(row.samples)} {column(folder, row)}"
            methods.setdefault(re.sub(r"budget=\d{4,}", "budget=N", row.method), {})[name] = row
            seconds[name] = seconds.get(name, 0) + row.seconds
    if cell is kl and column is at_length:  # the full cache is at no distance from itself
        del methods["uncompiled"]
    lines = [
        [
            f"`{method}`", *(cell(own[name]) if name in own else "–" for name in seconds),
            "/".join(f"{own[name].kv_ratio:.3f}" for name in seconds if name in own),
        ]
        for method, own in methods.items()
    ]  # fmt: skip
    lines.append(["minutes", *(f"{each / 60:.0f}" for each in seconds.values()), ""])
    return markdown(("method", *seconds, "device KV"), lines, right=len(seconds) + 1)


def devices() -> str:
    """The devices of `specache explain`, from their data sheets."""
    headers = ("device", "memory, GB/s", "PCIe one way, GB/s", "dense 16-bit TFLOP/s", "VRAM, GiB")
    rows = [
        (d.name, f"{d.hbm_gbps:g}", f"{d.pcie_gbps:g}", f"{d.tflops:g}", f"{d.vram_gib:g}") for d in DEVICES.values()
    ]
    return markdown(headers, rows, right=4)


def passes() -> str:
    """The pipeline in its order."""
    return markdown(("pass", "effect"), [(f"`{p.__name__}`", summary_of(sys.modules[p.__module__])) for p in PIPELINE])


KL, FOUND = "KL, {} windows", "keys of {}"
GENERATORS: dict[str, Callable[[], str]] = {
    **{
        made.__name__: made
        for made in (
            models, family_counts, every_family, versions, options_often, options, options_setting,
            options_baselines, methods, api, demo, gpu, gains, costs, computed_steps, devices, passes, bench,
            cold_start, latents, paired, batching,
        )
    },
    "needles_smollm2": partial(by_columns, ["needles_smollm2"], FOUND, share_of_keys),
    "needles_blind": partial(
        by_columns, ["needles_blind", *(f"needles_gemma_blind{n}" for n in ("", "_16k", "_31k"))], FOUND, share_of_keys
    ),
    "needles_gemma": partial(by_columns, [f"needles_gemma_{n}" for n in ("8k", "16k", "31k")], FOUND, share_of_keys),
    "closeness": partial(by_columns, ["closeness", "closeness_4k", "closeness_8k"], KL, kl),
    "fetched_gemma": partial(by_columns, ["fetched_gemma", "knobs_gemma"], KL, kl),
    "closeness_gemma": partial(by_columns, [f"closeness_gemma_{n}" for n in ("2k", "8k", "16k")], KL, kl),
    "long": partial(by_columns, ["long", "long_gemma"], "KL, {} texts", kl, on_model),
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


def main(arguments: Sequence[str] | None = None, pages: Sequence[Path] = PAGES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    args = parser.parse_args(arguments)
    status = 0
    for page in pages:
        text = page.read_text()
        try:
            current = renewed(text)
        except ValueError as error:
            print(f"{page.name}: {error}", file=sys.stderr)
            return 2
        if args.write:
            page.write_text(current)
        elif current != text:
            both = zip(TABLE.finditer(text), TABLE.finditer(current), strict=True)
            names = ", ".join(old["name"] for old, new in both if old["text"] != new["text"])
            print(f"{page.name}: out of date: {names}: python tools/doc_tables.py --write", file=sys.stderr)
            status = 1
    if args.write and tuple(pages) == PAGES:
        draw(load("demo.json")["rows"], ROOT / "docs" / "demo.png", METHODS)
    return status


if __name__ == "__main__":
    sys.exit(main())
