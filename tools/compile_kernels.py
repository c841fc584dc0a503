"""Compile every Triton kernel for sm_80 and sm_90 without a GPU, and print its registers, spills and shared memory.

    python tools/compile_kernels.py    (two minutes; --for=89,100,120: other devices; --only='1 bits': some shapes)

For low-bit attention it also prints the instructions (SASS) per stored number and the synchronous loads of the loop.
Exit status 1: a kernel exceeds the shared memory of a supported GPU.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton import compile as compile_kernel
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from specache_compile.kernels.attention import triton_decode as decode
from specache_compile.kernels.attention import triton_extend as extend
from specache_compile.kernels.attention import triton_scored as scored
from specache_compile.kernels.attention.kept_logits import LOGIT_BLOCK
from specache_compile.kernels.codes.quantize import value_group
from specache_compile.kernels.codes.trellis import circle_of
from specache_compile.kernels.movement import triton_append as append
from specache_compile.kernels.movement import triton_copy as copy
from specache_compile.kernels.movement import triton_select as select
from specache_compile.kernels.state import triton_center as center
from specache_compile.kernels.state import triton_rotate as rotate
from specache_compile.kernels.state.center import ROWS as CENTER_ROWS
from specache_compile.kernels.state.center import STEPPED
from specache_compile.kernels.state.layout import Layout, rotation_block
from specache_compile.kernels.state.stored_pairs import rounded_width
from specache_compile.kernels.state.stored_tiers import StoredTiers
from specache_compile.methods.field import LayerShape
from specache_compile.methods.low_bit import APPENDED
from specache_compile.methods.specache import SpecacheOptions
from specache_compile.runtime.state import allocate

ASKED = next((given.removeprefix("--for=") for given in sys.argv[1:] if given.startswith("--for=")), "80,90")
TARGETS = {f"sm_{number}": GPUTarget("cuda", int(number), 32) for number in ASKED.split(",")}
ROUNDS = itertools.cycle([[name] for name in TARGETS] if "--in-turn" in sys.argv[1:] else [list(TARGETS)])
ONLY = next((given.removeprefix("--only=") for given in sys.argv[1:] if given.startswith("--only=")), "")
# What the arguments are, by name, where it is not a 32-bit integer.
FLOATS = ("scale", "softcap", "limit")
POINTERS = {
    "mask": "*u8", "padding": "*u8", "cursor": "*i64", "slot_index": "*i32", "selected": "*i32", "traffic": "*i64",
    "tokens": "*i32", "kept_tokens": "*i32", "scores": "*fp32", "kept_scores": "*fp32", "out": "*fp32",
    "partial": "*fp32", "center": "*fp32", "angles": "*fp32", "shares": "*fp32", "frequencies": "*fp32",
    "peaks": "*fp32", "totals": "*fp32", "lse": "*fp32", "logits": "*fp16", "base": "*fp32", "codes": "*u8",
    "sink_index": "*i32",
}  # fmt: skip
ALIGNED = ("capacity", "span", *(f"{x}_{axis}" for x in "qkvx" for axis in ("batch", "head", "lane", "token", "row")))
MODEL = (
    "q", "k", "v", "x", "turned", "key_params", "value_params", "recent", "slots", "host", "keys", "values", "sinks",
    "new", "sink_pairs",
)  # fmt: skip


# What a program may have of shared memory on an A6000, a 4090 or an L4; other GPUs give it more.
MOST_SHARED = 99 << 10
# NVIDIA's own tools, which come with triton.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def build(
    kernel: Any, label: str, dtype: str = "bf16", warps: int = 4, types: dict[str, str] | None = None, stages: int = 3,
    registers: int | None = None, **constants: Any,
) -> None:  # fmt: skip
    """Compile one kernel with these constants, for all targets or for the next; other arguments have types by name."""
    if ONLY not in label:
        return
    constants = {"PAGED": False, **constants} if "PAGED" in kernel.arg_names else constants
    known = {**POINTERS, **dict.fromkeys(MODEL, f"*{dtype}"), **dict.fromkeys(FLOATS, "fp32"), **(types or {})}
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*" or name in ALIGNED]
    hints = {(i,): [["tt.divisibility", 16]] for i in aligned}
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    for name in next(ROUNDS):
        made = compile_kernel(ASTSource(kernel, signature, places, hints), target=TARGETS[name], options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(made.asm["cubin"])
            cubin.flush()
            used = dict(re.findall(r"\b(REG|STACK):(\d+)", tool("cuobjdump", "-res-usage", cubin.name)))
            counted = COUNTED[kernel](tool("nvdisasm", "-c", cubin.name)) if kernel in COUNTED else Counter()
            said = SAID.get(kernel, per_element)(counted, warps=warps, **constants) if counted else ""
        print(
            f"{name} {kernel.__name__:16} {label:40} {used['REG']:>3} registers, {used['STACK']:>5} B spilled, "
            f"{made.metadata.shared:6,} B shared{said}"
        )
        if made.metadata.shared > MOST_SHARED:
            sys.exit(f"{kernel.__name__}, {label}: more than {MOST_SHARED:,} B of shared memory")


def tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def instructions(sass: str) -> Counter[str]:
    return Counter(re.findall(r"\*/\s+(?:@!?U?P\w+ )?\s*([A-Z]\w*)", sass))


def loop_of(sass: str) -> Counter[str]:
    """How often each instruction stands in the loop with the most products, what a turn may skip included."""
    return max(loops_of(sass), key=lambda loop: loop["HMMA"] + loop["HGMMA"], default=Counter())


def bisection_of(sass: str) -> Counter[str]:
    """The largest loop's instructions, and those of the whole kernel as "whole"."""
    largest = max(loops_of(sass), key=Counter.total, default=Counter())
    return Counter({"turn": largest.total(), "whole": instructions(sass).total()})


def loops_of(sass: str) -> list[Counter[str]]:
    """What lies between a label and a jump back to it."""
    lines = sass.splitlines()
    labels = {line.rstrip(":"): at for at, line in enumerate(lines) if re.match(r"\.L_\w+:", line)}
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if target is not None and labels[target[1]] < at:
            loops.append(instructions("\n".join(lines[labels[target[1]] : at + 1])))
    return loops


# What is counted of a kernel; nothing loops where the center's share is computed.
COUNTED = {decode.attend_tiers: loop_of, center.add_shares: instructions, select.keep_best: bisection_of}


def per_element(
    loop: Counter[str], warps: int, group: int, d: int, KEYS: bool = True, VALUES: bool = True, GROUPS: int = 1,
    STEP: int = 1, **_: Any,
) -> str:  # fmt: skip
    """Instructions per stored number in the low-bit tier's loop, and the instructions that the center's share adds.

    One iteration of the loop processes `group` keys and values, or half of them. The center's share has GROUPS groups
    per program and STEP tokens per position.
    """
    elements = GROUPS * (KEYS + VALUES) * group * STEP * d / (32 * warps)
    spilled = loop["LDL"] + loop["STL"]
    return (
        f", {loop.total() / elements:.2f} instructions an element, {spilled} for spills, {loop['LDG']} loads waited for"
    )


def of_a_selection(counted: Counter[str], warps: int, BLOCK: int, **_: Any) -> str:
    """A warp's instructions: of a turn of the bisection, and of all that runs once."""
    keys = BLOCK // 32 // warps
    return f", {counted['turn']} instructions a turn of {keys} keys a thread, {counted['whole']} in all"


SAID = {select.keep_best: of_a_selection}


def print_shares() -> None:
    """Print how `attend` splits the low-bit tier over the programs of three GPUs.

    The shape is 8 KV heads of 128 channels, k 64, R 64, g 64. The halves of a corrected step have twice the slots.
    """
    shape = (decode.exact_blocks(64, 128, 4), 64)
    for device, slots in (("H200", 132 * 8), ("A100", 108 * 8), ("A6000", 84 * 5)):
        for context in (8192, 32768, 131072):
            for batch in (1, 8, 22):
                rows, tiles = 8 * batch, -(-context // shape[1])
                exact, splits = decode.shares_of(rows, tiles, shape[0], slots)
                programs = rows * (exact + splits)
                print(
                    f"{device}, {context:7,} tokens, batch {batch:2}: {exact} + {splits} shares a head, "
                    f"{programs:5,} programs in {programs / slots:.2f} rounds of {slots:,}"
                )


def print_launches() -> None:
    """The launches of this project's own kernels in a layer's decode step, 8,192 tokens; none is made."""
    made: list[str] = []
    shape = LayerShape(8, 128, torch.bfloat16, torch.device("cpu"))
    paper = SpecacheOptions(setting="paper", bits=2, rotate=False, correct="never")
    settings_of = {
        "setting paper, 2 bits": paper, "the default": SpecacheOptions(),
        "the default, two lanes": SpecacheOptions(speculate=True),
    }  # fmt: skip
    with mock.patch.object(JITFunction, "run", lambda kernel, *given, **named: made.append(kernel.__name__)):
        for label, options in settings_of.items():
            made.clear()
            lanes = 1 + options.two_lanes
            q, (k, v) = torch.empty(1, 32, lanes, 128).bfloat16(), torch.empty(2, 1, 8, lanes, 128).bfloat16()
            at, cursor = allocate(options, shape, 1, 8192, 8192), torch.tensor([[8000, 7936, 7936, 0]])
            fetch = [at[name] for name in ("selected", "host", "slots", "slot_index", "fetched")]
            slots = at["slots"], at["slot_index"]
            read = [at[name] for name in StoredTiers._fields], options.layout, 0.1, None
            if options.correct == "never":
                _, scores = decode.decode_attention(q, k, v, None, None, cursor, *slots, *read)
            else:
                logits, base, by_lane = scored.score_low_bit(q, k, None, None, cursor, *read)
                select.select_topk(by_lane[0], at["selected"], cursor)
                copy.gather(*fetch)
                scored.attend_scored(q, k, v, None, None, cursor, logits, base, at["selected"], *slots, *read)
                scores = by_lane[-1]
            if options.two_lanes:
                select.select_topk(scores, at["selected"])
                copy.gather(*fetch)
            new = k[:, :, :1], v[:, :, :1]
            append.append(*new, None, cursor, *(at[name] for name in APPENDED), *options.layout, options.zero_point)
            copy.write_through(*new, cursor, at["host"])
            names = ", ".join(f"{count} {name}" for name, count in Counter(made).items())
            print(f"{label}: {len(made)} launches a layer: {names}")


def build_attention(
    label: str, dtype: str, key_bits: int, value_bits: int, d: int, group: int, types: dict[str, str] | None = None,
    trellis: bool = False, key_trellis: bool = False, **changes: Any,
) -> None:  # fmt: skip
    """`attend_tiers` as `triton_decode.attend` launches it, two lanes of four query heads, but for `changes`. trellis:
    of values, and all parameters of 8 bits; key_trellis: of keys too."""
    layout = Layout(key_bits, value_bits, rotate=False)
    gv = value_group(d, group) if layout.is_quantised and not trellis else d
    key_width, value_width = layout.widths(d)
    key_circle, circle = (circle_of(d) // 8 if code else 0 for code in (key_trellis, trellis))
    span = 2 * value_width if trellis else math.gcd(value_width, gv)
    codes = "*i16" if key_width % 2 == key_circle % 2 == (circle or span) % 2 == 0 else "*u8"
    if trellis:
        types = {"key_params": "*u8", "value_params": "*u8", **(types or {})}
    constants = {
        "d": d, "key_bits": key_bits, "value_bits": value_bits, "group": group, "value_group": gv, "window": 64 + group,
        "top_k": 64, "sink_tokens": 4, "lanes": 2, "queries": 4, "stored": 1, "KEYS": True, "VALUES": True,
        "ROTATED": False, "CENTERED": STEPPED if key_trellis else 0, "MASK": 0, "CAP": False,
        "ROWS": decode.FEWEST_ROWS, "CHANNELS": max(decode.FEWEST_CHANNELS, next_power_of_2(d)), "SPAN": span,
        "EXACT": decode.EXACT_BLOCK, "KEY_CIRCLE": key_circle, "CIRCLE": circle,
        "m_token": 1, "PRECISION": "ieee" if dtype == "fp32" else "tf32", "SHARES": decode.ALL_SHARES,
    } | changes  # fmt: skip
    half, rows = (constants["KEYS"], constants["VALUES"]), constants["ROWS"]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    built = decode.build_of(layout, *half, trellis, d, rows, kind)
    if constants["SHARES"] == decode.EXACT_SHARES:
        built = decode.WHOLE
    build(
        decode.attend_tiers, label, dtype, warps=decode.WARPS, stages=built.stages, registers=built.registers,
        types={"codes": codes if layout.is_quantised else f"*{dtype}", **(types or {})}, **constants,
    )  # fmt: skip


def build_quantiser(
    label: str, dtype: str, key_bits: int, value_bits: int, d: int, group: int, rotated: bool, trellis: bool = False,
    key_trellis: bool = False,
) -> None:  # fmt: skip
    gv = value_group(d, group)
    key_plane, value_plane = (next_power_of_2(width) for width in Layout(key_bits, value_bits, rotated).widths(d))
    build(
        append.quantize_groups, label, dtype, warps=8 if group * d >= 128 * 128 else 4,
        types=dict.fromkeys(("key_params", "value_params"), "*u8") if trellis else None,
        KEY_CIRCLE=circle_of(d) if key_trellis else 0, CIRCLE=circle_of(d) if trellis else 0, d=d, window=64 + group,
        group=group, value_group=gv, key_bits=key_bits, value_bits=value_bits, zero_point="midpoint", sink_tokens=4,
        PADDED=True, APART=rotated, KEY_PLANE=key_plane, VALUE_PLANE=value_plane, VALUE_GROUP=next_power_of_2(gv),
    )  # fmt: skip


def main() -> None:
    for dtype, bits, d, group in [
        ("bf16", 2, 128, 64), ("bf16", 1, 128, 64), ("fp16", 4, 128, 32), ("bf16", 8, 96, 128), ("bf16", 1, 80, 32),
        ("bf16", 2, 256, 64), ("fp32", 2, 64, 32), ("bf16", 16, 128, 32),
        ("fp32", 1, 16, 32), ("bf16", 1, 8, 32), ("bf16", 16, 8, 32),
    ]:  # fmt: skip
        label = f"{dtype}, {bits} bits, d {d}, g {group}"
        build_attention(label, dtype, bits, bits, d, group)
        if bits == 16:
            build(append.copy_groups, label, dtype, types={"codes": f"*{dtype}"}, d=d, window=64 + group, group=group,
                  CHANNELS=next_power_of_2(d))  # fmt: skip
        else:
            build_quantiser(label, dtype, bits, bits, d, group, rotated=False)
    for key_bits, value_bits in [(2, 1), (4, 1)]:
        label = f"bf16, {key_bits} and {value_bits} bits, d 128, g 64"
        build_attention(label, "bf16", key_bits, value_bits, 128, 64)
        build_quantiser(label, "bf16", key_bits, value_bits, 128, 64, rotated=True)
    for dtype, d in (("bf16", 128), ("bf16", 64), ("fp16", 80)):
        label = f"{dtype}, 2 bits and a trellis, d {d}, g 64"
        build_attention(label, dtype, 2, 1, d, 64, trellis=True)
        from_logits = {"KEYS": False, "stored": 2, "SHARES": decode.LOW_BIT_SHARES}
        build_attention(f"{label}, from logits", dtype, 2, 1, d, 64, trellis=True, **from_logits)
        build_attention(f"{label}, to logits", dtype, 2, 1, d, 64, {"slot_index": "*i64"}, trellis=True, VALUES=False,
                        top_k=0, ROTATED=True, stored=2)  # fmt: skip
        build_quantiser(label, dtype, 2, 1, d, 64, rotated=True, trellis=True)
    for d in (128, 64, 96):
        label, both = f"bf16, 1 bit, both in a trellis, d {d}, g 64", {"trellis": True, "key_trellis": True}
        build_attention(label, "bf16", 1, 1, d, 64, **both)
        build_attention(f"{label}, to logits", "bf16", 1, 1, d, 64, {"slot_index": "*i64"}, **both, VALUES=False,
                        top_k=0, ROTATED=True, stored=2)  # fmt: skip
        build_quantiser(label, "bf16", 1, 1, d, 64, rotated=True, **both)
    for label, kind in (("bool mask", decode.BOOL_MASK), ("padding", decode.PADDING)):
        build_attention(label, "bf16", 2, 2, 128, 64, MASK=kind)
    build_attention("rotated", "bf16", 2, 2, 128, 64, ROTATED=True)
    build_attention("centered", "bf16", 2, 2, 128, 64, CENTERED=CENTER_ROWS)
    build_attention("in pages", "bf16", 2, 2, 128, 64, PAGED=True)
    build_attention("in 16 bits, after a correction", "bf16", 2, 1, 128, 64, trellis=True, KEYS=False, stored=2,
                    SHARES=decode.EXACT_SHARES)  # fmt: skip
    for bits, d, group in [(2, 128, 64), (16, 128, decode.PLAIN_BLOCK), (1, 16, 32)]:
        half = {"dtype": "bf16", "key_bits": bits, "value_bits": bits, "d": d, "group": group, "stored": 2}
        unused = {"slot_index": "*i64"}  # the cursor stands for what is not read
        build_attention(
            f"{bits} bits, d {d}, to logits", types=unused, top_k=0, VALUES=False, ROTATED=bits < 16, **half
        )
        build_attention(f"{bits} bits, d {d}, from logits", KEYS=False, SHARES=decode.LOW_BIT_SHARES, **half)
    build_attention("softcap, additive mask", "bf16", 2, 2, 128, 64, {"mask": "*bf16"}, queries=8, ROWS=16, window=128,
                    MASK=2, CAP=True)  # fmt: skip
    for rows, step, group in ((CENTER_ROWS, 1, 64), (STEPPED, 64, center.STEPS.value)):
        held = {"d": 128, "group": group, "center_rows": rows, "STEP": step}
        for turning in (64, 0):
            build(center.find_center, f"bf16, d 128, {rows} rows, {turning} turning", d=128, rows=rows, turning=turning,
                  window=128, STEP=step, PADDED=True, CHANNELS=128, BLOCK=center.TOKEN_BLOCK)  # fmt: skip
        build(center.write_angles, f"d 128, {rows} rows", CHANNELS=128, BLOCK=center.ANGLE_BLOCK, **held)
        for dtype in ("bf16", "fp32"):
            build(center.add_shares, f"{dtype}, d 128, {rows} rows", dtype, lanes=2, queries=4, ROWS=8,
                  GROUPS=center.groups_at_once(group, 8), CHANNELS=center.CHANNEL_BLOCK, **held)  # fmt: skip
    build(append.write_recent, "bf16, d 128", d=128, window=128, BLOCK=append.RING_BLOCK, CHANNELS=128)
    for d in (96, 256):
        block = rotation_block(d)
        for turned, centered in ((True, 0), (True, CENTER_ROWS), (False, CENTER_ROWS), (True, STEPPED)):
            build(append.rotate_groups, f"bf16, d {d}, turned {turned}, centered {centered}", d=d, window=128, group=64,
                  room=64, block=block, sink_tokens=4, TURNED=turned, CENTERED=centered,
                  BLOCK=append.ROTATED_BLOCK)  # fmt: skip
        build(rotate.rotate_rows, f"bf16, d {d}", types={"out": "*bf16"}, rows=2, d=d, block=block,
              ROWS=rotate.ROW_BLOCK)  # fmt: skip
    for label, d, stored, changes in [
        ("sinks", 128, 1, {}), ("rotated, d 128", 128, 1, {"TURNED": 128}), ("rotated, d 96", 96, 0, {"TURNED": 32}),
        ("log-sum-exp alone", 128, 2, {"VALUES": False}), ("as many parts as there may be", 128, 1, {"PARTS": 128}),
    ]:  # fmt: skip
        constants = {"VALUES": True, "TURNED": 1, "SINKS": True, "ROWS": 16, "PARTS": 8, "CHANNELS": 128, **changes}
        build(decode.merge_splits, label, types={"out": "*bf16"}, d=d, lanes=2, queries=4, stored=stored, **constants)
    for stored, kind, base in ((1, decode.BOOL_MASK, False), (2, decode.PADDING, True)):
        build(decode.score_tokens, f"4 queries, {stored} of 2 lanes", types={"logits": "*fp16"}, lanes=2, queries=4,
              stored=stored, MASK=kind, BASE=base, TOKENS=LOGIT_BLOCK, BLOCK=decode.SCORE_BLOCK)  # fmt: skip
    for label, constants in [
        ("4,096 of many", {"FIRST": True, "LAST": False, "LOW_BIT_ALONE": True}),
        ("the last round", {"FIRST": False, "LAST": True, "LOW_BIT_ALONE": False}),
    ]:
        build(select.keep_best, label, warps=8, types={"selected": "i32"}, **constants, BLOCK=select.TILE)
    for bits, stored in ((16, {"width": 128, "ROUNDED": False}), (8, {"width": rounded_width(128), "ROUNDED": True})):
        types, label = {"host": "*i8"} if bits == 8 else {}, f"d 128, {bits} bits on the host"
        sizes = {"SELECTED": 64, "CHUNK": copy.CHUNK, "COLUMNS": 256}
        for paged in (False, True):
            told = f"k 64, {label}{', in pages' if paged else ''}"
            build(copy.fetch_missing, told, warps=8, types=types, d=128, **stored, **sizes, PAGED=paged)
        build(copy.write_host, label, types=types, d=128, **stored, BLOCK=16, CHANNELS=128)
    for dtype, d in (("bf16", 128), ("bf16", 256), ("bf16", 512), ("fp32", 128), ("fp32", 256)):
        channels, tile = extend.tile_of(d, torch.float32 if dtype == "fp32" else torch.bfloat16)
        precision = "ieee" if dtype == "fp32" else "tf32"
        build(
            extend.attend_block, f"{dtype}, d {d}", dtype, tile.warps, stages=tile.stages, d=d, CAUSAL=True, MASK=0,
            CAP=False, ROWS=tile.rows, KEYS=tile.keys, CHANNELS=channels, PRECISION=precision,
        )  # fmt: skip
    print_shares()
    print_launches()


if __name__ == "__main__":
    main()
