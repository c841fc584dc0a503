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
from specache_compile.kernels import triton_center as center
from specache_compile.kernels import triton_copy as copy
from specache_compile.kernels import triton_decode as decode
from specache_compile.kernels import triton_extend as extend
from specache_compile.kernels import triton_rotate as rotate
from specache_compile.kernels import triton_select as select
from specache_compile.kernels.layout import Layout, rotation_block
from specache_compile.kernels.quantize import value_group

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32)}
# What the arguments are, by name, where it is not a 32-bit integer.
FLOATS = ("scale", "softcap", "limit")
POINTERS = {
    "mask": "*u8", "padding": "*u8", "cursor": "*i64", "slot_index": "*i32", "wanted": "*i32", "traffic": "*i64",
    "tokens": "*i32", "kept_tokens": "*i32", "scores": "*fp32", "kept_scores": "*fp32", "out": "*fp32",
    "partial": "*fp32", "center": "*fp32", "shares": "*fp32", "frequencies": "*fp32", "cosines": "*fp32",
    "sines": "*fp32", "peaks": "*fp32", "totals": "*fp32", "lse": "*fp32", "logits": "*fp16", "codes": "*u8",
}  # fmt: skip
ALIGNED = ("capacity", *(f"{x}_{axis}" for x in "qkvx" for axis in ("batch", "head", "lane", "token", "row")))
MODEL = (
    "q", "k", "v", "x", "turned", "key_params", "value_params", "recent", "slots", "host", "keys", "values", "sinks",
    "new",
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
        cost = per_element(made.asm["ptx"], warps, **constants) if constants.get("key_bits", 16) < 16 else ""
        print(f"{name} {kernel.__name__:16} {label:40} {size:7,} bytes, {made.metadata.shared:6,} shared{cost}")


def per_element(ptx: str, warps: int, group: int, d: int, KEYS: bool = True, VALUES: bool = True, **_: Any) -> str:
    """Instructions a stored number in the low-bit tier's loop, one turn of which is `group` keys and values, or those
    of a half.

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
    elements = (KEYS + VALUES) * group * d / (32 * warps)
    unpacking = sum(loop[name] for name in ("shr", "shl", "and", "prmt", "cvt"))
    return f", {loop.total() / elements:.1f} instructions an element, {unpacking / elements:.1f} to unpack"


def build_attention(
    label: str, dtype: str, key_bits: int, value_bits: int, d: int, group: int, types: dict[str, str] | None = None,
    **changes: Any,
) -> None:  # fmt: skip
    """`attend_tiers` as `triton_decode.attend` launches it, two lanes of four query heads, but for `changes`."""
    layout = Layout(key_bits, value_bits, rotate=False)
    gv = value_group(d, group) if layout.is_quantised else d
    key_width, value_width = layout.widths(d)
    span = math.gcd(value_width, gv)
    codes = "*i16" if key_width % 2 == span % 2 == 0 else "*u8"
    constants = {
        "d": d, "key_bits": key_bits, "value_bits": value_bits, "group": group, "value_group": gv, "window": 64 + group,
        "top_k": 64, "lanes": 2, "queries": 4, "stored": 1, "KEYS": True, "VALUES": True, "ROTATED": False,
        "CENTERED": False, "UNBIASED": False, "MASK": 1, "CAP": False, "ROWS": decode.FEWEST_ROWS,
        "CHANNELS": next_power_of_2(d), "SPAN": span, "EXACT": decode.EXACT_BLOCK, "m_token": 1,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    build(
        decode.attend_tiers, label, dtype, warps=decode.WARPS,
        types={"codes": codes if layout.is_quantised else f"*{dtype}", **(types or {})}, **constants | changes,
    )  # fmt: skip


def build_quantiser(label: str, dtype: str, key_bits: int, value_bits: int, d: int, group: int, rotated: bool) -> None:
    gv = value_group(d, group)
    key_plane, value_plane = (next_power_of_2(width) for width in Layout(key_bits, value_bits, rotated).widths(d))
    build(
        append.quantize_groups, label, dtype, warps=8 if group * d >= 128 * 128 else 4, d=d, window=64 + group,
        group=group, value_group=gv, key_bits=key_bits, value_bits=value_bits, midpoint=True, PADDED=True,
        ROTATED=rotated, KEY_PLANE=key_plane, VALUE_PLANE=value_plane, VALUE_GROUP=next_power_of_2(gv),
    )  # fmt: skip


def main() -> None:
    for dtype, bits, d, group in [
        ("bf16", 2, 128, 64), ("bf16", 1, 128, 64), ("fp16", 4, 128, 32), ("bf16", 8, 96, 128), ("bf16", 1, 80, 32),
        ("bf16", 2, 256, 64), ("fp32", 2, 64, 32), ("bf16", 16, 128, 32),
    ]:  # fmt: skip
        label = f"{dtype}, {bits} bits, d {d}, g {group}"
        build_attention(label, dtype, bits, bits, d, group)
        if bits == 16:
            build(append.copy_groups, label, dtype, types={"codes": f"*{dtype}"}, d=d, window=64 + group, group=group,
                  CHANNELS=next_power_of_2(d))  # fmt: skip
        else:
            build_quantiser(label, dtype, bits, bits, d, group, rotated=False)
    for key_bits, value_bits in [(2, 1), (1, 2), (4, 1)]:
        label = f"bf16, {key_bits} and {value_bits} bits, d 128, g 64"
        build_attention(label, "bf16", key_bits, value_bits, 128, 64)
        build_quantiser(label, "bf16", key_bits, value_bits, 128, 64, rotated=True)
    build_attention("rotated", "bf16", 2, 2, 128, 64, ROTATED=True)
    build_attention("centered", "bf16", 2, 2, 128, 64, CENTERED=True, UNBIASED=True)
    for bits, group in [(2, 64), (16, decode.PLAIN_BLOCK)]:
        half = {"dtype": "bf16", "key_bits": bits, "value_bits": bits, "d": 128, "group": group, "stored": 2}
        types = {"logits": "*fp32"}
        unused = {**types, "slot_index": "*i64"}  # the cursor stands for what is not read
        build_attention(f"{bits} bits, to logits", types=unused, top_k=0, VALUES=False, ROTATED=bits < 16, **half)
        build_attention(f"{bits} bits, from logits", types=types, KEYS=False, **half)
    build_attention("softcap, additive mask", "bf16", 2, 2, 128, 64, {"mask": "*bf16"}, queries=8, ROWS=16, window=128,
                    MASK=2, CAP=True)  # fmt: skip
    build(center.find_center, "bf16, d 128", d=128, turning=64, window=128, PADDED=True, CHANNELS=128,
          BLOCK=center.TOKEN_BLOCK)  # fmt: skip
    build(center.add_shares, "bf16, d 128", d=128, group=64, lanes=2, queries=4, ROWS=8, CHANNELS=center.CHANNEL_BLOCK)
    build(append.write_recent, "bf16, d 128", d=128, window=128, BLOCK=append.RING_BLOCK, CHANNELS=128)
    for d in (96, 256):
        block = rotation_block(d)
        for turned, centered in ((True, False), (True, True), (False, True)):
            build(append.rotate_groups, f"bf16, d {d}, turned {turned}, centered {centered}", d=d, window=128, group=64,
                  room=64, block=block, TURNED=turned, CENTERED=centered, BLOCK=append.ROTATED_BLOCK)  # fmt: skip
        build(rotate.rotate_rows, f"bf16, d {d}", types={"out": "*bf16"}, rows=2, d=d, block=block,
              ROWS=rotate.ROW_BLOCK)  # fmt: skip
    for label, d, stored, changes in [
        ("sinks", 128, 1, {}), ("rotated, d 128", 128, 1, {"TURNED": 128}), ("rotated, d 96", 96, 0, {"TURNED": 32}),
        ("log-sum-exp alone", 128, 2, {"VALUES": False}),
    ]:  # fmt: skip
        constants = {"VALUES": True, "TURNED": 1, "SINKS": True, "ROWS": 16, "PARTS": 8, "CHANNELS": 128, **changes}
        build(decode.merge_splits, label, types={"out": "*bf16"}, d=d, lanes=2, queries=4, stored=stored, **constants)
    for stored, kind in ((1, "*fp16"), (2, "*fp32")):
        build(decode.score_tokens, f"4 queries, {stored} of 2 lanes", types={"logits": kind}, lanes=2, queries=4,
              stored=stored, MASK=1, BLOCK=decode.SCORE_BLOCK)  # fmt: skip
    for label, constants in [
        ("4,096 of many", {"FIRST": True, "LAST": False, "LOW_BIT_ALONE": True}),
        ("the last round", {"FIRST": False, "LAST": True, "LOW_BIT_ALONE": False}),
    ]:
        build(select.keep_best, label, warps=8, types={"wanted": "i32"}, **constants, BLOCK=select.TILE)
    build(copy.fetch_missing, "k 64, d 128", warps=8, pair=256, WANTED=64, CHUNK=copy.CHUNK, COLUMNS=256)
    build(copy.write_host, "d 128", d=128, BLOCK=16, CHANNELS=128)
    for d in (128, 256):
        build(
            extend.attend_block, f"bf16, d {d}", d=d, CAUSAL=True, MASK=0, CAP=False, ROWS=extend.QUERY_BLOCK,
            KEYS=extend.KEY_BLOCK, CHANNELS=d, PRECISION="tf32",
        )  # fmt: skip


if __name__ == "__main__":
    main()
