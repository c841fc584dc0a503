"""llama.cpp as a baseline of a decode step: the same GGUF file, its cache in q4_0 under flash attention.

It computes with the file's 4-bit weights, which the other rows have in 16 or 32 bits: less than a third of the bytes
that they read. Its library is built from source (pip install llama-cpp-python), and where it is missing says so.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import torch

LLAMA_CPP = "llama.cpp, 4-bit weights, q4_0 cache"
TOKEN = 0  # which token is decoded does not change the time


def why_no_llama_cpp(gguf: Path | None) -> str | None:
    """Why it cannot run here; None where it can."""
    if gguf is None:
        return "it reads GGUF files alone"
    if importlib.util.find_spec("llama_cpp") is None:
        return "pip install llama-cpp-python"
    return None


class LlamaCpp:
    """A model of llama.cpp's behind a context of token ids, with room for `more` tokens."""

    def __init__(self, gguf: Path, ids: list[int], more: int) -> None:
        from llama_cpp import GGML_TYPE_Q4_0, Llama

        threads = torch.get_num_threads()
        self.llama = Llama(
            str(gguf), n_ctx=len(ids) + more, n_threads=threads, n_threads_batch=threads, flash_attn=True,
            type_k=GGML_TYPE_Q4_0, type_v=GGML_TYPE_Q4_0, verbose=False,
        )  # fmt: skip
        self.llama.eval(ids)

    def step(self) -> float:
        """One decode step; seconds."""
        start = time.perf_counter()
        self.llama.eval([TOKEN])
        return time.perf_counter() - start
