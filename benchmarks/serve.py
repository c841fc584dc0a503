"""Seconds to the first token of a conversation's second turn on a server, compared with the first turn.

    python benchmarks/serve.py    (16,384 tokens; --tokens 1024 --layers 4: a minute on two cores)

The model has SmolLM2-135M's shape and random weights. OpenAI's client measures from the request to the first piece of
text. The first conversation, which compiles, does not count. A second turn adds 64 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai
import torch
from tabulate import tabulate
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specache_compile.bench.results import provenance
from specache_compile.cli import options_of, parsed
from specache_compile.serving.serve import running

SMOLLM2 = {
    "vocab_size": 128, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "rope_theta": 100_000.0, "max_position_embeddings": 65_536, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
# Whose tokenizer has a token for each byte.
BYTES = Path(__file__).parent.parent / "examples" / "needle-llama"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
QUESTION = 64
ANSWER = 16


def random_model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMOLLM2, num_hidden_layers=layers))


def write_checkpoint(model: LlamaForCausalLM, folder: Path) -> None:
    """A model of ASCII characters, whose answers read back as the tokens that they were."""
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(BYTES)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def text(characters: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters + " ", k=characters))


def first_token(client: openai.OpenAI, model: str, messages: list[Any]) -> tuple[float, str]:
    """Seconds to the first piece of an answer, and the whole answer."""
    begun, seconds, answer = time.perf_counter(), 0.0, ""
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=ANSWER, temperature=0, stream=True
    ):
        piece = chunk.choices[0].delta.content or ""
        seconds = seconds or (time.perf_counter() - begun if piece else 0.0)
        answer += piece
    return seconds, answer


def conversation(client: openai.OpenAI, model: str, tokens: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token of a conversation's first turn, and of its second."""
    messages = [{"role": "user", "content": text(tokens, seed)}]
    cold, answer = first_token(client, model, messages)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text(QUESTION, seed + 1)}]
    return cold, first_token(client, model, messages)[0]


def main(arguments: list[str] | None = None) -> int:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--model", help="a checkpoint's name or path, with a chat template, in place of random weights")
    told.add_argument("--tokens", type=int, default=16_384, help="of context: its characters, as --model has them")
    told.add_argument("--layers", type=int, default=30, help="of the random model (%(default)s)")
    told.add_argument("--repeats", type=int, default=3, help="conversations that are counted (%(default)s)")
    told.add_argument("--lowering", choices=("inductor", "eager"), default="inductor", help="(%(default)s)")
    told.add_argument("--out", type=Path, default=Path("build/serve.json"), help="(%(default)s)")
    args = told.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            write_checkpoint(random_model(args.layers), Path(folder))
        model = args.model or folder
        served = parsed(["serve", model, "--port", "0", "--lowering", args.lowering])
        with running(served, options_of(served)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            conversations = tqdm(range(0, 2 + 2 * args.repeats, 2), "conversations", file=sys.stderr)
            _, *counted = [conversation(client, model, args.tokens, seed) for seed in conversations]
    cold, second = (statistics.median(turn) for turn in zip(*counted, strict=True))
    rows = {
        "tokens of context": args.tokens,
        "conversations": args.repeats,
        "first turn: seconds to the first token, median": round(cold, 3),
        "second turn: seconds to the first token, median": round(second, 3),
        "share": round(second / cold, 4),
    }
    print(tabulate(rows.items()))
    report = {"provenance": provenance(torch.device("cpu"), "benchmarks/serve.py"), **rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
