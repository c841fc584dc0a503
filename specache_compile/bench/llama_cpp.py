"""llama.cpp as a baseline for decode steps: the same GGUF file, with flash attention.

llama.cpp computes with the quantised weights of the file. SmolLM2's weights have 5 and 8 bits: about a third of their
bytes in bfloat16, and a fifth of their bytes in float32. Build the library from source: pip install llama-cpp-python.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specache_compile.checkpoints.gguf import is_installed

LIBRARY = "llama-cpp-python"
# The cache's type in ggml's enumeration. On a CPU, ggml's attention uses several threads only with a 16-bit cache.
LLAMA_CPP = {"llama.cpp-f16": "GGML_TYPE_F16", "llama.cpp-q4_0": "GGML_TYPE_Q4_0"}
PARTS = ("key", "value")
TOKEN = 0  # which token is decoded does not change the time


def why_no_llama_cpp(gguf: Path | None) -> str | None:
    """The reason why llama.cpp is unavailable; None if it is available."""
    if gguf is None:
        return "it requires a GGUF file"
    return None if is_installed(LIBRARY) else f"pip install {LIBRARY}"


class LlamaCpp:
    """A llama.cpp model that has prefilled token ids, with room for `more` tokens."""

    def __init__(self, name: str, gguf: Path, ids: list[int], more: int) -> None:
        import llama_cpp

        cache, threads = getattr(llama_cpp, LLAMA_CPP[name]), torch.get_num_threads()
        self.llama = llama_cpp.Llama(
            str(gguf), n_ctx=len(ids) + more, n_threads=threads, n_threads_batch=threads, flash_attn=True,
            type_k=cache, type_v=cache, verbose=False,
        )  # fmt: skip
        self.llama.eval(ids)

        # ggml stores a number of keys and values in two bytes, or 32 numbers in 18 bytes.
        config = self.llama.metadata
        architecture = config["general.architecture"]
        heads, all_heads, width, layers = (
            int(config[f"{architecture}.{key}"])
            for key in ("attention.head_count_kv", "attention.head_count", "embedding_length", "block_count")
        )
        widths = (int(config.get(f"{architecture}.attention.{part}_length", width // all_heads)) for part in PARTS)
        numbers = layers * heads * sum(widths) * (len(ids) + more)
        self.size = round(numbers * (2 if LLAMA_CPP[name] == "GGML_TYPE_F16" else 18 / 32))

    def step(self) -> None:
        """Decode one token."""
        self.llama.eval([TOKEN])

    def bytes(self) -> tuple[int, int]:
        """The computed bytes of the cache on the device and on the host."""
        return self.size, 0
