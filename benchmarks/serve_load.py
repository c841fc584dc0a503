"""Compare servers under random load: `specache serve` with one row and several, and `transformers serve`.

    python benchmarks/serve_load.py --guidellm PATH/TO/guidellm    (half an hour; install guidellm in another venv)

guidellm sends the same prompts at random (Poisson) times. Prompt lengths are log-normal around each of `--tokens`. All
caches have the same device memory, that of `--cache` tokens in 16 bits; specache also has host memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from batching import lengths
from tabulate import tabulate
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from specache_compile.bench.results import Results
from specache_compile.evaluation.run_eval import load

GIB = 1 << 30
HERE = Path(sys.executable).parent
PORT = 8731
ONE, ROWS, TRANSFORMERS = "one at a time", "batched", "transformers serve"
# Tokens of the prompts that `--rate` counts.
COUNTED = 400.0
DIGITS = {"first_token_s": 1, "between_tokens_ms": 0, "request_s": 1}
FIGURES = {
    "first_token_s": ("time_to_first_token_ms", 1e-3),
    "between_tokens_ms": ("inter_token_latency_ms", 1.0),
    "request_s": ("request_latency", 1.0),
}


def write_model(name: str, folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """The checkpoint in 16 bits, as both servers load it. No answer ends early: it has no end token."""
    model, reader = load(name, "cpu", torch.bfloat16)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)
    return model, reader.tokenizer


def write_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, counts: Sequence[int], seed: int) -> list[str]:
    """Random tokens, so many each, as texts that share nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1000, len(tokenizer) - 1000, (count,), generator=generator) for count in counts]
    texts = [tokenizer.decode(one) for one in ids]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return texts


def commands(model: Any, folder: Path, args: argparse.Namespace) -> dict[str, list[str]]:
    config = model.config
    heads, channels = config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    gib = 4 * config.num_hidden_layers * heads * channels * args.cache / GIB
    ours = [
        str(HERE / "specache"), "serve", str(folder), "--port", str(PORT), "--session-device-gib", f"{gib:.4f}",
        "--queue", "512",
    ]  # fmt: skip
    theirs = [
        str(HERE / "transformers"), "serve", str(folder), "--continuous-batching", "--port", str(PORT),
        "--device", "cpu", "--dtype", "bfloat16", "--attn-implementation", "sdpa",
        "--cb-block-size", "256", "--cb-num-blocks", str(args.cache // 256), "--cb-max-batch-tokens", "512",
    ]  # fmt: skip
    return {ONE: [*ours, "--rows", "1"], ROWS: [*ours, "--rows", str(args.rows)], TRANSFORMERS: theirs}


@contextmanager
def serving(command: list[str], log: Path) -> Iterator[None]:
    if answers(PORT):
        raise SystemExit(f"port {PORT} is taken: another server runs there")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as told, subprocess.Popen(command, stdout=told, stderr=told) as process:
        try:
            ends = time.monotonic() + 300
            while not answers(PORT):
                if process.poll() is not None or time.monotonic() > ends:
                    raise SystemExit(f"did not start: {' '.join(command)}\n{log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(port: int) -> bool:
    """Whether a server is up."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    except OSError:
        return False
    return True


def warm(name: str, texts: Sequence[str], answer: int) -> None:
    """Requests that compile what the load runs: some alone, some together."""
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", timeout=900) as client:

        def send(text: str) -> None:
            client.completions.create(model=name, prompt=text, max_tokens=answer, temperature=0)

        send(texts[0])
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(send, texts[1:]))


def loaded(name: str, prompts: Path, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """guidellm's report."""
    with tempfile.TemporaryDirectory() as folder:
        backend = f"kind=openai_http,target=http://127.0.0.1:{PORT},model={name},request_format=/v1/completions"
        subprocess.run(
            [
                args.guidellm, "run", "--disable-console",
                "--backend", f"{backend},max_tokens={args.answer},http2=false",
                "--tokenizer", f"kind=hf_auto,model={name}",
                "--profile", f"kind=poisson,rate={args.rate * COUNTED / tokens}",
                "--data", f"kind=json_file,path={prompts}",
                "--constraint", f"kind=max_requests,count={args.requests}",
                "--output", f"kind=json,path={folder}/report.json",
            ],
            check=True,
        )  # fmt: skip
        return json.loads(Path(folder, "report.json").read_text())


def row_of(server: str, tokens: int, report: dict[str, Any]) -> dict[str, Any]:
    """Of the requests that were answered: tokens a second over the whole load; percentiles of times."""
    (load,) = report["benchmarks"]
    metrics = load["metrics"]
    totals = metrics["request_totals"]
    row = {
        "server": server, "tokens": tokens, "answered": totals["successful"],
        "failed": totals["errored"] + totals["incomplete"],
        "tokens_per_second": metrics["output_tokens_per_second"]["successful"]["mean"],
        "at_once": metrics["request_concurrency"]["successful"]["mean"],
    }  # fmt: skip
    for name, (metric, unit) in FIGURES.items():
        percentiles = metrics[metric]["successful"]["percentiles"]
        row |= {f"{name}_p50": unit * percentiles["p50"], f"{name}_p95": unit * percentiles["p95"]}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds to the first token count from the request, its wait in the queue too."""
    lines = [
        [
            f"{row['tokens']:,}", row["server"], f"{row['answered']} of {row['answered'] + row['failed']}",
            f"{row['tokens_per_second']:.1f}", f"{row['at_once']:.1f}",
            *(f"{row[f'{name}_{of}']:.{digits}f}" for name, digits in DIGITS.items() for of in ("p50", "p95")),
        ]
        for row in sorted(rows, key=lambda row: row["tokens"])
    ]  # fmt: skip
    heads = ["tokens", "server", "answered", "tokens/s", "at once"]
    heads += [f"{told}, {of}" for told in ("first token, s", "between, ms", "answer, s") for of in ("p50", "p95")]
    return tabulate(lines, headers=heads, disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--guidellm", default="guidellm", help="the program (%(default)s, of the path)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[400, 2000], help="prompts' median lengths")
    parser.add_argument("--answer", type=int, default=32, help="tokens said to each (%(default)s)")
    parser.add_argument("--requests", type=int, default=32, help="of a load (%(default)s)")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="a second, of 400 tokens; fewer of longer ones (%(default)s)"
    )
    parser.add_argument("--rows", type=int, default=16, help="answers together, where they are batched (%(default)s)")
    parser.add_argument(
        "--cache", type=int, default=32768, help="tokens in 16 bits, whose bytes a cache has (%(default)s)"
    )
    parser.add_argument("--servers", nargs="+", default=[ONE, ROWS, TRANSFORMERS], choices=[ONE, ROWS, TRANSFORMERS])
    parser.add_argument("--out", type=Path, default=Path("build/serve_load.json"), help="goes on where that file ends")
    args = parser.parse_args()
    if shutil.which(args.guidellm) is None:
        parser.error(
            f"no program {args.guidellm!r}: pip install guidellm, in an environment of its own, and --guidellm"
        )
    settings = {name: getattr(args, name) for name in ("model", "answer", "requests", "rate", "rows", "cache")}
    settings["guidellm"] = subprocess.check_output([args.guidellm, "--version"], text=True).split()[-1]
    results = Results(args.out, "benchmarks/serve_load.py", torch.device("cpu"), resume=True, **settings)
    left = [(s, n) for s in args.servers for n in args.tokens if not results.has(server=s, tokens=n)]
    with tempfile.TemporaryDirectory() as name, tqdm(total=len(left), file=sys.stderr, unit="load") as bar:
        folder = Path(name)
        model, tokenizer = write_model(args.model, folder / "model")
        served = commands(model, folder / "model", args)
        warming = write_prompts(folder / "warm.jsonl", tokenizer, [300, 700, 200, 1100], 1)
        for server in args.servers:
            loads = [tokens for of, tokens in left if of == server]
            if not loads:
                continue
            bar.set_postfix_str(f"{server}, starting")
            with serving(served[server], Path("build", f"{server.replace(' ', '_')}.log")):
                warm(str(folder / "model"), warming, args.answer)
                for tokens in loads:
                    bar.set_postfix_str(f"{server}, {tokens:,} tokens")
                    write_prompts(folder / "load.jsonl", tokenizer, lengths(tokens, args.requests), tokens)
                    report = loaded(str(folder / "model"), folder / "load.jsonl", tokens, args)
                    results.add(row_of(server, tokens, report))
                    bar.update()
    print(table(results.rows))


if __name__ == "__main__":
    main()
