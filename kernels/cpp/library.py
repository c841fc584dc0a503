"""The C++ kernels, compiled on first use by Inductor's toolchain and stored in Inductor's cache."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from ctypes import CDLL, Structure, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch._inductor.codecache import CppCodeCache
from torch._inductor.cpp_builder import get_cpp_compiler, is_gcc
from torch._inductor.exc import InvalidCxxCompiler

# Inductor disables these for its kernels, which it vectorises itself. They allow reordering sums, and keep infinities.
# Without alignment the speed of a loop varies by 5 % with the code before it.
FLAGS = (
    *(("-ftree-loop-vectorize", "-falign-functions=64", "-falign-loops=64") if is_gcc() else ()),
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
    "-ffp-contract=fast",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-math-errno",
)
# The dtypes that pairs may have in the C++ kernels, and the name of each there, in the order of `with_dtype`.
DTYPES = {torch.float32: "float", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half"}

# The fields of a step's attention in C++ and Python. Shapes: `attention_ops.decode_attention`. The pairs, `q` and `out`
# have the pairs' dtype.
# cursor: [B, 3 + pages]; pages: length of a row's table.
# dim: stored channels D of a low-bit key or value (`records.py`).
# shares: `center.share_of_center` [B, H, Hq/H, lanes, n] for the fullest row's low-bit tier.
# share_tokens: number of tokens with one share.
# scores: scores of all lanes, or of the last lane.
# row_width: elements of a token's codes, on average over a record.
# param_bits: bits of a scale, 8 or those of the pairs' dtype (`params.py`).
# key_trellis, value_trellis: 1 for a trellis code, else 0.
# skip_below: records of smaller weights are skipped.
# rotation: channels that are rotated together; 0 without rotation.
FIELDS = {
    "const void*": (
        "q", "k", "v", "codes", "key_params", "value_params", "recent", "slots", "sink_pairs",
    ),
    "const float*": ("bias", "sinks", "shares"),
    "const int32_t*": ("slot_index", "sink_index"),
    "const int64_t*": ("cursor",),
    "void*": ("out",),
    "float*": ("logits", "scores"),
    "int64_t": (
        "batch", "heads", "group_heads", "lanes", "d", "capacity", "row_width", "group", "channels", "window",
        "top_k", "sink_tokens", "key_bits", "value_bits", "param_bits", "key_trellis", "value_trellis",
        "rotation", "share_tokens", "pages", "dim",
    ),
    "float": ("scale", "softcap", "skip_below"),
}  # fmt: skip
NUMBERS: dict[str, Any] = {"int64_t": c_int64, "float": c_float}
# bias_strides: strides of [B, H, Hq/H, lanes, column].
STRIDES = 5


class StepArguments(Structure):
    """The arguments of the C++ kernels, by address: the caller must keep the tensors alive."""

    _fields_ = (
        *((name, NUMBERS.get(kind, c_void_p)) for kind, names in FIELDS.items() for name in names),
        ("bias_strides", c_int64 * STRIDES),
    )


def declaration() -> str:
    """Return the C++ declaration of `StepArguments`."""
    fields = "".join(f"  {kind} {name};\n" for kind, names in FIELDS.items() for name in names)
    return f"struct StepArguments {{\n{fields}  int64_t bias_strides[{STRIDES}];\n}};\n"


@functools.cache
def decode_library(dtype: torch.dtype) -> Any:
    """Return cpp_decode.cpp, compiled for pairs of this dtype; None for a dtype that it does not support."""
    if dtype not in DTYPES:
        return None
    names = (
        "cpp/cpp_math.h", "codes/cpp_codes.h", "attention/cpp_fragments.h", "attention/cpp_exact.h",
        "attention/cpp_attention.h", "attention/cpp_decode.cpp",
    )  # fmt: skip
    return compiled(names, f"typedef {DTYPES[dtype]} T;\n{declaration()}")


@functools.cache
def tiers_library() -> CDLL:
    """Return cpp_tiers.cpp and cpp_trellis.cpp, for all dtypes."""
    library, pointer, number = compiled(("codes/cpp_trellis.cpp", "movement/cpp_tiers.cpp")), c_void_p, c_int64
    library.quantize.argtypes = [pointer, *[number] * 3, *[pointer] * 3]
    library.select_topk.argtypes = [pointer, *[number] * 3, pointer, *[number] * 2, pointer]
    library.refill.argtypes = [*[pointer] * 5, *[number] * 7, pointer]
    library.write_pairs.argtypes = [*[pointer] * 4, *[number] * 8]
    return library


@functools.cache
def has_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def compiled(names: Sequence[str], before: str = "") -> CDLL:
    """Compile these C++ files of kernels/, concatenated, with Inductor's C++ compiler.

    before: code before the files, which may use the types of cpp_vectors.h.
    """
    here = Path(__file__).parents[1]
    first, *files = ((here / name).read_text("utf-8") for name in ("cpp/cpp_vectors.h", *names))
    return CppCodeCache.load("".join((first, before, *files)), extra_flags=FLAGS)
