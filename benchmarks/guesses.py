"""How often the speculative token is right, and what it saves: pairs fetched ahead, and pairs left to correct.

    python benchmarks/guesses.py                                SmolLM2, hours on two cores; results/guesses.json
    python benchmarks/guesses.py --contexts 1024 --windows 1    some eight minutes
    python benchmarks/guesses.py --resume                       the windows that --out does not have

A text is continued by the default with one lane. Every row then reads that same continuation, token by token, and runs
a guess of the next one beside each:
    as made                           by the two lanes
    looked up                         what followed the last two tokens where they stood before, else as made
    looked up behind a wrong one      that, where the guess before was wrong, so that the one made is of another text
    the last again behind a wrong one
    what comes                        the most that any guess could save
With one lane none is made. No guess changes a token's logits.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import specache_compile as sc
from specache_compile.bench.results import Results
from specache_compile.evaluation.command import load
from specache_compile.evaluation.tasks.closeness import interval
from specache_compile.runtime.session import session_of

SETTINGS = {
    "one lane": {"speculate": False},
    "the default, two lanes": {"speculate": True},
    "the paper's": {"setting": "paper"},
}


@dataclass(frozen=True)
class Place:
    """A step that is about to run, for who guesses the token behind its own.

    past: tokens up to the step's own.
    made: what the lanes say.
    was_wrong: whether the guess of the step before was.
    last: that guess.
    coming: the token that does come.
    """

    past: Sequence[int]
    made: int
    was_wrong: bool
    last: int | None
    coming: int


def looked_up(at: Place) -> int:
    """What followed the last two tokens where they stood last, else what was made."""
    one, other = at.past[-2:]
    for i in range(len(at.past) - 2, 0, -1):
        if at.past[i] == other and at.past[i - 1] == one:
            return at.past[i + 1]
    return at.made


GUESSES: dict[str, Callable[[Place], int | None]] = {
    "as made": lambda at: at.made,
    "looked up": looked_up,
    "looked up behind a wrong one": lambda at: looked_up(at) if at.was_wrong else at.made,
    "the last again behind a wrong one": lambda at: at.last if at.was_wrong else at.made,
    "what comes": lambda at: at.coming,
}


@torch.no_grad()
def continued(model: Any, cache: Any, last: Tensor, count: int, generator: torch.Generator | None) -> list[int]:
    """The next tokens: greedy ones, or with a generator sampled at temperature 1."""
    cache, tokens = copy.deepcopy(cache), [last]
    for _ in range(count):
        logits = model(tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1].float()
        greedy = logits.argmax(-1, keepdim=True)
        tokens.append(greedy if generator is None else torch.multinomial(logits.softmax(-1), 1, generator=generator))
    return torch.cat(tokens[1:], 1)[0].tolist()


@torch.no_grad()
def along(model: Any, cache: Any, past: list[int], text: list[int], guess: Callable[[Place], int | None]) -> list[bool]:
    """Read `text` behind the cache of `past` but for its last token; whether each step's guess was what came."""
    cache, right, last = copy.deepcopy(cache), [], None
    tokens = [past[-1], *text]
    for step, coming in enumerate(text):
        session = session_of(cache)
        if session is not None and session.progress.guess is not None:
            made = int(session.progress.guess)
            last = guess(Place([*past, *text[:step]], made, bool(right) and not right[-1], last, coming))
            session.progress.guess.fill_(last)
            right.append(last == coming)
        cache = model(torch.tensor([[tokens[step]]]), past_key_values=cache, use_cache=True).past_key_values
    return right


def measured(model: Any, ids: list[int], kinds: Sequence[str], steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of one window: every setting and guess, along its greedy and its sampled continuation."""
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    texts: dict[str, list[int]] = {}
    for setting, options in SETTINGS.items():
        torch.compiler.reset()
        model.compile(backend="specache", options={"min_context": 0, **options})
        with torch.no_grad():
            cache = model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
        for kind in kinds:
            generator = torch.Generator().manual_seed(seed) if kind == "sampled" else None
            if kind not in texts:
                texts[kind] = continued(model, cache, torch.tensor([ids[-1:]]), steps, generator)
            for name, guess in GUESSES.items() if setting != "one lane" else (("none", lambda at: at.made),):
                right = along(model, cache, ids, texts[kind], guess)
                done = sc.stats(model)
                yield {
                    "setting": setting, "text": kind, "guess": name, "right": right,
                    "ahead": done.pairs_ahead / steps / heads,
                    "corrected": done.pairs_corrected / steps / heads,
                }  # fmt: skip


def summed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of all windows: means, and half the width of their 95 % interval over windows."""
    found = []
    for key in dict.fromkeys((r["context"], r["text"], r["setting"], r["guess"]) for r in rows):
        same = [r for r in rows if (r["context"], r["text"], r["setting"], r["guess"]) == key]
        shares = [sum(r["right"]) / len(r["right"]) for r in same if r["right"]]
        entry: dict[str, Any] = dict(zip(("context", "text", "setting", "guess"), key, strict=True))
        entry["right"] = statistics.fmean(shares) if shares else None
        entry["right ±"] = interval(shares)
        for name in ("ahead", "corrected"):
            entry[name] = statistics.fmean(r[name] for r in same)
            entry[f"{name} ±"] = interval([r[name] for r in same])
        found.append(entry)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a checkpoint (smollm2-135m)")
    parser.add_argument("--text", type=Path, default=Path("build/unseen.txt"), help="(build/unseen.txt)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8000], help="tokens (1024 4096 8000)")
    parser.add_argument("--windows", type=int, default=4, help="texts of each (4)")
    parser.add_argument("--steps", type=int, default=64, help="tokens of a continuation (64)")
    parser.add_argument("--resume", action="store_true", help="keep the windows that --out has, and go on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "guesses.json")
    args = parser.parse_args(arguments)
    model, reader = load(args.model, "cpu", torch.float32)
    ids = reader.encode(args.text.read_text("utf-8"))
    settings = {"model": args.model, "text": str(args.text), "windows": args.windows, "steps": args.steps}
    results = Results(args.out, "benchmarks/guesses.py", torch.device("cpu"), args.resume, **settings)
    for context in args.contexts:
        for window in tqdm(range(args.windows), f"{context:,} tokens", disable=None):
            if results.has(context=context, window=window):
                continue
            start = (len(ids) - context) * window // max(1, args.windows)
            text = ids[start : start + context]
            rows = measured(model, text, ("greedy", "sampled"), args.steps, window)
            results.add(*({"context": context, "window": window, **row} for row in rows))
    table = summed(results.rows)
    print("Of guesses those that were what came; pairs a layer, KV head and token that came ahead, and within the step")
    shown = [
        (*(r[name] for name in ("context", "text", "setting", "guess")),
         "" if r["right"] is None else f"{r['right']:.0%} ± {r['right ±']:.0%}",
         *(f"{r[name]:.1f} ± {r[f'{name} ±']:.1f}" for name in ("ahead", "corrected")))
        for r in table
    ]  # fmt: skip
    print(tabulate(shown, ("context", "text", "setting", "guess", "right", "ahead", "corrected"), floatfmt=","))


if __name__ == "__main__":
    main()
