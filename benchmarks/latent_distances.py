"""How far few bits of latents are from the full cache, beside few bits of plain keys and values.

No trained checkpoint with latent attention is at hand: so these are random models, four layers of width 256, and say no
more than how the two kinds of cache compare under the same settings. *structured*: a few channels of what is cached are
ten times as large as the rest, as in trained models. The distance is the root of the mean square of the logits' error
in a decode step behind each prompt, over their own spread.

    python benchmarks/latent_distances.py                 eight prompts of 512 tokens: three minutes on two cores
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from specache_compile.bench.results import Results
from specache_compile.compat import with_cache
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import device_total

COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "initializer_range": 0.08, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("deepseek_v3", {
        "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 4,
    }),
    "keys and values": ("llama", {"num_key_value_heads": 2, "head_dim": 64}),
}  # fmt: skip
# The parameters whose rows, or numbers, make the cached channels.
CACHED = ("kv_a_layernorm.weight", "kv_a_proj_with_mqa.weight", "k_proj.weight", "v_proj.weight")
SETTINGS: dict[str, dict[str, Any]] = {
    "kivi, 1 bit": {"method": "kivi", "bits": 1},
    "kivi, 2 bits": {"method": "kivi", "bits": 2},
    "kivi, 4 bits": {"method": "kivi", "bits": 4},
    "specache, 1 bit": {"bits": 1},
    "specache, the default": {},
    "specache, 4 bits": {"bits": 4},
}
LOUD, TIMES = 6, 10.0


def model_of(kind: str, structured: bool) -> Any:
    name, settings = KINDS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **COMMON, **settings)).eval()
    if structured:
        with torch.no_grad():
            for parameter in (p for n, p in model.named_parameters() if n.endswith(CACHED)):
                parameter[torch.randperm(parameter.shape[0])[:LOUD]] *= TIMES
    return model


@torch.no_grad()
def last_logits(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
    """Of the last token of `ids` [1, n], decoded behind the others."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], **with_cache(cache), use_cache=True)
    return model(ids[:, -1:], **with_cache(cache), use_cache=True).logits[0, -1], cache


def measure(kind: str, structured: bool, tokens: int, prompts: int) -> list[dict[str, Any]]:
    """A row for each setting: the distance's mean over the prompts, its standard error, and the device's bytes."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, COMMON["vocab_size"], (1, tokens), generator=generator) for _ in range(prompts)]
    plain = model_of(kind, structured)
    exact = [last_logits(plain, ids) for ids in texts]
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact[0][1].layers)
    rows = []
    for name, options in SETTINGS.items():
        torch._dynamo.reset()
        model = model_of(kind, structured)
        model.compile(backend="specache", options={"lowering": "eager", **options})
        distances = []
        for ids, (expected, _) in zip(texts, exact, strict=True):
            logits, cache = last_logits(model, ids)
            distances.append(float((logits - expected).pow(2).mean().sqrt() / expected.std()))
        session = session_of(cache)
        assert session is not None, "not rewritten"
        low = sum(state[field].nbytes for state in session.state for field in ("codes", "key_params", "value_params"))
        rows.append({
            "kind": kind, "structured": structured, "setting": name, "distance": statistics.mean(distances),
            "error": statistics.stdev(distances) / prompts**0.5 if prompts > 1 else 0.0,
            "low_bit_share": low / session.tiers.capacity / (whole / tokens),
            "device_bytes": device_total(session.statistics.bytes_by_tier),
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Distances with their standard errors; what a token takes in the low-bit tier, of the full cache in float32."""
    lines = []
    for name in SETTINGS:
        found = {(row["kind"], row["structured"]): row for row in rows if row["setting"] == name}
        told = [f"{row['distance']:.4f} ± {row['error']:.4f}" for row in found.values()]
        shares = [f"{found[kind, False]['low_bit_share']:.3f}" for kind in KINDS]
        lines.append([name, *told, *shares])
    heads = [f"{kind}, {weights}" for kind in KINDS for weights in ("random", "structured")]
    return tabulate(lines, headers=["", *heads, *(f"low-bit bytes, {kind}" for kind in KINDS)], disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("build/latent_distances.json"), help="goes on where it ends")
    args = parser.parse_args()
    settings = {"tokens": args.tokens, "prompts": args.prompts}
    results = Results(args.out, "benchmarks/latent_distances.py", torch.device("cpu"), resume=True, **settings)
    for kind in tqdm(KINDS, unit="model"):
        for structured in (False, True):
            if not results.has(kind=kind, structured=structured):
                results.add(*measure(kind, structured, args.tokens, args.prompts))
    print(table(results.rows))


if __name__ == "__main__":
    main()
