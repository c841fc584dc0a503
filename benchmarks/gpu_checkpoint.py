"""Compare SmolLM2-135M-Instruct in bfloat16 on a GPU with its results on a CPU.

    python benchmarks/gpu_checkpoint.py    (--smoke: a small model on any machine)

Lossless settings must generate the tokens of the float32 model, except where bfloat16 rounding decides a tie. The keys
found must agree with the rows of `quality.py needles_smollm2` within their intervals. Exit status 1: they do not.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import parsed, parser_of
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from quality import LICENCES, RESULTS, SMOLLM2, arguments
from specache_compile.bench.results import Results
from specache_compile.cli import main as specache
from specache_compile.evaluation.intervals import interval
from specache_compile.evaluation.run_eval import load
from specache_compile.evaluation.settings import UNCOMPILED, parse_setting, running
from specache_compile.evaluation.tasks.task import Bench
from verify_drafts import equal_tokens, generate

ROOT = Path(__file__).parent.parent
SMALL = str(ROOT / "examples" / "needle-llama")
# Nothing is left in the low-bit tier alone, or it is exact, or what it says is verified.
LOSSLESS = (UNCOMPILED, "specache:setting=paper,bits=1,top_k=1024", "specache:bits=16,top_k=0", "specache:verify=16")
# Tokens of a window, new ones, windows; k is as many as the first two.
SIZES, TEXT = (960, 64, 4), LICENCES[:1]
KEYS = "needles_smollm2"


def logits_behind(model: Any, ids: Tensor) -> Tensor:
    """Of the next token, [vocabulary] float32 on the CPU."""
    with torch.inference_mode():
        return model(ids.to(model.device)).logits[0, -1].float().cpu()


def compared(exact: Any, model: Any, ids: Tensor, expected: list[int], got: list[int]) -> dict[str, Any]:
    """The number of equal tokens, and figures for the first different one.

    gap: the difference of the two tokens' logits in float32.
    rounding: the largest difference between a float32 logit and a logit in the model's dtype.
    """
    equal = equal_tokens(got, expected)
    if equal == len(expected):
        return {"equal": equal, "holds": True}
    until = torch.cat([ids, torch.tensor([expected[:equal]], dtype=ids.dtype)], 1)
    right, rounded = logits_behind(exact, until), logits_behind(model, until)
    gap, rounding = float(right[expected[equal]] - right[got[equal]]), float((rounded - right).abs().max())
    return {"equal": equal, "gap": gap, "rounding": rounding, "holds": gap <= 2 * rounding}


def lossless(
    name: str, device: torch.device, lowering: str, texts: Sequence[str], sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for each setting and window of the texts. sizes: tokens of a window, new ones, windows."""
    context, tokens, windows = sizes
    exact, reader = load(name, "cpu", torch.float32)
    model, _ = load(name, str(device), torch.bfloat16)
    limit = model.config.max_position_embeddings
    bench = Bench(reader, (context,), windows, 0, limit, tuple(map(Path, texts)))
    prompts = [torch.tensor([window]) for window in bench.windows_apart(context)]
    with tqdm(total=windows * (1 + len(LOSSLESS)), unit="window", file=sys.stderr) as bar:
        expected = []
        for ids in prompts:
            expected.append(generate(exact, ids, tokens)[0])
            bar.update()
        for setting in LOSSLESS:
            with running(model, parse_setting(setting), lowering):
                found = []
                for ids in prompts:
                    found.append(generate(model, ids.to(model.device), tokens)[0])
                    bar.update()
            for number, (ids, right, got) in enumerate(zip(prompts, expected, found, strict=True)):
                yield {"setting": setting, "window": number, **compared(exact, model, ids, right, got)}


def keys_found(device: torch.device, out: Path) -> Iterator[dict[str, Any]]:
    """A row for each method and length of the committed table; the same prompts on this device."""
    given = arguments(KEYS)
    given[given.index("--out") + 1] = str(out)
    if specache([*given, "--device", device.type]):
        raise SystemExit("specache eval has failed")
    rows, committed = (
        json.loads((folder / "results.json").read_text())["rows"] for folder in (out, ROOT / RESULTS / KEYS)
    )
    known = {(row["method"], row["cell"]): row for row in committed}
    for row in rows:
        yield beside(row, known[row["method"], row["cell"]], len(rows))


def beside(row: dict[str, Any], known: dict[str, Any], rows: int) -> dict[str, Any]:
    """Two rows of the same prompts: the mean difference of their scores, and half of its 95 % interval. It holds
    within that of all `rows` together, of which else one in twenty would not."""
    ours, theirs = ([one["score"] for one in x["detail"]["each"]] for x in (row, known))
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, half = statistics.mean(differences), interval(differences)
    one, all_rows = (statistics.NormalDist().inv_cdf(1 - 0.025 / count) for count in (1, rows))
    return {
        "method": row["method"], "context": row["context"], "score": row["score"], "committed": known["score"],
        "difference": mean, "interval": half, "holds": abs(mean) <= half * all_rows / one,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    return tabulate([{**row, "holds": "yes" if row["holds"] else "NO"} for row in rows], headers="keys", floatfmt=".3f")


def main(given: list[str] | None = None) -> int:
    args, device = parsed(parser_of(__doc__), "gpu_checkpoint", given)
    results = Results(args.out, "benchmarks/gpu_checkpoint.py", device, args.resume, smoke=args.smoke)
    if not results.has(part="tokens"):
        asked = (SMALL, device, "eager", (), (200, 8, 1)) if args.smoke else (SMOLLM2, device, "inductor", TEXT, SIZES)
        results.add(*({"part": "tokens", **row} for row in lossless(*asked)))
    if not args.smoke and not results.has(part="keys"):
        results.add(*({"part": "keys", **row} for row in keys_found(device, args.out.with_suffix(""))))
    for part in ("tokens", "keys"):
        print(table([row for row in results.rows if row["part"] == part]))
    return 0 if all(row["holds"] for row in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
