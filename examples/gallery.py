"""Memory and decode speed of well-known models, computed without weights and without a GPU.

    python examples/gallery.py                      a table of Llama-3-8B, Mistral-7B and Qwen3 at 32k and 128k tokens
    python examples/gallery.py --save folder        also report.html, timeline.json and the text for each model
`--plot gallery.png` adds a plot of ratio, traffic and speed-up.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

import specache_compile as sc
from specache_compile.explaining.tables import duration, size
from specache_compile.explaining.times.devices import find_device

LONG = {"max_position_embeddings": 131_072, "dtype": torch.bfloat16}
EIGHT_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "Llama-3-8B": (
        LlamaConfig,
        {**EIGHT_HEADS, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128_256},
    ),
    "Mistral-7B-v0.3": (
        MistralConfig,
        {**EIGHT_HEADS, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32_768,
         "sliding_window": None},
    ),
    "Qwen3-8B": (
        Qwen3Config,
        {**EIGHT_HEADS, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151_936,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip
LENGTHS = (32_768, 131_072)
PLOT_LENGTHS = tuple(2**n for n in range(10, 18))
PLOT_TOP_K = (16, 32, 64, 128, 256)
PLOT_BATCH = 16


def config_of(name: str) -> PretrainedConfig:
    kind, shape = MODELS[name]
    return kind(**LONG, **shape)


def row(name: str, explained: sc.Explanation) -> tuple[str, ...]:
    step, full = explained.step().seconds, explained.full_step().seconds
    return (
        name, f"{explained.prompt_length:,}", f"{explained.kv_ratio:.3f}", size(explained.step_cost().hbm),
        size(explained.bytes_fetched), duration(step), f"{full / step:.2f}x",
        f"{explained.largest_batch()[0]:,}", f"{explained.full_cache_batch():,}",
    )  # fmt: skip


def speed_of(explained: sc.Explanation) -> float:
    """The time of a step on a 16-bit cache over the time of our step."""
    return explained.full_step().seconds / explained.step().seconds


def gallery(device: str, batch: int, bits: int, folder: Path | None, names: list[str]) -> str:
    """The table; with a folder, each explanation in full."""
    rows = []
    for name in names:
        for length in LENGTHS:
            explained = sc.explain(config_of(name), length, batch, {"setting": "paper", "bits": bits}, device=device)
            explained = replace(explained, name=f"{name}, {length // 1024}k")
            rows.append(row(name, explained))
            if folder is not None:
                target = folder / f"{name}-{length // 1024}k"
                target.mkdir(parents=True, exist_ok=True)
                (target / "explain.txt").write_text(f"{explained}\n")
                explained.save(target / "report.html")
                explained.save(target / "timeline.json")
    headers = ("model", "context", "KV ratio", "memory/step", "fetched/step", "step", "speed", "batch", "batch, full")
    title = f"{bits} bits, batch {batch}, {device}: computed, not measured"
    return f"{title}\n" + tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 8))


def plot(path: Path, name: str, device: str) -> None:
    """Ratio, traffic and predicted speed-up against context, and traffic and speed-up against k."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base = sc.explain(config_of(name), LENGTHS[0], PLOT_BATCH, {"setting": "paper"}, device=device)
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    figure.suptitle(f"{name}, batch {PLOT_BATCH}, {find_device(device).name}: computed, not measured")
    for bits in (2, 1):
        for group in (64, 32):
            options = replace(base.options, bits=bits, group_size=group)
            plans = [replace(base, options=options, prompt_length=n) for n in PLOT_LENGTHS]
            label = f"{bits} bits, g {group}"
            axes[0][0].plot(PLOT_LENGTHS, [p.kv_ratio for p in plans], marker=".", label=label)
            axes[0][1].plot(PLOT_LENGTHS, [p.step_cost().hbm / 1e9 for p in plans], marker=".", label=label)
            axes[0][2].plot(PLOT_LENGTHS, [speed_of(p) for p in plans], marker=".", label=label)
    for length in (4096, *LENGTHS):
        plans = [replace(base, options=replace(base.options, top_k=k), prompt_length=length) for k in PLOT_TOP_K]
        label = f"{length // 1024}k tokens"
        axes[1][0].plot(PLOT_TOP_K, [p.kv_ratio for p in plans], marker=".", label=label)
        axes[1][1].plot(PLOT_TOP_K, [p.bytes_fetched / 1e6 for p in plans], marker=".", label=label)
        axes[1][2].plot(PLOT_TOP_K, [speed_of(p) for p in plans], marker=".", label=label)
    titles = ("device KV / full cache", "memory traffic, GB a step", "speed against a full cache")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set(title=title, xlabel="tokens of context", xscale="log")
        axis.set_xscale("log", base=2)
    titles = ("device KV / full cache", "fetched over PCIe, MB a step", "speed against a full cache")
    for axis, title in zip(axes[1], titles, strict=True):
        axis.set(title=title, xlabel="k, pairs a head (2 bits, g 64)")
        axis.set_xscale("log", base=2)
    for axis in (axes[0][2], axes[1][2]):
        axis.axhline(1, color="gray", linewidth=0.8)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="one or several (default: all)")
    parser.add_argument("--device", default="A100", help="a name that explain knows (default: A100)")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--save", type=Path, help="a folder for each model's report, timeline and text")
    parser.add_argument("--plot", type=Path, help="draw curves for the first model into this file instead")
    args = parser.parse_args(arguments)
    names = args.model or list(MODELS)
    if args.plot:
        plot(args.plot, names[0], args.device)
    else:
        print(gallery(args.device, args.batch_size, args.bits, args.save, names))


if __name__ == "__main__":
    main()
