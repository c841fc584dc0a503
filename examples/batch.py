"""Decode requests of different lengths together. A request joins and leaves without recompilation.

python examples/batch.py [MODEL]
"""

from __future__ import annotations

import sys

import specache_compile as sc

PROMPTS = ("The capital of France is", "Two and two is", "Water boils at a temperature of", "The opposite of hot is")


def main(name: str = "smollm2-135m") -> None:
    model, tokenizer = sc.load_model(name)
    model.compile(backend="specache")
    batch = sc.Batch(model, rows=2, host_memory=1 << 30)  # two decode together, the others wait
    requests = [batch.add(tokenizer(prompt).input_ids, max_new_tokens=6 + 2 * i) for i, prompt in enumerate(PROMPTS)]
    while batch.open:
        for request, token in batch.step():  # a token of each running request, as soon as there is one
            print(f"request {requests.index(request)}: {tokenizer.decode([token])!r}")
    for prompt, request in zip(PROMPTS, requests, strict=True):
        print(prompt, tokenizer.decode(request.generated), f"({request.end})")


if __name__ == "__main__":
    main(*sys.argv[1:])
