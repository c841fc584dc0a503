"""Decode step time on the CPU: specache beside uncompiled Hugging Face and plain Inductor, in one run.

A random-weight Llama of about 100 million parameters (12 layers, width 768, 12 query heads, 4 KV heads of 64 channels),
or a checkpoint, decodes one sequence at several context lengths. "best" is the default setting, the other rows are the
paper's. The contexts are real prefills; each figure is a median, beside the quarter of the steps that were faster and
the quarter that were slower. Steps that compile are in the warm-up. Hugging Face's quantised caches (uncompiled) and
llama.cpp are left out where their library is not installed: pip install optimum-quanto hqq llama-cpp-python.

    python benchmarks/cpu_decode.py                                          1k, 4k and 8k, into benchmarks/results/
    python benchmarks/cpu_decode.py --model smollm2-135m --dtype bfloat16    a checkpoint
    python benchmarks/cpu_decode.py --contexts 512 --layers 2 --out FILE     a smoke test
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from baselines import QUANTIZED, empty_cache, why_not
from tabulate import tabulate
from tqdm import tqdm
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

import specache_compile as sc
from specache_compile.bench.llama_cpp import LIBRARY, LLAMA_CPP, LlamaCpp, build_info, why_no_llama_cpp
from specache_compile.bench.results import provenance
from specache_compile.checkpoints import gguf_of, is_installed
from specache_compile.evaluation.command import load

SPECACHE: dict[str, dict[str, Any]] = {
    "specache best": {},
    "specache best, one lane": {"speculate": False},
    "specache 2-bit": {"setting": "paper", "bits": 2},
    "specache 1-bit": {"setting": "paper", "bits": 1},
    "specache 2-bit, one lane": {"setting": "paper", "bits": 2, "speculate": False},
    "specache 2-bit, k = 0": {"setting": "paper", "bits": 2, "top_k": 0},
    "specache 16 bits, k = 0": {"setting": "paper", "bits": 16, "top_k": 0},
}
CHUNK = 2048
RESULTS = Path(__file__).parent / "results"


def build(layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=2560, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=32768, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


class Method:
    """One way to decode: a model, and a cache that already holds the context."""

    def __init__(self, name: str, model: Any, cache: Cache) -> None:
        self.name, self.model, self.cache = name, model, cache
        self.token = torch.zeros(1, 1, dtype=torch.int64)

    def step(self) -> float:
        """One decode step; seconds."""
        position = torch.tensor([[self.cache.get_seq_length()]])
        start = time.perf_counter()
        out = self.model(self.token, past_key_values=self.cache, position_ids=position, use_cache=True)
        seconds = time.perf_counter() - start
        self.token = out.logits[:, -1:].argmax(-1)
        return seconds


class TimedLlamaCpp:
    """llama.cpp's steps, in seconds."""

    def __init__(self, name: str, gguf: Path, ids: list[int], more: int) -> None:
        self.name, self.llama = name, LlamaCpp(name, gguf, ids, more)

    def step(self) -> float:
        start = time.perf_counter()
        self.llama.step()
        return time.perf_counter() - start


def filled(model: Any, ids: torch.Tensor) -> DynamicCache:
    """A cache that the uncompiled `model` has filled with the whole context, in chunks."""
    cache = DynamicCache()
    for start in range(0, ids.shape[1], CHUNK):
        model(ids[:, start : start + CHUNK], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def quantized(name: str, model: LlamaForCausalLM, plain: DynamicCache) -> Cache:
    """Hugging Face's quantised cache of the same context."""
    cache = empty_cache(name, model.config, 0)
    for number, layer in enumerate(plain.layers):
        cache.update(layer.keys, layer.values, number)
    return cache


def prepare(name: str, model: LlamaForCausalLM, plain: DynamicCache) -> Method:
    """A method with its own copy of the context, which was read once, exactly; weights are shared."""
    if name == "uncompiled":
        return Method(name, model, copy.deepcopy(plain))
    if name in QUANTIZED:
        return Method(name, model, quantized(name, model, plain))
    twin = copy.copy(model)
    twin.__dict__ = dict(model.__dict__)
    if name == "Inductor":
        twin.compile(dynamic=True)
        return Method(name, twin, copy.deepcopy(plain))
    twin.compile(backend="specache", options=SPECACHE[name])
    return Method(name, twin, sc.hold(plain, twin))


def measure(method: Method | TimedLlamaCpp, steps: int, warm_up: int, bar: tqdm) -> dict[str, Any]:
    """The median step of a method, and for specache the share of the steps spent in our Python."""
    for _ in range(warm_up):
        method.step()
    before = statistics_of(method)
    times = []
    for _ in range(steps):
        times.append(method.step())
        bar.update()
    quartiles = [1e3 * edge for edge in statistics.quantiles(times, n=4)]
    row: dict[str, Any] = {"method": method.name, "ms": quartiles[1], "quartiles": quartiles, "steps": steps}
    if before is not None:
        seconds, python = (now - then for now, then in zip(statistics_of(method), before, strict=True))
        row |= {"python_share": python / seconds, "kv_ratio": sc.stats(method.model).kv_ratio}
    return row


def statistics_of(method: Method | TimedLlamaCpp) -> Any:
    """Seconds in all and in our Python so far, of this method's own cache; None for a plain one."""
    if method.name not in SPECACHE:
        return None
    latest = sc.stats(method.model)
    return latest.seconds, latest.python_seconds


def run_context(context: int, model: LlamaForCausalLM, args: argparse.Namespace, bar: tqdm) -> list[dict[str, Any]]:
    ids = torch.randint(0, 8192, (1, context), generator=torch.Generator().manual_seed(1))
    bar.set_postfix_str(f"filling {context} tokens")
    plain = filled(model, ids)
    rows = []
    for name in args.methods:
        if (reason := reason_to_leave_out(name, model, args.gguf)) is not None:
            print(f"{name}: left out: {reason}", file=sys.stderr)
            continue
        torch._dynamo.reset()  # graphs of other methods would cost this one their guards
        bar.set_postfix_str(f"{name} at {context} tokens")
        if name in LLAMA_CPP:
            method: Method | TimedLlamaCpp = TimedLlamaCpp(name, args.gguf, ids[0].tolist(), args.warm_up + args.steps)
        else:
            method = prepare(name, model, plain)
        rows.append({"context": context, **measure(method, args.steps, args.warm_up, bar)})
    return rows


def reason_to_leave_out(name: str, model: LlamaForCausalLM, gguf: Path | None) -> str | None:
    """Why a baseline cannot run here; None where it can."""
    if name in LLAMA_CPP:
        return why_no_llama_cpp(gguf)
    return why_not(name, model.config, torch.device("cpu")) if name in QUANTIZED else None


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds a step, and the ratio to Inductor at the same context."""
    inductor = {row["context"]: row["ms"] for row in rows if row["method"] == "Inductor"}
    lines = [
        (
            f"{row['context']:,}", row["method"], f"{row['ms']:.1f}",
            "{0:.1f} to {2:.1f}".format(*row["quartiles"]),
            f"{row['ms'] / inductor[row['context']]:.2f}" if row["context"] in inductor else "",
            f"{row['python_share']:.1%}" if "python_share" in row else "",
            f"{row['kv_ratio']:.3f}" if "kv_ratio" in row else "",
        )
        for row in rows
    ]  # fmt: skip
    headers = ("context", "", "ms a step", "half of the steps", "of Inductor's", "our Python", "device KV")
    return tabulate(lines, headers, colalign=("right", "left", *["right"] * 5), disable_numparse=True)


def libraries() -> dict[str, str]:
    """What is installed of the libraries that other caches come from, and what llama.cpp was built for."""
    found = {name: version(name) for name in ("optimum-quanto", "hqq", LIBRARY) if is_installed(name)}
    return found | ({"llama.cpp": build_info()} if LIBRARY in found else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["uncompiled", "Inductor", *QUANTIZED, *LLAMA_CPP, *SPECACHE]
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8192], help="tokens (1024 4096 8192)")
    parser.add_argument("--model", help="a checkpoint's name or path (default: random weights)")
    parser.add_argument("--layers", type=int, default=12, help="of the random model: 12 are 100 M parameters")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=30, help="measured steps a method and context (default: 30)")
    parser.add_argument("--warm-up", type=int, default=6, help="steps before them (default: 6)")
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/cpu_decode_MODEL_DTYPE.json")
    args = parser.parse_args()
    if args.warm_up < 1:
        parser.error("--warm-up: at least one step, in which the graphs are compiled")
    args.gguf = gguf_of(args.model) if args.model else None
    dtype = getattr(torch, args.dtype)
    args.out = args.out or RESULTS / f"cpu_decode_{args.model or 'random'}_{args.dtype}.json"
    model = load(args.model, "cpu", dtype)[0] if args.model else build(args.layers, dtype)
    rows: list[dict[str, Any]] = []
    try:
        with torch.no_grad(), tqdm(total=len(args.contexts) * len(args.methods) * args.steps, file=sys.stderr) as bar:
            for context in args.contexts:
                rows += run_context(context, model, args, bar)
    except KeyboardInterrupt:
        print("interrupted: the contexts below are finished", file=sys.stderr)
    if rows:
        parameters = sum(p.numel() for p in model.parameters())
        print(table(rows))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        origin = {
            **provenance(torch.device("cpu"), "benchmarks/cpu_decode.py"),
            "model": args.model or f"random, {args.layers} layers", "parameters": parameters, "dtype": args.dtype,
            **libraries(),
        }  # fmt: skip
        report = {"provenance": origin, "rows": rows}
        args.out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\n{parameters / 1e6:.0f} M parameters, {args.dtype}; data: {args.out}")


if __name__ == "__main__":
    main()
