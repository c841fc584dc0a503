"""A decode step of latent attention: absorbed, and with plain torch.compile, which expands the whole cache.

    python benchmarks/latent_attention.py    (15 minutes; --contexts 1024 --dtypes float32 --rounds 2: a minute)

The attentions are those of DeepSeek-V2-Lite and MiniCPM3, in two layers with random weights and a small MLP.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from specache_compile.bench.measurements import BenchPlan, cell
from specache_compile.bench.results import Results

METHODS = ("compiled", "specache")
COMMON: dict[str, Any] = {
    "vocab_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": ("deepseek_v2", {
        "hidden_size": 2048, "intermediate_size": 2048, "first_k_dense_replace": 2, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    }),
    "MiniCPM3": ("minicpm3", {
        "hidden_size": 2560, "intermediate_size": 2048, "num_attention_heads": 40, "num_key_value_heads": 40,
        "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    }),
}  # fmt: skip


def model_of(shape: str, dtype: torch.dtype) -> Any:
    """Two layers of random weights."""
    kind, settings = SHAPES[shape]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def measure(shape: str, dtype: str, args: argparse.Namespace, results: Results, bar: tqdm) -> None:
    """The rows of one model that the file lacks: all ways in turn, at each context."""
    contexts = [c for c in args.contexts if not results.has(shape=shape, dtype=dtype, context=c)]
    if not contexts:
        return
    model = model_of(shape, getattr(torch, dtype))
    plan = BenchPlan(METHODS, args.rounds, args.lowering, in_a_row=args.in_a_row)
    for context in contexts:
        rows = cell(model, context, 1, plan, bar)
        results.add(*({"shape": shape, "dtype": dtype, **row} for row in rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds a step; the last column is how many times as fast ours is."""
    lines = []
    for key in sorted({(row["shape"], row["dtype"], row["context"]) for row in rows}):
        steps = {row["method"]: row for row in rows if (row["shape"], row["dtype"], row["context"]) == key}
        plain, ours = (steps[name]["step_ms"] for name in METHODS)
        lines.append([*key[:2], f"{key[2]:,}", f"{plain:.1f}", f"{ours:.1f}", f"{plain / ours:.1f}x"])
    heads = ["shape", "dtype", "tokens", "torch.compile, ms", "specache, ms", "as fast"]
    return tabulate(lines, headers=heads, disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way (%(default)s)")
    parser.add_argument("--in-a-row", type=int, default=20, help="steps of a turn (%(default)s)")
    parser.add_argument("--lowering", default="inductor", help="of ours")
    parser.add_argument("--out", type=Path, default=Path("build/latents.json"), help="goes on where that file ends")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("lowering", "rounds", "in_a_row")}
    settings["threads"] = torch.get_num_threads()
    results = Results(args.out, "benchmarks/latent_attention.py", torch.device("cpu"), resume=True, **settings)
    cells = len(args.shapes) * len(args.dtypes) * len(args.contexts)
    with tqdm(total=cells * (len(METHODS) + args.rounds), file=sys.stderr, unit="turn") as bar:
        for shape in args.shapes:
            for dtype in args.dtypes:
                measure(shape, dtype, args, results, bar)
    print(table(results.rows))


if __name__ == "__main__":
    main()
