"""Ask the shipped model for pass keys through one KV cache after another: a table and a picture.

Each row of the table is the same unmodified model, compiled with other options. Every prompt hides one pass key at
some depth of a text of some length (source code that training never saw); an answer counts when all five digits are
right. The claim to see: 1-bit quantisation alone loses keys, and fetching the few pairs that matter brings them back.

    python examples/demo.py               the whole table, under three minutes on two cores
    python examples/demo.py --quick       three methods, two lengths, few depths
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import specache_compile as sc
from needle import sample
from specache_compile.evaluation.tasks.haystack import library_source
from specache_compile.evaluation.tasks.needle import KEY_DIGITS

HERE = Path(__file__).parent
METHODS: dict[str, dict[str, Any] | None] = {
    "full cache": None,
    "2-bit, no fetching (KIVI)": {"bits": 2, "top_k": 0},
    "1-bit, no fetching (KIVI)": {"bits": 1, "top_k": 0},
    "1-bit SpeCache, k = 4": {"bits": 1, "top_k": 4},
    "1-bit SpeCache, k = 16": {"bits": 1, "top_k": 16},
    "1-bit SpeCache, k = 64": {"bits": 1, "top_k": 64},
    "2-bit SpeCache, k = 64": {"bits": 2, "top_k": 64},
}
QUICK = ("full cache", "1-bit, no fetching (KIVI)", "1-bit SpeCache, k = 64")
DEPTHS = tuple(i / 10 for i in range(11))
LENGTHS = (256, 512, 1024, 2048)


@dataclass
class Row:
    """One method: accuracy by length and depth (shares of keys), device KV ratio, hit rate, decoding speed."""

    method: str
    accuracy: dict[int, list[float]]
    kv_ratio: float
    hit_mass: float | None
    hit_top_k: float | None
    tokens_per_second: float

    @property
    def overall(self) -> float:
        every = [share for shares in self.accuracy.values() for share in shares]
        return sum(every) / len(every)


def compiled(model: Any, options: dict[str, Any] | None, lowering: str, **more: Any) -> Any:
    """The model as it is (no options), or a copy of it compiled in place."""
    if options is None:
        return model
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    twin.compile(backend="specache", options={**options, "lowering": lowering, **more})
    return twin


def prompts(source: bytes, length: int, depths: tuple[float, ...], repeats: int) -> list[Any]:
    """`repeats` prompts at each depth, the same for every method."""
    rng = random.Random(length)
    return [sample(source, length - KEY_DIGITS, depth, rng) for depth in depths for _ in range(repeats)]


def recalled(model: Any, asked: list[Any]) -> list[bool]:
    """Which of the prompts (all of one length, one batch) are answered with the whole key."""
    ids = torch.tensor([list(one.prompt) for one in asked], device=model.device)
    out = model.generate(ids, max_new_tokens=KEY_DIGITS, do_sample=False)
    return [bytes(row[-KEY_DIGITS:].tolist()) == one.answer for row, one in zip(out, asked, strict=True)]


def speed(model: Any, source: bytes, length: int, tokens: int) -> float:
    """Tokens a second of decoding one sequence, prefill left out, after a warm-up."""
    ids = torch.tensor([list(sample(source, length, 0.5, random.Random(7)).prompt)], device=model.device)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - start

    seconds(4)
    return tokens / (min(seconds(tokens + 2) for _ in range(2)) - min(seconds(2) for _ in range(2)))


def measure(name: str, model: Any, source: bytes, args: argparse.Namespace, bar: tqdm) -> Row:
    options = METHODS[name]
    depths, lengths = (DEPTHS[::5], LENGTHS[1::2]) if args.quick else (DEPTHS, LENGTHS)
    runner = compiled(model, options, args.lowering)
    accuracy: dict[int, list[float]] = {}
    for length in lengths:
        bar.set_postfix_str(f"{name}, {length} tokens")
        asked = prompts(source, length, depths, args.repeats)
        right = recalled(runner, asked)
        accuracy[length] = [sum(right[i : i + args.repeats]) / args.repeats for i in range(0, len(right), args.repeats)]
        bar.update()
    bar.set_postfix_str(f"{name}, speed")
    rate = speed(runner, source, lengths[-1] - 128, 8 if args.quick else 32)
    bar.update()
    if options is None:
        return Row(name, accuracy, 1.0, None, None, rate)
    kv_ratio, hit_rate = sc.stats(runner).kv_ratio, None
    if options["top_k"]:
        bar.set_postfix_str(f"{name}, hit rate")
        watched = compiled(model, options, args.lowering, hit_rate=True)
        recalled(watched, prompts(source, lengths[-1], depths[::2], 1))
        hit_rate = sc.stats(watched).hit_rate
    bar.update()
    return Row(name, accuracy, kv_ratio, hit_rate and hit_rate.mass, hit_rate and hit_rate.top_k, rate)


def table(rows: list[Row]) -> str:
    """One line a method; accuracies in per cent, overall and at each length."""
    lengths = list(rows[0].accuracy)
    lines = [
        (
            row.method, f"{row.overall:.1%}",
            *(f"{sum(row.accuracy[n]) / len(row.accuracy[n]):.0%}" for n in lengths),
            f"{row.kv_ratio:.3f}",
            "" if row.hit_mass is None else f"{row.hit_mass:.0%}",
            "" if row.hit_top_k is None else f"{row.hit_top_k:.0%}",
            f"{row.tokens_per_second:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    headers = ("", "keys found", *(f"{n:,}" for n in lengths), "device KV", "hit: mass", "hit: top-k", "tokens/s")
    return tabulate(lines, headers, colalign=("left", *["right"] * (len(headers) - 1)), disable_numparse=True)


def draw(rows: list[Row], path: Path) -> None:
    """Depth × length, one panel a method: how many of the keys hidden there were found."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 4
    fig, axes = plt.subplots(
        -(-len(rows) // columns),
        columns,
        figsize=(12, 6.4),
        sharex=True,
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    image = None
    for axis, row in zip(axes.flat, rows, strict=False):
        grid = torch.tensor(list(row.accuracy.values())).T
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", interpolation="nearest")
        axis.set_title(f"{row.method}\n{row.overall:.0%} found, device KV {row.kv_ratio:.2f}", fontsize=10)
        axis.set_xticks(range(len(row.accuracy)), [f"{n:,}" for n in row.accuracy])
        depths = grid.shape[0]
        axis.set_yticks(range(0, depths, max(1, (depths - 1) // 5)))
        axis.set_yticklabels([f"{i / (depths - 1):.0%}" for i in range(0, depths, max(1, (depths - 1) // 5))])
        axis.tick_params(labelbottom=True, labelsize=8)
    fig.supxlabel("context, tokens")
    fig.supylabel("depth of the needle")
    fig.colorbar(image, ax=axes, label="keys found", shrink=0.8)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": f"python examples/demo.py --lowering {args.lowering} --repeats {args.repeats}"
        + (" --quick" if args.quick else ""),
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "device": args.device, "dtype": "bfloat16",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=HERE / "needle-llama", help="checkpoint (default: the shipped one)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder of the picture and the JSON")
    parser.add_argument("--repeats", type=int, default=3, help="prompts at each depth and length (default: 3)")
    parser.add_argument("--quick", action="store_true", help="three methods, two lengths, three depths")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager", help="eager needs no compiler")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*")
    transformers.utils.logging.disable_progress_bar()
    source = library_source(held_out=True)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
    rows: list[Row] = []
    methods = QUICK if args.quick else tuple(METHODS)
    steps = len(methods) * ((2 if args.quick else len(LENGTHS)) + 2) - 1
    try:
        with tqdm(total=steps, file=sys.stderr, desc="needles") as bar:
            for name in methods:
                rows.append(measure(name, model, source, args, bar))
    except KeyboardInterrupt:
        print("interrupted: the rows below are finished", file=sys.stderr)
    if not rows:
        return
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    draw(rows, args.out / "needles.png")
    report = {"provenance": provenance(args), "rows": [{**asdict(row), "overall": row.overall} for row in rows]}
    (args.out / "needles.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"\npicture: {args.out / 'needles.png'}   data: {args.out / 'needles.json'}")


if __name__ == "__main__":
    main()
