"""Ask a real model about a text through one KV cache after another: answers, a table and a picture.

SmolLM2-135M-Instruct reads the Apache licence, in which one line is hidden, and is asked for what that line says; each
time it is the same unmodified model, compiled with other options. First one question, whose answers stand side by side;
then pass keys at several depths of texts of several lengths: an answer counts when all five digits are in it. The
claim to see: plain 1-bit quantisation loses the keys, and fetching the few pairs that matter brings them back.

    python examples/demo.py               the whole table: four minutes on two cores that multiply bfloat16, else ten
    python examples/demo.py --quick       two methods, one length, two depths
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from tqdm import tqdm

import specache_compile as sc
from specache_compile.checkpoints import KNOWN
from specache_compile.evaluation.cell_tables import aligned
from specache_compile.evaluation.command import load
from specache_compile.evaluation.metrics import found_all
from specache_compile.evaluation.prefills import Prefills
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.runner import Runner
from specache_compile.evaluation.settings import UNCOMPILED, parse_setting, running
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER, chat_ask, chat_prompt
from specache_compile.evaluation.tasks.task import scored
from specache_compile.options import LOWERINGS

ROOT = Path(__file__).parents[1]
VERIFIED = "the same, verified: exact"
# As `specache eval` spells them.
METHODS = {
    "full cache": "uncompiled",
    "KIVI, 1 bit": "kivi:bits=1",
    "SpeCache as in its paper, 1 bit": "specache:setting=paper,bits=1",
    "specache, 1 bit": "specache:bits=1",
    "specache, 1.5 bits (the default)": "specache",
    VERIFIED: "specache:verify=16",
}
LINE = "\nNote to the board: the password of the archive is 'lighthouse', and Amelia Hart keeps the second key.\n"
QUESTION = "\nAccording to the note to the board, what is the password of the archive?"


@dataclass(frozen=True)
class Size:
    """How much is asked: methods, contexts in tokens, depths of the key, tokens that are timed."""

    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    timed: int


WHOLE = Size(tuple(METHODS), (512, 2048), (0.1, 0.4, 0.6, 0.9), 24)
QUICK = Size(("full cache", "specache, 1 bit"), (512,), (0.1, 0.6), 4)


@dataclass
class Row:
    """One method: its answer, the share of keys found by length and depth, device KV / full cache, pairs fetched a
    token and head (ahead, and corrected), decoding speed."""

    method: str
    answer: str
    accuracy: dict[int, list[float]]
    kv_ratio: float
    ahead: float | None
    corrected: float | None
    tokens_per_second: float

    @property
    def overall(self) -> float:
        every = [share for shares in self.accuracy.values() for share in shares]
        return sum(every) / len(every)


def question(reader: Reader, text: Sequence[int], length: int) -> list[int]:
    """A prompt of `length` tokens: the note in the middle of the text, and the question."""
    return chat_prompt(reader, text, length, [(0.4, LINE)], QUESTION, random.Random(1))


def keys_found(runner: Runner, text: Sequence[int], length: int, depths: Sequence[float]) -> list[float]:
    """Whether the pass key was found at each depth; the keys are the same for every method."""
    rng = random.Random(length)
    asks = [chat_ask(runner.reader, text, length - CHAT_ANSWER, depth, rng) for depth in depths]
    outcome = scored(runner, asks, CHAT_ANSWER, found_all, "keys found", blind=False)
    return [one["score"] for one in outcome.detail["each"]]


def speed(runner: Runner, prompt: Sequence[int], tokens: int) -> float:
    """Tokens a second of decoding one sequence, prefill left out, after a warm-up."""
    ids = runner.ids([prompt])

    def seconds(count: int) -> float:
        cache, _ = runner.read(ids[:, :-1])
        start = time.perf_counter()
        runner.generate(ids, count, min_new_tokens=count, past_key_values=cache)
        return time.perf_counter() - start

    seconds(3)
    return tokens / (seconds(tokens + 2) - seconds(2))


def measure(name: str, runner: Runner, text: Sequence[int], size: Size, bar: tqdm) -> Row:
    longest = size.lengths[-1]
    bar.set_postfix_str(f"{name}, question")
    (answer,) = runner.answers([question(runner.reader, text, longest - CHAT_ANSWER)], CHAT_ANSWER)
    bar.update()
    accuracy: dict[int, list[float]] = {}
    for length in size.lengths:
        bar.set_postfix_str(f"{name}, {length:,} tokens")
        accuracy[length] = keys_found(runner, text, length, size.depths)
        bar.update()
    stats = None if METHODS[name] == UNCOMPILED else sc.stats(runner.model)
    bar.set_postfix_str(f"{name}, speed")
    rate = speed(runner, question(runner.reader, text, longest - 64), size.timed)
    bar.update()
    if stats is None:
        return Row(name, answer, accuracy, 1.0, None, None, rate)
    config = runner.model.config
    rows = min(len(size.depths), runner.batch_size)  # of the last run
    heads = stats.decodes * rows * config.num_hidden_layers * config.num_key_value_heads
    ahead, corrected = stats.pairs_ahead / heads, stats.pairs_corrected / heads
    return Row(name, answer, accuracy, stats.kv_ratio, ahead, corrected, rate)


def side_by_side(rows: Sequence[Row]) -> str:
    """Each method's answer to the one question."""
    lines = [(row.method, row.answer.strip().splitlines()[0] if row.answer.strip() else "") for row in rows]
    return f"{QUESTION.strip()}\n" + tabulate(lines, tablefmt="plain")


def table(rows: Sequence[Row]) -> str:
    """One line a method; keys found in per cent, overall and at each length."""
    lengths = list(rows[0].accuracy)
    lines = [
        (
            row.method, f"{row.overall:.0%}",
            *(f"{sum(row.accuracy[n]) / len(row.accuracy[n]):.0%}" for n in lengths),
            f"{row.kv_ratio:.3f}",
            "" if row.ahead is None else f"{row.ahead:.1f}",
            "" if row.corrected is None else f"{row.corrected:.1f}",
            f"{row.tokens_per_second:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    headers = (
        "", "keys found", *(f"{n:,}" for n in lengths), "device KV", "pairs ahead", "corrected", "tokens/s",
    )  # fmt: skip
    return aligned(lines, headers)


def draw(rows: Sequence[Row], depths: Sequence[float], path: Path) -> None:
    """Depth × length, one panel a method: which of the keys hidden there were found."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    fig, axes = plt.subplots(
        lines, columns, figsize=(4 * columns, 3.2 * lines), sharex=True, sharey=True, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    image = None
    for axis, row in zip(axes.flat, rows, strict=False):
        grid = torch.tensor(list(row.accuracy.values())).T
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", interpolation="nearest")
        axis.set_title(f"{row.method}\n{row.overall:.0%} found, device KV {row.kv_ratio:.2f}", fontsize=10)
        axis.set_xticks(range(len(row.accuracy)), [f"{n:,}" for n in row.accuracy])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.tick_params(labelbottom=True, labelsize=8)
    fig.supxlabel("context, tokens")
    fig.supylabel("depth of the key")
    fig.colorbar(image, ax=axes, label="keys found", shrink=0.8)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": f"python examples/demo.py --model {args.model} --lowering {args.lowering}"
        + (" --quick" if args.quick else ""),
        "model": KNOWN[args.model].origin if args.model in KNOWN else args.model,
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "device": args.device, "dtype": "bfloat16",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a chat model: a name, folder or .gguf (%(default)s)")
    parser.add_argument("--text", type=Path, default=ROOT / "LICENSE", help="what is read (the Apache licence)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder of the picture and the JSON")
    parser.add_argument("--quick", action="store_true", help="two methods, one length, two depths")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--lowering", choices=LOWERINGS, default="eager", help="eager needs no compiler")
    args = parser.parse_args()
    try:
        model, reader = load(args.model, args.device, torch.bfloat16)
        text = reader.encode(args.text.read_text())
    except (sc.SpecacheError, OSError) as error:
        sys.exit(f"demo.py: {error}")
    rows: list[Row] = []
    size, prefills = QUICK if args.quick else WHOLE, Prefills(args.device)  # each prompt is read once, for all methods
    try:
        with tqdm(total=len(size.methods) * (len(size.lengths) + 2), file=sys.stderr, desc="demo") as bar:
            for name in size.methods:
                # Drafts are of one sequence.
                runner = Runner(model, reader, 1 if name == VERIFIED else len(size.depths), prefills)
                with running(model, parse_setting(METHODS[name]), args.lowering):
                    rows.append(measure(name, runner, text, size, bar))
    except KeyboardInterrupt:
        print("interrupted: the rows below are finished", file=sys.stderr)
    if not rows:
        return
    print(side_by_side(rows), table(rows), sep="\n\n")
    args.out.mkdir(parents=True, exist_ok=True)
    draw(rows, size.depths, args.out / "needles.png")
    report = {"provenance": provenance(args), "rows": [{**asdict(row), "overall": row.overall} for row in rows]}
    (args.out / "needles.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"\npicture: {args.out / 'needles.png'}   data: {args.out / 'needles.json'}")


if __name__ == "__main__":
    main()
