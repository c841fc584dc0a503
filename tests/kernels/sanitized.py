"""The kernels' tests, with the C++ built with the address and undefined-behaviour sanitizers.

`test_sanitized.py` runs this file in a separate process that preloads the sanitizers' libraries.

    python sanitized.py PYTEST-ARGUMENT...
    python sanitized.py --overrun           a read past a tensor, which must be detected
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch._inductor.codecache import CppCodeCache

from specache_compile.kernels.cpp import library

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def overrun() -> None:
    made = CppCodeCache.load('extern "C" float last(const float* x) { return x[64]; }', extra_flags=SANITIZED)
    made.last(torch.zeros(64).numpy().ctypes)


if __name__ == "__main__":
    if sys.argv[1:] == ["--overrun"]:
        overrun()
    else:
        library.FLAGS = (*library.FLAGS, *SANITIZED)
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
