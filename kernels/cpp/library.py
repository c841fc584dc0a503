"""The C++ kernels, compiled on first use by Inductor's toolchain and stored in Inductor's cache."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.codecache import CppCodeCache
from torch._inductor.cpp_builder import get_cpp_compiler, is_gcc
from torch._inductor.exc import InvalidCxxCompiler

# Inductor disables these for its kernels, which it vectorises itself. They allow reordering sums, and keep infinities.
FLAGS = (
    *(("-ftree-loop-vectorize",) if is_gcc() else ()),
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
    "-ffp-contract=fast",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-math-errno",
)
# The dtypes that tensors may have, and the name of each in C++; each library has a build for each dtype.
DTYPES = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "Float16"}

# The fields of a step's attention in C++ and Python. T: the pairs' dtype. Shapes: `attention_ops.decode_attention`.
# cursor: [B, 3 + pages]; pages: length of a row's table.
# dim: stored channels D of a low-bit key or value (`records.py`).
# shares: `center.share_of_center` [B, H, Hq/H, lanes, n] for the fullest row's low-bit tier.
# share_tokens: number of tokens with one share.
# scores: scores of all lanes, or of the last lane.
# row_width: elements of a token's codes, on average over a record.
# param_bits: bits of a scale, 8 or those of T (`params.py`).
# key_trellis, value_trellis: 1 for a trellis code, else 0.
# skip_below: records of smaller weights are skipped.
# rotation: channels that are rotated together; 0 without rotation.
# bias_strides: strides of [B, H, Hq/H, lanes, column].
POINTERS = {
    "q": "T", "k": "T", "v": "T", "bias": "float", "sinks": "float", "codes": "void",
    "key_params": "void", "value_params": "void", "recent": "T", "slots": "T",
    "slot_index": "int32_t", "cursor": "int64_t", "shares": "float", "sink_pairs": "T", "sink_index": "int32_t",
}  # fmt: skip
RESULTS = {"logits": "float", "scores": "float", "out": "T"}
SIZES = (
    "batch", "heads", "group_heads", "lanes", "d", "capacity", "row_width", "group", "channels", "window",
    "top_k", "sink_tokens", "key_bits", "value_bits", "param_bits", "key_trellis", "value_trellis",
    "rotation", "share_tokens", "pages", "dim",
)  # fmt: skip
STRIDES = 5


class StepArguments(Structure):
    """The arguments of the C++ kernels, by address: the caller must keep the tensors alive."""

    _fields_ = (
        *((name, c_void_p) for name in (*POINTERS, *RESULTS)),
        *((name, c_int64) for name in SIZES),
        ("bias_strides", c_int64 * STRIDES),
        ("scale", c_float),
        ("softcap", c_float),
        ("skip_below", c_float),
    )


def declaration() -> str:
    """Return the C++ declaration of `StepArguments`."""
    lines = [
        "struct StepArguments {",
        *(f"  const {kind.replace('T', 'void')}* {name};" for name, kind in POINTERS.items()),
        *(f"  {kind.replace('T', 'void')}* {name};" for name, kind in RESULTS.items()),
        *(f"  int64_t {name};" for name in SIZES),
        f"  int64_t bias_strides[{STRIDES}];",
        "  float scale, softcap, skip_below;",
        "};",
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def decode_library(dtype: torch.dtype) -> CDLL:
    """Return cpp_decode.cpp, compiled for pairs of this dtype."""
    functions = {name: [POINTER(StepArguments)] for name in ("decode_attention", "score_low_bit", "attend_scored")}
    return compiled(
        (
            "cpp/cpp_tiles.h", "codes/cpp_codes.h", "attention/cpp_fragments.h", "attention/cpp_exact.h",
            "attention/cpp_attention.h", "attention/cpp_decode.cpp",
        ),
        functions,
        dtype,
        declaration(),
    )  # fmt: skip


@functools.cache
def tiers_library(dtype: torch.dtype = torch.float32) -> CDLL:
    """Return cpp_tiers.cpp for pairs of any dtype; a rounded host tier requires the pairs' dtype."""
    pointer, number = c_void_p, c_int64
    return compiled(("movement/cpp_tiers.cpp",), {
        "select_topk": [pointer, *[number] * 4, pointer],
        "refill": [*[pointer] * 5, *[number] * 6, pointer],
        "write_pairs": [*[pointer] * 4, *[number] * 8],
    }, dtype)  # fmt: skip


@functools.cache
def trellis_library() -> CDLL:
    """Return cpp_trellis.cpp, for float32."""
    pointer, number = c_void_p, c_int64
    return compiled(("codes/cpp_trellis.cpp",), {"encode": [pointer, number, number, pointer]})


@functools.cache
def has_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def compiled(
    names: Sequence[str], functions: dict[str, list[Any]], dtype: torch.dtype = torch.float32, before: str = ""
) -> CDLL:
    """Compile these C++ files of kernels/, concatenated, with Inductor's C++ compiler."""
    here = Path(__file__).parents[1]
    files = [(here / name).read_text("utf-8") for name in ("cpp/cpp_vectors.h", *names)]
    text = "".join((f"#define DTYPE {DTYPES[dtype]}\n", files[0], before, *files[1:]))
    library: Any = CppCodeCache.load(text, extra_flags=FLAGS)
    for function, arguments in functions.items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = None
    return library  # type: ignore[no-any-return]


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
