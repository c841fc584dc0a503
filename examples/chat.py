"""Chat over several turns, with one cache and streamed answers. An empty line ends the chat.

python examples/chat.py [MODEL]
"""

from __future__ import annotations

import sys

from transformers import TextStreamer

import specache_compile as sc


def main(name: str = "smollm2-135m") -> None:
    model, tokenizer = sc.load_model(name)
    model.compile(backend="specache")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    cache, messages = None, list[dict[str, str]]()
    while text := input("> "):
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        # The cache holds all earlier tokens, so only the new message is prefilled.
        output = model.generate(
            **inputs, **sc.with_cache(cache), max_new_tokens=200, streamer=streamer, return_dict_in_generate=True
        )
        cache = sc.cache_of(output)
        answer = tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
