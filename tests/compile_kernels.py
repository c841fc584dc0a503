"""Compile every Triton kernel for sm_80 and sm_90; no GPU is needed.

Prints a line for each: its sizes and, for the low-bit tier's attention, the PTX instructions that its loop spends on
one stored number (a channel of a key or a value), those that unpack it (shift, mask, convert) beside. Pointers and the
strides of pairs are taken to be multiples of 16, and the mask to be contiguous, as a launch finds them.

    python tests/compile_kernels.py
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

from triton import compile as compile_kernel
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specache_compile.kernels import triton_append as append
from specache_compile.kernels import triton_copy as copy
from specache_compile.kernels import triton_decode as decode
from specache_compile.kernels import triton_extend as extend
from specache_compile.kernels import triton_select as select

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32)}
# What the arguments are, by name, where it is not a 32-bit integer.
FLOATS = ("scale", "softcap", "limit")
POINTERS = {
    "mask": "*u8", "padding": "*u8", "cursor": "*i64", "slot_index": "*i32", "wanted": "*i32", "traffic": "*i64",
    "tokens": "*i32", "kept_tokens": "*i32", "scores": "*fp32", "kept_scores": "*fp32", "out": "*fp32",
    "partial": "*fp32", "peaks": "*fp32", "totals": "*fp32", "lse": "*fp32", "logits": "*fp16", "logits_out": "*fp16",
    "codes": "*u8",
}  # fmt: skip
ALIGNED = ("capacity", *(f"{x}_{axis}" for x in "qkv" for axis in ("batch", "head", "lane", "token")))
MODEL = (
    "q", "k", "v", "key_params", "value_params", "recent", "slots", "host", "keys", "values", "sinks", "new",
)  # fmt: skip


def build(
    kernel: Any, label: str, dtype: str = "bf16", warps: int = 4, types: dict[str, str] | None = None, **constants: Any
) -> None:
    """Compile one kernel for all targets with these constants; every other argument gets its type by its name."""
    known = {**POINTERS, **dict.fromkeys(MODEL, f"*{dtype}"), **dict.fromkeys(FLOATS, "fp32"), **(types or {})}
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name in ALIGNED]
    hints = {(i,): [["tt.divisibility", 16]] for i in aligned}
    for name, target in TARGETS.items():
        made = compile_kernel(ASTSource(kernel, signature, places, hints), target=target, options={"num_warps": warps})
        size = len(made.asm["cubin"])
        cost = per_element(made.asm["ptx"], warps, **constants) if constants.get("bits", 16) < 16 else ""
        print(f"{name} {kernel.__name__:16} {label:40} {size:7,} bytes, {made.metadata.shared:6,} shared{cost}")


def per_element(ptx: str, warps: int, group: int, d: int, **_: Any) -> str:
    """Instructions a stored number in the low-bit tier's loop, one turn of which is `group` keys and values.

    All that stands between the loop's label and the jump back to it counts, what a turn may skip included; so do moves
    that cost nothing once registers are assigned.
    """
    source = re.search(r'\.file\s+(\d+) .*triton_low_bit\.py"', ptx)
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L")}
    loops = [
        "\n".join(lines[labels[label] : at + 1])
        for at, line in enumerate(lines)
        for label in re.findall(r"\sbra\S*\s+(\$L\w+)", line)
        if labels[label] < at
    ]
    if not source or not loops:
        return ""
    body = max(loops, key=lambda loop: len(re.findall(rf"\.loc\s+{source[1]} ", loop)))
    loop = Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z]\w*)", body, re.M))
    elements = 2 * group * d / (32 * warps)
    unpacking = sum(loop[name] for name in ("shr", "shl", "and", "prmt", "cvt"))
    return f", {loop.total() / elements:.1f} instructions an element, {unpacking / elements:.1f} to unpack"


def main() -> None:
    for dtype, bits, d, group in [
        ("bf16", 2, 128, 64), ("bf16", 1, 128, 64), ("fp16", 4, 128, 32), ("bf16", 8, 96, 128), ("bf16", 1, 80, 32),
        ("bf16", 2, 256, 64), ("fp32", 2, 64, 32), ("bf16", 16, 128, 32),
    ]:  # fmt: skip
        width = d if bits == 16 else d * bits // 8
        value_group = d if bits == 16 else next(size for size in range(min(d, group), 0, -1) if d % size == 0)
        shape = {"d": d, "window": 64 + group, "group": group}
        label = f"{dtype}, {bits} bits, d {d}, g {group}"
        build(
            decode.attend_tiers, label, dtype, warps=decode.WARPS,
            types={"codes": f"*{dtype}" if bits == 16 else "*i16"}, **shape, bits=bits, value_group=value_group,
            m_token=1, top_k=64, lanes=2, queries=4, MASK=1, CAP=False, ROWS=decode.FEWEST_ROWS,
            CHANNELS=next_power_of_2(d), SPAN=d if bits == 16 else math.gcd(width, value_group),
            EXACT=decode.EXACT_BLOCK, PRECISION="ieee" if dtype == "fp32" else "tf32",
        )  # fmt: skip
        if bits == 16:
            build(append.copy_groups, label, dtype, types={"codes": f"*{dtype}"}, **shape, CHANNELS=next_power_of_2(d))
        else:
            build(
                append.quantize_groups, label, dtype, warps=8 if group * d >= 128 * 128 else 4, **shape, bits=bits,
                value_group=value_group, midpoint=bits == 1, PADDED=True, PLANE=next_power_of_2(width),
                VALUE_GROUP=next_power_of_2(value_group),
            )  # fmt: skip
    build(append.write_recent, "bf16, d 128", d=128, window=128, BLOCK=append.RING_BLOCK, CHANNELS=128)
    build(decode.attend_tiers, "softcap, additive mask", warps=decode.WARPS, types={"mask": "*bf16", "codes": "*i16"},
          d=128, window=128, group=64, bits=2, value_group=64, top_k=64, lanes=2, queries=8, MASK=2, CAP=True, ROWS=16,
          CHANNELS=128, SPAN=32, EXACT=decode.EXACT_BLOCK, PRECISION="tf32")  # fmt: skip
    build(
        decode.merge_splits,
        "sinks",
        types={"out": "*bf16"},
        d=128,
        lanes=2,
        queries=4,
        SINKS=True,
        ROWS=16,
        PARTS=8,
        CHANNELS=128,
    )
    build(decode.score_tokens, "4 queries", lanes=2, queries=4, MASK=1, BLOCK=decode.SCORE_BLOCK)
    build(
        select.keep_best, "4,096 of many", warps=8, types={"wanted": "i32"}, FIRST=True, LAST=False, BLOCK=select.TILE
    )
    build(
        select.keep_best, "the last round", warps=8, types={"wanted": "i32"}, FIRST=False, LAST=True, BLOCK=select.TILE
    )
    build(copy.fetch_missing, "k 64, d 128", warps=8, pair=256, WANTED=64, CHUNK=copy.CHUNK, COLUMNS=256)
    build(copy.write_host, "d 128", d=128, BLOCK=16, CHANNELS=128)
    for d in (128, 256):
        build(
            extend.attend_block, f"bf16, d {d}", d=d, CAUSAL=True, MASK=0, CAP=False, ROWS=extend.QUERY_BLOCK,
            KEYS=extend.KEY_BLOCK, CHANNELS=d, PRECISION="tf32",
        )  # fmt: skip


if __name__ == "__main__":
    main()
