"""llama.cpp as a baseline of a decode step: the same GGUF file, under flash attention.

llama.cpp computes with the file's own weights. SmolLM2's have 5 and 8 bits: about a third of the bytes that the other
rows read in bfloat16, a fifth of those in float32. The library is built from source: pip install llama-cpp-python.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specache_compile.checkpoints.gguf import is_installed

LIBRARY = "llama-cpp-python"
# The cache's type, by its name in ggml's enumeration. On a CPU ggml's attention shares a token's work among threads
# only with a 16-bit cache.
LLAMA_CPP = {"llama.cpp-f16": "GGML_TYPE_F16", "llama.cpp-q4_0": "GGML_TYPE_Q4_0"}
PARTS = ("key", "value")
TOKEN = 0  # which token is decoded does not change the time


def why_no_llama_cpp(gguf: Path | None) -> str | None:
    """Why llama.cpp cannot run here; None where it can."""
    if gguf is None:
        return "it reads GGUF files alone"
    return None if is_installed(LIBRARY) else f"pip install {LIBRARY}"


class LlamaCpp:
    """A llama.cpp model that has read a context of token ids, with room for `more` tokens."""

    def __init__(self, name: str, gguf: Path, ids: list[int], more: int) -> None:
        import llama_cpp

        cache, threads = getattr(llama_cpp, LLAMA_CPP[name]), torch.get_num_threads()
        self.llama = llama_cpp.Llama(
            str(gguf), n_ctx=len(ids) + more, n_threads=threads, n_threads_batch=threads, flash_attn=True,
            type_k=cache, type_v=cache, verbose=False,
        )  # fmt: skip
        self.llama.eval(ids)

        # ggml keeps keys and values in two bytes a number, or in 18 bytes for 32 numbers.
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
        """One decode step."""
        self.llama.eval([TOKEN])

    def bytes(self) -> tuple[int, int]:
        """The cache's bytes, computed; none are on the host."""
        return self.size, 0
