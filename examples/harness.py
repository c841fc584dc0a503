"""Run EleutherAI's lm-evaluation-harness on a compiled model: `pip install 'specache-compile[harness]'`.

    python examples/harness.py                                    the needle model, full cache and 1-bit SpeCache
    python examples/harness.py --model PATH --tasks hellaswag     another checkpoint and tasks of the harness

Only `lm.model.compile(backend="specache", ...)` differs between the two columns.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from needle_samples import sample
from specache_compile.checkpoints.loaded import tokenizer_of
from specache_compile.checkpoints.names import print_origin, resolved
from specache_compile.evaluation.tasks.haystack import library_source
from specache_compile.evaluation.tasks.needle import KEY_DIGITS
from specache_compile.options import number_or_word

HERE = Path(__file__).parent


def tokenizer_for(path: str) -> Any:
    """A checkpoint's tokenizer with an end and a padding token, which the harness requires.

    The needle model's tokenizer has neither, so byte 0, which no text contains, is both.
    """
    tokenizer = tokenizer_of(path)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def pass_keys(folder: Path, length: int, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Two tasks over one local file: generate the key, and select it from four keys by likelihood."""
    source, rng = library_source(held_out=True), random.Random(seed)
    records = []
    for i in range(count):
        one = sample(source, length - KEY_DIGITS, i / max(1, count - 1), rng)
        others = ["".join(rng.choice("0123456789") for _ in range(KEY_DIGITS)) for _ in range(3)]
        prompt, answer = one.prompt.decode(errors="replace"), one.answer.decode()
        records.append({"prompt": prompt, "answer": answer, "choices": [answer, *others]})
    path = folder / "pass_keys.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(folder)},
        "test_split": "test", "doc_to_text": "{{prompt}}", "target_delimiter": "",
    }  # fmt: skip
    return [
        {
            **common, "task": "pass_key_generate", "output_type": "generate_until", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": KEY_DIGITS, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
        {
            **common, "task": "pass_key_choose", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ]  # fmt: skip


def harnessed(path: str, tokenizer: Any, options: dict[str, Any] | None = None, device: str = "cpu") -> Any:
    """A checkpoint as the harness holds it; compiled with `options`, or None: as it is."""
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=path, tokenizer=tokenizer, batch_size=1, device=device)
    if options is not None:
        lm.model.compile(backend="specache", options=options)
    return lm


def evaluate(lm: Any, tasks: list[Any], limit: int | None = None) -> dict[str, float]:
    """The harness's figure for each task (its first metric)."""
    from lm_eval import simple_evaluate

    found = simple_evaluate(model=lm, tasks=tasks, limit=limit, bootstrap_iters=0)
    return {
        name: next(value for key, value in metrics.items() if "," in key and "stderr" not in key)
        for name, metrics in found["results"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "needle-llama"), help="checkpoint (default: the shipped one)")
    parser.add_argument("--tasks", nargs="+", help="the harness's own tasks (default: pass keys made here)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a pass-key prompt (default: 1024)")
    parser.add_argument("--samples", type=int, default=20, help="questions a task (default: 20)")
    parser.add_argument("--bits", type=int, default=1)
    parser.add_argument("--top-k", type=number_or_word, default="auto")
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default, help=f"(default here: {default})")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*")
    path = resolved(args.model)
    print_origin(args.model)
    tokenizer = tokenizer_for(path)
    options = {"bits": args.bits, "top_k": args.top_k, "lowering": args.lowering}
    with tempfile.TemporaryDirectory() as folder:
        tasks = args.tasks or pass_keys(Path(folder), args.length, args.samples)
        full = evaluate(harnessed(str(path), tokenizer, None, args.device), tasks, args.samples)
        ours = evaluate(harnessed(str(path), tokenizer, options, args.device), tasks, args.samples)
    print(tabulate([(name, full[name], ours[name]) for name in full], ("task", "full cache", "specache")))


if __name__ == "__main__":
    main()
