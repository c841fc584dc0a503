"""Run a tiny random model of every causal LM of transformers: what is rewritten, and are the tokens equal?

    python benchmarks/every_family.py    (half an hour, resumable; --only llama gemma2: some of them)

Each family runs in a new process: uncompiled, lossless and lossy, with 70 prompt tokens and 12 greedy ones. `--out` has
a JSON line for each family. Exit status 1, with the row: a token differs, a family fails, or a warning is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from packaging.version import Version
from tiny_families import families, tiny
from torch import Tensor
from tqdm import tqdm

import specache_compile as sc
from specache_compile.compile import backend
from specache_compile.compile.captured import Captured, capture
from specache_compile.passes.reading.find_attention import WINDOW
from specache_compile.runtime.records import find_record

PROMPT, NEW = 70, 12
LOSSLESS = {"lowering": "eager", "setting": "paper", "bits": 1, "group_size": 32, "residual_length": 32, "top_k": 1024}
LOSSY = {**LOSSLESS, "bits": 2, "top_k": 8}
AFTER = 10.0  # seconds that a process has to end in, once it has answered
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
Family = tuple[str, str]  # the model type and the class


class WatchedCalls:
    """The graphs that a generation captures, by the forward call that they are captured in."""

    def __init__(self) -> None:
        self.graphs: list[Captured] = []
        self.seen: list[int] = []  # graphs, after each forward call

    def capture(self, *arguments: Any) -> Captured:
        self.graphs.append(capture(*arguments))
        return self.graphs[-1]

    def after_forward(self, ids: Tensor, scores: Tensor) -> Tensor:
        """As a logits processor, which a generation calls behind each forward call."""
        self.seen.append(len(self.graphs))
        return scores

    @property
    def of_a_step(self) -> list[Captured]:
        """Those of the first decode step; of the prefill where a step has made none."""
        prefill, *later = self.seen or [0]
        return self.graphs[prefill : later[0]] if later and later[0] > prefill else self.graphs[:prefill]


def generate(model: Any, watched: WatchedCalls) -> tuple[Tensor, Tensor]:
    """Greedy tokens, and the logits before each."""
    ids = torch.randint(1, 128, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    selected = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[watched.after_forward], **selected)
    return out.sequences[0, PROMPT:], torch.stack(out.logits)


def compiled(family: Family, options: dict[str, Any]) -> tuple[Any, Tensor, Tensor, WatchedCalls]:
    """A model that has generated, its tokens and logits, and the graphs."""
    torch.compiler.reset()
    model, watched = tiny(*family), WatchedCalls()
    model.compile(backend="specache", options=options)
    with mock.patch.object(backend, "capture", watched.capture):
        return model, *generate(model, watched), watched


def measured(family: Family) -> dict[str, Any]:
    """A family's row, but for its name."""
    try:
        expected, logits = generate(tiny(*family), WatchedCalls())
        if not logits.isfinite().all():
            raise ValueError("its logits are not finite")
    except Exception as error:  # whatever a model raises that was never compiled is no finding about this backend
        return {"outcome": "not run", "why": shortened(error)}
    with warnings.catch_warnings(record=True, action="always") as caught:
        model, tokens, ours, watched = compiled(family, LOSSLESS)
    lanes, one_lane = lanes_of(model)
    graphs = watched.of_a_step
    rewritten = sum(len(graph.sites) + len(graph.found.latents) for graph in graphs)
    reasons = [item.reason for graph in graphs for item in graph.left_alone]
    same = len(tokens) == len(expected)
    return {
        "outcome": "ran", "equal": int((tokens == expected).cumprod(0).sum()) if same else 0, "tokens": len(expected),
        "largest difference": float((ours - logits).abs().max()) if same else None,
        "rewritten": rewritten, "attentions": rewritten + len(reasons), "reasons": list(dict.fromkeys(reasons)),
        "lanes": lanes, "one lane": one_lane,
        "warned": any(issubclass(one.category, sc.SpecacheWarning) for one in caught),
        "finite": bool(compiled(family, LOSSY)[2].isfinite().all()) if rewritten else None,
    }  # fmt: skip


def lanes_of(model: Any) -> tuple[int | None, str | None]:
    """The lanes of a model's decode, the fewest of its graphs, and why it has one; None where nothing is rewritten."""
    record = find_record(model)
    forms = [made for graph in (record.graphs if record else ()) for made in graph.rewrites.made.values()]
    counts = [made.lanes for made in forms if made.variant.phase.name == "decode"]
    return min(counts, default=None), next((made.one_lane for made in forms if made.one_lane), None)


def shortened(error: BaseException) -> str:
    """An error in a line of a table."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 160 else f"{text[:157]}..."


def work(family: Family, answer: Any) -> None:
    """In a new process: send a row, or an error as a row."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        answer.send(measured(family))
    except Exception as error:
        answer.send({"outcome": "failed", "why": shortened(error)})


def within(family: Family, limit: float) -> dict[str, Any]:
    """A family's row, from a process that has `limit` seconds."""
    context = multiprocessing.get_context("forkserver")  # which has imported all of this once
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(family, there))
    process.start()
    there.close()
    try:
        if not here.poll(limit):
            return {"outcome": "failed", "why": f"no answer in {limit:g} seconds"}
        row: dict[str, Any] = here.recv()
        process.join(AFTER)
        return row
    except EOFError:
        process.join()
        return {"outcome": "failed", "why": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def kept(out: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows of a file by family and versions; of two the last."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {(row["family"], *(row[name] for name in VERSIONS)): row for row in map(json.loads, lines)}


def newest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the newest versions, by family."""
    by = [tuple(Version(row[name]) for name in ("transformers", "torch")) for row in rows]
    found = [row for row, versions in zip(rows, by, strict=True) if versions == max(by)]
    return sorted(found, key=lambda row: str(row["family"]))


def is_unwarned(row: dict[str, Any]) -> bool:
    """Whether something is left alone or runs one lane without a warning. Sliding windows next to rewritten attentions
    are logged instead."""
    expected = [reason for reason in row["reasons"] if not (row["rewritten"] and WINDOW in reason)]
    return bool(expected or row["one lane"]) and not row["warned"]


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a row shows a fault."""
    return row["outcome"] == "failed" or (
        row["outcome"] == "ran" and (row["equal"] < row["tokens"] or row["finite"] is False or is_unwarned(row))
    )


def counts(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in one sentence."""
    ran = [row for row in rows if row["outcome"] == "ran"]
    lanes = [row["lanes"] if row["rewritten"] else 0 for row in ran]
    return (
        f"{len(rows)} families with transformers {rows[0]['transformers']} and torch {rows[0]['torch']}: "
        f"{lanes.count(2)} in two lanes, {lanes.count(1)} in one, {lanes.count(0)} left as they are, "
        f"{sum(row['outcome'] == 'not run' for row in rows)} not run; wrong or failed: {sum(map(is_wrong, rows))}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these families (all)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for each (180)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "every_family.jsonl")
    args = parser.parse_args(arguments)
    known = families()
    selected = args.only or list(known)
    if unknown := [name for name in selected if name not in known]:
        parser.error(f"no family {unknown[0]!r}; there are {', '.join(known)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = kept(args.out)
    with contextlib.suppress(KeyboardInterrupt):
        for name in tqdm([n for n in selected if (n, *VERSIONS.values()) not in done], file=sys.stderr, unit="family"):
            start = time.perf_counter()
            found = within((name, known[name]), args.limit)
            seconds = round(time.perf_counter() - start, 1)
            origin = {**VERSIONS, "date": datetime.date.today().isoformat(), "seconds": seconds}
            with args.out.open("a") as file:
                file.write(json.dumps({"family": name, "class": known[name], **found, **origin}) + "\n")
    rows = newest(list(kept(args.out).values()))
    if rows:
        print(*(json.dumps(row) for row in rows if is_wrong(row)), counts(rows), sep="\n")
    return int(any(is_wrong(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
