"""Generate from a compiled model and compare the bytes of its cache.

python examples/generate.py [MODEL]        a hub name or a folder; SmolLM2-135M by default
"""

from __future__ import annotations

import sys

import specache_compile as sc


def main(name: str = "smollm2-135m") -> None:
    model, tokenizer = sc.load_model(name)
    model.compile(backend="specache", options={"bits": 1.5, "top_k": 64})
    text = "The grass is green. " * 100 + "The pass key is 71432. What is the pass key? The pass key is"
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
    stats = sc.stats(model)
    print(f"on the device: {stats.kv_ratio:.3f} of a 16-bit cache's bytes, {stats.bytes_by_tier}")


if __name__ == "__main__":
    main(*sys.argv[1:])
