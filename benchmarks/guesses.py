"""How often the speculative token is right, and what it saves: pairs fetched ahead, and pairs left to correct.

    python benchmarks/guesses.py                                SmolLM2, an hour on two cores; results/guesses.json
    python benchmarks/guesses.py --contexts 1024 --windows 1    some two minutes
    python benchmarks/guesses.py --resume                       what --out does not have

A text is continued by the default with one lane. Every row then reads that same continuation, token by token, and runs
a guess of the next one beside each:
    as made                             by the two lanes
    looked up                           what followed the last two tokens where they stood before, else as made
    looked up behind a wrong one        that, where the guess before was wrong, so that the one made is of another text
    the second best behind a wrong one  what the output token before might have been instead
    the last again behind a wrong one
    what comes                          the most that any guess could save
With one lane none is made. Under the default no guess changes a token's logits, and under the paper's setting, where
nothing is corrected, the one that the lanes make is measured alone. Figures are means over windows, with the least and
the most.
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
from specache_compile.compat import cache_of, with_cache
from specache_compile.evaluation.command import load
from specache_compile.runtime.session import session_of

ONE_LANE, DEFAULT, PAPER = "one lane", "the default, two lanes", "the paper's"
SETTINGS = {ONE_LANE: {"speculate": False}, DEFAULT: {"speculate": True}, PAPER: {"setting": "paper"}}
KINDS = ("greedy", "sampled")
# Windows begin at eighths of the text, so that more of them may follow.
PARTS = 8


@dataclass(frozen=True)
class Place:
    """A step that is about to run, for who guesses the token behind its own.

    past: tokens up to the step's own.
    made: what the lanes say.
    was_wrong: whether the guess of the step before was.
    last: that guess.
    second: the second best in the place of the step's own token.
    coming: the token that does come.
    """

    past: Sequence[int]
    made: int
    was_wrong: bool
    last: int | None
    second: int | None
    coming: int


def looked_up(at: Place) -> int:
    """What followed the last two tokens where they stood last, else what was made."""
    one, other = at.past[-2:]
    for i in range(len(at.past) - 2, 0, -1):
        if at.past[i] == other and at.past[i - 1] == one:
            return at.past[i + 1]
    return at.made


def behind_a_wrong_one(guess: Callable[[Place], int | None]) -> Callable[[Place], int]:
    """That guess where the one before was wrong, else as made."""

    def chosen(at: Place) -> int:
        token = guess(at) if at.was_wrong else None
        return at.made if token is None else token

    return chosen


GUESSES: dict[str, Callable[[Place], int]] = {
    "as made": lambda at: at.made,
    "looked up": looked_up,
    "looked up behind a wrong one": behind_a_wrong_one(looked_up),
    "the second best behind a wrong one": behind_a_wrong_one(lambda at: at.second),
    "the last again behind a wrong one": behind_a_wrong_one(lambda at: at.last),
    "what comes": lambda at: at.coming,
}
MEASURED = {ONE_LANE: {"none": lambda at: at.made}, DEFAULT: GUESSES, PAPER: {"as made": GUESSES["as made"]}}


@torch.no_grad()
def continued(model: Any, cache: Any, last: Tensor, count: int, generator: torch.Generator | None) -> list[int]:
    """The next tokens: greedy ones, or with a generator sampled at temperature 1."""
    cache, tokens = copy.deepcopy(cache), [last]
    for _ in range(count):
        logits = model(tokens[-1], **with_cache(cache), use_cache=True).logits[:, -1].float()
        greedy = logits.argmax(-1, keepdim=True)
        tokens.append(greedy if generator is None else torch.multinomial(logits.softmax(-1), 1, generator=generator))
    return torch.cat(tokens[1:], 1)[0].tolist()


@torch.no_grad()
def along(model: Any, cache: Any, past: list[int], text: list[int], guess: Callable[[Place], int]) -> list[bool]:
    """Read `text` behind the cache of `past` but for its last token; whether each step's guess was what came."""
    cache, right, last, second = copy.deepcopy(cache), [], None, None
    tokens = [past[-1], *text]
    for step, coming in enumerate(text):
        session = session_of(cache)
        if session is not None and session.progress.guess is not None:
            made = int(session.progress.guess)
            last = guess(Place([*past, *text[:step]], made, bool(right) and not right[-1], last, second, coming))
            session.progress.guess.fill_(last)
            right.append(last == coming)
        out = model(torch.tensor([[tokens[step]]]), **with_cache(cache), use_cache=True)
        cache, second = cache_of(out), int(out.logits[0, -1].topk(2).indices[1])
    return right


def measured(
    model: Any, setting: str, ids: list[int], texts: dict[str, list[int]], steps: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Rows of one window under one setting, along its greedy and its sampled continuation; a text that is not known is
    made, and is in its row."""
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    with torch.no_grad():
        cache = cache_of(model(torch.tensor([ids[:-1]]), use_cache=True))
    for kind in KINDS:
        if kind not in texts:
            generator = torch.Generator().manual_seed(seed) if kind == "sampled" else None
            texts[kind] = continued(model, cache, torch.tensor([ids[-1:]]), steps, generator)
        for name, guess in MEASURED[setting].items():
            right = along(model, cache, ids, texts[kind], guess)
            done = sc.stats(model)
            yield {
                "setting": setting, "text": kind, "guess": name, "right": right,
                "ahead": done.pairs_ahead / steps / heads,
                "corrected": done.pairs_corrected / steps / heads,
                **({"tokens": texts[kind]} if setting == ONE_LANE else {}),
            }  # fmt: skip


def summed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of all windows: of each figure its values, a window each."""
    found = []
    for key in dict.fromkeys((r["context"], r["text"], r["setting"], r["guess"]) for r in rows):
        same = [r for r in rows if (r["context"], r["text"], r["setting"], r["guess"]) == key]
        entry: dict[str, Any] = dict(zip(("context", "text", "setting", "guess"), key, strict=True))
        entry["right"] = [sum(r["right"]) / len(r["right"]) for r in same if r["right"]]
        found.append(entry | {name: [r[name] for r in same] for name in ("ahead", "corrected")})
    return found


def told(values: Sequence[float], form: str) -> str:
    """Their mean, the least and the most; "" of none."""
    if not values:
        return ""
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (f"{r['context']:,}", r["text"], r["setting"], r["guess"], told(r["right"], ".0%"),
         *(told(r[name], ".1f") for name in ("ahead", "corrected")))
        for r in summed(rows)
    ]  # fmt: skip
    return tabulate(lines, ("tokens", "text", "setting", "guess", "right", "ahead", "corrected"), disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a checkpoint (smollm2-135m)")
    parser.add_argument("--text", type=Path, default=Path("build/unseen.txt"), help="(build/unseen.txt)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8000], help="tokens (1024 4096 8000)")
    parser.add_argument("--windows", type=int, default=4, help="texts of each, at most 8 (4)")
    parser.add_argument("--steps", type=int, default=64, help="tokens of a continuation (64)")
    parser.add_argument("--resume", action="store_true", help="keep the windows that --out has, and go on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "guesses.json")
    args = parser.parse_args(arguments)
    model, reader = load(args.model, "cpu", torch.float32)
    ids = reader.encode(args.text.read_text("utf-8"))
    settings = {"model": args.model, "text": str(args.text), "steps": args.steps}
    results = Results(args.out, "benchmarks/guesses.py", torch.device("cpu"), args.resume, **settings)
    todo = [(setting, context, window) for setting in SETTINGS for context in args.contexts
            for window in range(args.windows)]  # fmt: skip
    compiled = ""
    for setting, context, window in tqdm(todo, disable=None):
        if results.has(setting=setting, context=context, window=window):
            continue
        if setting != compiled:
            torch.compiler.reset()
            model.compile(backend="specache", options={"min_context": 0, "lowering": "eager", **SETTINGS[setting]})
            compiled = setting
        start = (len(ids) - context) * window // PARTS
        known = {row["text"]: row["tokens"] for row in results.rows
                 if (row["setting"], row["context"], row["window"]) == (ONE_LANE, context, window)}  # fmt: skip
        rows = list(measured(model, setting, ids[start : start + context], known, args.steps, window))
        results.add(*({"context": context, "window": window, **row} for row in rows))
    print("Of guesses those that were what came; pairs a layer, KV head and token that came ahead, and within the step")
    print(table(results.rows))


if __name__ == "__main__":
    main()
