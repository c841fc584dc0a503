"""The option verify on five tiny random families at 1 bit: are 2,000 greedy tokens equal to the uncompiled model's?

    python benchmarks/verify_families.py    (--families GptOss --tokens 100 --lowering eager is shorter)

The prompt has 300 random tokens, and the cache grows through several buckets. `--out` stores finished families, and
the same command resumes from it.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import specache_compile as sc
from specache_compile.bench.results import provenance
from verify_drafts import equal_tokens, finished, generate

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "tie_word_embeddings": False,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {}, "Gemma2": SLIDING, "Phi3": {},
    "GptOss": {**SLIDING, **EXPERTS},
}  # fmt: skip
OPTIONS = {"bits": 1, "verify": 8}


def family(name: str) -> Any:
    """A tiny random model of a family; weights large enough that logits are well apart."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **FAMILIES[name])
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, None)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def measured(name: str, ids: Tensor, tokens: int, lowering: str) -> dict[str, Any]:
    """Greedy tokens of a family behind `ids` [1, n], compiled and not."""
    plain = family(name)
    expected, _ = generate(plain, ids, tokens)
    torch._dynamo.reset()
    twin = copy.deepcopy(plain)
    twin.compile(backend="specache", options={**OPTIONS, "lowering": lowering})
    got, seconds = generate(twin, ids, tokens)
    told = sc.stats(twin).verification
    assert told is not None, "nothing was drafted"
    return {
        "family": name, "tokens": tokens, "equal": equal_tokens(got, expected), "seconds": seconds,
        "tokens_per_verification": told.tokens_per_verification, "acceptance": told.acceptance,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each family."""
    lines = [
        (
            row["family"], f"{row['equal']:,} of {row['tokens']:,}", f"{row['acceptance']:.3f}",
            f"{row['tokens_per_verification']:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    headers = ("", "equal tokens", "acceptance", "tokens a verification")
    return tabulate(lines, headers, colalign=("left", "right", "right", "right"), disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="(all)")
    parser.add_argument("--tokens", type=int, default=2000, help="new tokens of each (2000)")
    parser.add_argument("--lowering", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--out", type=Path, default=Path("build/verify_families.jsonl"), help="finished (%(default)s)")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "verify_families.json")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", "specache rewrote", sc.SpecacheWarning)  # not the layers that slide
    ids = torch.randint(0, SMALL["vocab_size"], (1, 300), generator=torch.Generator().manual_seed(1))
    done = finished(args.out)
    keys = {f"{name}/{args.tokens}/{args.lowering}/{OPTIONS}": name for name in args.families}
    for key, name in tqdm(keys.items(), file=sys.stderr, unit="family"):
        if key not in done:
            done[key] = {"key": key, **measured(name, ids, args.tokens, args.lowering)}
            with args.out.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
    rows = [done[key] for key in keys]
    print(table(rows))
    origin = provenance(torch.device("cpu"), "benchmarks/verify_families.py")
    args.results.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
