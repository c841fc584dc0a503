"""What more slots than k would save: pairs that a step fetches, were those that the last steps wanted kept too.

    python benchmarks/slots.py                     SmolLM2, some six minutes on two cores; results/slots.json
    python benchmarks/slots.py --contexts 1024     one context, a minute

Each step's own choice of k pairs (one lane, corrected) is taken down, head by head. Then slots of each number are
played through, of which the least recently wanted gives way. The choice is of the low-bit logits alone, so that no
number of slots changes it, nor the quality; as many slots as k must need what the run itself has fetched.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import specache_compile as sc
from specache_compile.bench.results import provenance
from specache_compile.compat import cache_of, with_cache
from specache_compile.evaluation.command import load
from specache_compile.runtime.session import session_of


@torch.no_grad()
def chosen(model: Any, ids: Tensor, steps: int) -> tuple[Tensor, Any]:
    """The tokens that each step of a greedy continuation wanted [steps, layers · heads, k], and the cache's session."""
    out = model(ids, use_cache=True)
    found = []
    for _ in tqdm(range(steps), f"{ids.shape[1]:,} tokens", disable=None, leave=False):
        out = model(out.logits[:, -1:].argmax(-1), **with_cache(cache_of(out)), use_cache=True)
        session = session_of(cache_of(out))
        assert session is not None
        found.append(torch.stack([state["slot_index"][0] for state in session.state]).flatten(0, 1).clone())
    return torch.stack(found), session


def missing(wanted: Tensor, slots: int) -> float:
    """Pairs a step that a head lacks, of wanted [steps, heads, k]; the first step, which fills the slots, apart."""
    lacked = 0
    for head in wanted.unbind(1):
        held: OrderedDict[int, None] = OrderedDict()
        for step, tokens in enumerate(head.tolist()):
            lacked += sum(token not in held for token in tokens) if step else 0
            for token in tokens:
                held[token] = None
                held.move_to_end(token)
            while len(held) > slots:
                held.popitem(last=False)
    return lacked / (wanted.shape[0] - 1) / wanted.shape[1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a checkpoint (smollm2-135m)")
    parser.add_argument("--text", type=Path, default=Path("build/unseen.txt"), help="(build/unseen.txt)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8000], help="tokens (1024 4096 8000)")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 96, 128, 256], help="(64 96 128 256)")
    parser.add_argument("--steps", type=int, default=65, help="tokens decoded (65)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "slots.json")
    args = parser.parse_args(arguments)
    model, reader = load(args.model, "cpu", torch.float32)
    ids = torch.tensor([reader.encode(args.text.read_text("utf-8"))])
    model.compile(backend="specache", options={"min_context": 0})
    rows = []
    for context in args.contexts:
        wanted, session = chosen(model, ids[:, :context], args.steps)
        k = wanted.shape[-1]
        counted = sc.stats(model).pairs_corrected / len(wanted[0])
        assert round(counted - k) == round(missing(wanted, k) * (args.steps - 1)), "what the run fetched is not this"
        tiers = sc.stats(model).bytes_by_tier
        device = sum(size for tier, size in tiers.items() if tier != "host")
        for slots in args.slots:
            more = (slots - k) * tiers["slots"] / k / device
            rows.append({"context": context, "slots": slots, "fetched": missing(wanted, slots), "more bytes": more})
        del session
    report = {"provenance": provenance(torch.device("cpu"), "benchmarks/slots.py"), "k": k, "rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Pairs fetched a step and head, of {k} wanted; and device KV bytes that the further slots take")
    table = [(r["context"], r["slots"], f"{r['fetched']:.1f}", f"{r['more bytes']:+.1%}") for r in rows]
    print(tabulate(table, ("context", "slots", "fetched", "bytes"), floatfmt=","))


if __name__ == "__main__":
    main()
