"""Several new tokens behind cached latents, one layer: over the rows themselves, or over keys and values made of them.

Attention as in DeepSeek-V2-Lite and MiniCPM3, random numbers. The op takes the way that multiplies less often
(`kernels/attention/latents.py: makes_keys`); here both are timed in turn, and it is said which one it would take.

    python benchmarks/latent_extends.py                                     five minutes on two cores
    python benchmarks/latent_extends.py --contexts 64 --tokens 8 --rounds 1     a second
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from latents import SHAPES
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from specache_compile.bench.results import Results
from specache_compile.kernels.attention.flash import extend_attention_fused
from specache_compile.kernels.attention.latents import makes_keys, over_keys, over_rows
from specache_compile.kernels.state.segments import SEGMENT


def operands(shape: str, dtype: torch.dtype, context: int, tokens: int) -> tuple[Tensor, ...]:
    """q, new rows, cursor, host and weight of one layer."""
    torch.manual_seed(0)
    of = SHAPES[shape][1]
    heads, rank, rope = of["num_attention_heads"], of["kv_lora_rank"], of["qk_rope_head_dim"]
    nope, row = of["qk_nope_head_dim"], rank + rope
    q, new = torch.randn(1, heads, tokens, nope + rope), torch.randn(1, 1, tokens, row)
    host = torch.randn(-(-context // SEGMENT), 1, 1, SEGMENT, 2, row // 2)
    weight = torch.randn(heads * (nope + of["v_head_dim"]), rank) / rank**0.5
    cursor = torch.tensor([[context, 0, 0, 0]])
    return q.to(dtype), new.to(dtype), cursor, host.to(dtype), weight.to(dtype)


@torch.no_grad()
def measure(shape: str, dtype: str, context: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of both ways, the best of `rounds` in turn behind one that is not counted."""
    q, new, cursor, host, weight = operands(shape, getattr(torch, dtype), context, tokens)
    given: tuple[Any, ...] = (q, new, None, None, cursor, host, weight, q.shape[-1] ** -0.5)
    ways = {"rows": lambda: over_rows(extend_attention_fused, *given, None), "keys": lambda: over_keys(*given)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + rounds):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            found[name] += [1e3 * (time.perf_counter() - start)] if number else []
    best = {name: min(values) for name, values in found.items()}
    taken = "keys" if makes_keys(q, new, weight) else "rows"
    return {"shape": shape, "dtype": dtype, "context": context, "tokens": tokens, **best, "taken": taken}


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds over rows / over keys and values; what the op takes in brackets."""
    contexts = sorted({row["context"] for row in rows})
    lines: dict[tuple[str, str, int], list[str]] = {}
    for row in sorted(rows, key=lambda row: (row["shape"], row["dtype"], row["tokens"], row["context"])):
        cell = f"{row['rows']:,.1f} / {row['keys']:,.1f} ({row['taken']})"
        lines.setdefault((row["shape"], row["dtype"], row["tokens"]), []).append(cell)
    heads = ["shape", "dtype", "new tokens", *(f"behind {context:,}" for context in contexts)]
    return tabulate([[*key, *cells] for key, cells in lines.items()], headers=heads, disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/latent_extends.json"), help="goes on where it ends")
    args = parser.parse_args()
    settings = {"rounds": args.rounds, "threads": torch.get_num_threads()}
    results = Results(args.out, "benchmarks/latent_extends.py", torch.device("cpu"), resume=True, **settings)
    cells = [
        {"shape": shape, "dtype": dtype, "context": context, "tokens": tokens}
        for shape in args.shapes for dtype in args.dtypes for tokens in args.tokens for context in args.contexts
    ]  # fmt: skip
    for cell in tqdm(cells, unit="cell"):
        if not results.has(**cell):
            results.add(measure(**cell, rounds=args.rounds))
    print(table(results.rows))


if __name__ == "__main__":
    main()
