"""Ask a real model about a text through one KV cache after another: answers, a table and a picture.

SmolLM2-135M-Instruct reads the Apache licence, in which one line is hidden, and is asked for what that line says; each
time it is the same unmodified model, compiled with other options. First one question, whose answers stand side by side;
then pass keys at several depths of texts of several lengths: an answer counts when all five digits are in it. The
claim to see: plain 1-bit quantisation loses the keys, and fetching the few pairs that matter brings them back.

    python examples/demo.py               the whole table, some seven minutes on two cores
    python examples/demo.py --quick       two methods, one length, few depths
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
from specache_compile.evaluation.command import load
from specache_compile.evaluation.reader import Reader
from specache_compile.evaluation.tasks.haystack import hide
from specache_compile.evaluation.tasks.needle import CHAT_ANSWER, chat_ask

ROOT = Path(__file__).parents[1]
METHODS: dict[str, dict[str, Any] | None] = {
    "full cache": None,
    "KIVI, 1 bit": {"method": "kivi", "bits": 1},
    "SpeCache as in its paper, 1 bit": {"setting": "paper", "bits": 1},
    "specache, 1 bit": {"bits": 1},
    "specache, 1.5 bits (the default)": {},
}
QUICK = ("full cache", "specache, 1 bit")
LINE = "\nNote to the board: the password of the archive is 'lighthouse', and Amelia Hart keeps the second key.\n"
QUESTION = "\nAccording to the note to the board, what is the password of the archive?"
DEPTHS = (0.1, 0.4, 0.6, 0.9)
LENGTHS = (512, 1024, 2048)


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


@dataclass
class Asker:
    """The model, its reader, and the text that everything is hidden in."""

    model: Any
    reader: Reader
    text: Sequence[int]
    lowering: str

    def compiled(self, options: dict[str, Any] | None) -> Any:
        """The model as it is (no options), or a copy of it compiled in place."""
        if options is None:
            return self.model
        torch._dynamo.reset()
        twin = copy.deepcopy(self.model)
        twin.compile(backend="specache", options={**options, "lowering": self.lowering})
        return twin

    def question(self, length: int) -> list[int]:
        """A prompt of `length` tokens: the note in the middle of the text, and the question."""
        before, behind = self.reader.around()
        line, asked = self.reader.encode(LINE), self.reader.encode(QUESTION)
        room = length - len(before) - len(behind)
        return [*before, *hide(self.text, room, [(0.4, line)], asked, random.Random(1)), *behind]

    def keys(self, length: int, depths: Sequence[float]) -> list[Any]:
        """A pass key at each depth, the same for every method."""
        rng = random.Random(length)
        return [chat_ask(self.reader, self.text, length - CHAT_ANSWER, depth, rng) for depth in depths]

    def answers(self, model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
        """Greedy answers; the prompts are of one length, and one batch."""
        ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return [self.reader.decode(row[ids.shape[1] :].tolist()) for row in out]

    def speed(self, model: Any, length: int, tokens: int) -> float:
        """Tokens a second of decoding one sequence, prefill left out, after a warm-up."""
        ids = torch.tensor([self.question(length)], device=model.device)

        def seconds(count: int) -> float:
            start = time.perf_counter()
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            return time.perf_counter() - start

        seconds(3)
        return tokens / (seconds(tokens + 2) - seconds(2))


def measure(name: str, asker: Asker, quick: bool, bar: tqdm) -> Row:
    options = METHODS[name]
    lengths, depths = (LENGTHS[:1], DEPTHS[::2]) if quick else (LENGTHS, DEPTHS)
    bar.set_postfix_str(f"{name}, question")
    model = asker.compiled(options)
    (answer,) = asker.answers(model, [asker.question(lengths[-1] - CHAT_ANSWER)], CHAT_ANSWER)
    bar.update()
    accuracy: dict[int, list[float]] = {}
    for length in lengths:
        bar.set_postfix_str(f"{name}, {length:,} tokens")
        asked = asker.keys(length, depths)
        answers = asker.answers(model, [one.prompt for one in asked], CHAT_ANSWER)
        accuracy[length] = [float(one.references[0] in said) for one, said in zip(asked, answers, strict=True)]
        bar.update()
    stats = sc.stats(model) if options is not None else None
    bar.set_postfix_str(f"{name}, speed")
    rate = asker.speed(model, lengths[-1] - 64, 4 if quick else 12)
    bar.update()
    if stats is None:
        return Row(name, answer, accuracy, 1.0, None, None, rate)
    config = asker.model.config
    heads = stats.decodes * len(depths) * config.num_hidden_layers * config.num_key_value_heads
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
    return tabulate(lines, headers, colalign=("left", *["right"] * (len(headers) - 1)), disable_numparse=True)


def draw(rows: Sequence[Row], path: Path) -> None:
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
        depths = DEPTHS if grid.shape[0] == len(DEPTHS) else DEPTHS[::2]
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
    parser.add_argument("--quick", action="store_true", help="two methods, one length, three depths")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager", help="eager needs no compiler")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*")
    try:
        model, reader = load(args.model, args.device, torch.bfloat16)
        asker = Asker(model, reader, reader.encode(args.text.read_text()), args.lowering)
    except (sc.SpecacheError, OSError) as error:
        sys.exit(f"demo.py: {error}")
    rows: list[Row] = []
    methods = QUICK if args.quick else tuple(METHODS)
    try:
        with tqdm(total=len(methods) * (3 if args.quick else len(LENGTHS) + 2), file=sys.stderr, desc="demo") as bar:
            for name in methods:
                rows.append(measure(name, asker, args.quick, bar))
    except KeyboardInterrupt:
        print("interrupted: the rows below are finished", file=sys.stderr)
    if not rows:
        return
    print(side_by_side(rows), table(rows), sep="\n\n")
    args.out.mkdir(parents=True, exist_ok=True)
    draw(rows, args.out / "needles.png")
    report = {"provenance": provenance(args), "rows": [{**asdict(row), "overall": row.overall} for row in rows]}
    (args.out / "needles.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"\npicture: {args.out / 'needles.png'}   data: {args.out / 'needles.json'}")


if __name__ == "__main__":
    main()
