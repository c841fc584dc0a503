"""Compile every Triton kernel for sm_80 and sm_90 without a GPU, and print its registers, spills and shared memory.

    python tools/compile_kernels.py    (minutes; --for=89,100,120: other devices; --only='score_keys': some kernels)

The kernels are those that one step of a layer launches, with the options of CASES. For attention over codes it also
prints the instructions (SASS) of the loop per stored number. Exit status 1: a kernel exceeds the shared memory of a
supported GPU.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from torch import Tensor
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from specache_compile.kernels.attention import triton_extend as extend
from specache_compile.kernels.attention.kept_logits import lse_of
from specache_compile.kernels.decode import triton_scored as scored
from specache_compile.kernels.movement import triton_append as append
from specache_compile.kernels.movement import triton_copy as copy
from specache_compile.kernels.movement import triton_select as select
from specache_compile.kernels.movement import triton_select_logits as select_logits
from specache_compile.kernels.state.layout import StoredTiers
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods.field import LayerShape
from specache_compile.methods.low_bit import LowBitOptions
from specache_compile.methods.specache import PAPER, SpecacheOptions
from specache_compile.runtime.state import empty, fields_of


def given(option: str, default: str) -> str:
    return next((x.removeprefix(f"--{option}=") for x in sys.argv[1:] if x.startswith(f"--{option}=")), default)


if unknown := [word for word in sys.argv[1:] if not word.startswith(("--for=", "--only="))]:
    sys.exit(str(__doc__) if unknown[0] in ("-h", "--help") else f"unknown argument {unknown[0]}; see --help")
TARGETS = {f"sm_{number}": GPUTarget("cuda", int(number), 32) for number in given("for", "80,90").split(",")}
ONLY = given("only", "")
# The largest shared memory of a program on an A6000, a 4090 or an L4; other GPUs have more.
MOST_SHARED = 99 << 10
# NVIDIA's tools, which triton contains.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TOKENS = 8192
TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
DEFAULT = SpecacheOptions()


@dataclass(frozen=True)
class Case:
    """A layer with `queries` query heads per KV head, and a step. mask: "", "padding", "bool" or "additive"."""

    options: LowBitOptions = DEFAULT
    dtype: torch.dtype = torch.bfloat16
    d: int = 128
    queries: int = 4
    lanes: int = 1
    mask: str = ""
    softcap: float | None = None


CASES = {
    "the default, d 128": Case(),
    "the default, d 64": Case(d=64),
    "the default, d 256": Case(d=256),
    "the default, d 96": Case(d=96),
    "the default, 8 query heads": Case(queries=8),
    "the default, two lanes": Case(SpecacheOptions(speculate=True), lanes=2),
    "the default, padding": Case(mask="padding"),
    "the default, centered": Case(SpecacheOptions(center="always")),
    "1 bit, both in a trellis": Case(SpecacheOptions(bits=1)),
    "1 bit, both in a trellis, d 64": Case(SpecacheOptions(bits=1), d=64),
    "setting paper": Case(SpecacheOptions(**PAPER)),
    "setting paper, fp16, g 32": Case(SpecacheOptions(**PAPER | {"group_size": 32}), torch.float16),
    "setting paper, bool mask": Case(SpecacheOptions(**PAPER), mask="bool"),
    "setting paper, 1 bit": Case(SpecacheOptions(**PAPER | {"bits": 1})),
    "4 bits, g 128, softcap, additive mask": Case(
        SpecacheOptions(bits=4, group_size=128), softcap=50.0, queries=8, lanes=2, mask="additive"
    ),
    "4 bits": Case(SpecacheOptions(bits=4)),
    "4 bits, g 128, d 256": Case(SpecacheOptions(bits=4, group_size=128), d=256),
    "setting paper, g 128, d 256": Case(SpecacheOptions(**PAPER | {"group_size": 128}), d=256),
    "fp32, 4 bits, g 128, d 256": Case(SpecacheOptions(bits=4, group_size=128), torch.float32, d=256),
    "8 bits": Case(SpecacheOptions(bits=8)),
    "16 bits": Case(SpecacheOptions(bits=16)),
    "fp32, 2 bits": Case(SpecacheOptions(**PAPER), torch.float32, d=64),
    "fp32, 1 bit, d 16": Case(SpecacheOptions(**PAPER | {"bits": 1, "group_size": 32}), torch.float32, d=16),
}


@dataclass(frozen=True)
class Launch:
    """A kernel's launch: types of its arguments, or their values if constant, and compiler options."""

    kernel: Any
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[tuple[Any, ...], ...]
    options: tuple[tuple[str, Any], ...]


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def type_of(value: object) -> str:
    return f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else "i32" if is_size(value) else "fp32"


def is_aligned(value: Any) -> bool:
    """Return whether Triton may assume a pointer or size to be a multiple of 16."""
    number = value.data_ptr() if isinstance(value, Tensor) else value
    return is_size(number) and number % 16 == 0


def launch_of(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """Return a launch as Triton specialises it: sizes of 1 are constant, pointers and multiples of 16 aligned."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    options = {name: values.pop(name) for name in list(values) if name not in kernel.arg_names}
    signature, constants, aligned = {}, {}, []
    for param in kernel.params:
        value, special = values[param.name], not param.do_not_specialize
        if param.is_constexpr or value is None or (is_size(value) and special and value == 1):
            signature[param.name] = "constexpr"
            constants[param.name] = getattr(value, "value", value)
        elif isinstance(value, tuple):  # strides, or a `Sums`
            kinds = [type_of(each) for each in value]
            signature[param.name] = type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
            aligned += [(param.name, at) for at, each in enumerate(value) if is_aligned(each)]
        else:
            signature[param.name] = type_of(value)
            aligned += [(param.name,)] * (is_aligned(value) and (special or isinstance(value, Tensor)))
    kept = {name: value for name, value in options.items() if name in ("num_warps", "num_stages", "maxnreg")}
    return Launch(kernel, *(tuple(x.items()) for x in (signature, constants)), tuple(aligned), tuple(kept.items()))


def launches_of(run: Callable[[], None]) -> list[Launch]:
    """Return the launches of a call, none of which is made."""
    made: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        made.append(launch_of(kernel, args, named))

    with mock.patch.object(JITFunction, "run", record):
        run()
    return made


def mask_of(case: Case) -> Tensor | None:
    if not case.mask:
        return None
    shape = (1, 1, 1) if case.mask == "padding" else (1, 8 * case.queries, case.lanes)
    return torch.zeros(*shape, TOKENS + 64, dtype=case.dtype if case.mask == "additive" else torch.bool)


def run_step(case: Case) -> None:
    """Run a layer's step with 8 KV heads and 8,192 tokens, as the passes order its ops."""
    options, (d, lanes) = case.options, (case.d, case.lanes)
    shape = LayerShape(8, d, case.dtype, torch.device("cpu"))
    sizes = {True: (TOKENS // PAGE, PAGE), False: (1, TOKENS)}
    at = {field.name: empty(field, options, shape, *sizes[field.by_page]) for field in fields_of(options, shape)}
    cursor = torch.tensor([[TOKENS - 192, TOKENS - 256, TOKENS - 256, *range(TOKENS // PAGE)]])
    q = torch.empty(1, 8 * case.queries, lanes, d, dtype=case.dtype)
    k, v = torch.empty(2, 1, 8, lanes, d, dtype=case.dtype)
    mask, new = mask_of(case), (k[:, :, :1], v[:, :, :1])
    slots, selected = (at["slots"], at["slot_index"]), at["selected"]
    read = [at[name] for name in StoredTiers._fields], options.layout, 0.1, case.softcap
    fetch = (selected, cursor, *(at[name] for name in ("host", "slots", "slot_index", "fetched")))
    if not options.corrects:
        _, scores = scored.decode_attention(q, k, v, mask, None, cursor, *slots, *read, options.skip_below)
    else:
        # As `passes/correct.py`: only several lanes need scores.
        logits, base, by_lane = scored.score_low_bit(q, k, v, mask, None, cursor, *read, lanes > 1)
        select_logits.select(logits, base, lse_of(base, q), mask, cursor, selected)
        copy.gather(*fetch)
        scored.attend_scored(q, k, v, mask, None, cursor, logits, base, selected, *slots, *read, options.skip_below)
        scores = by_lane[-1] if lanes > 1 else by_lane
    if not options.corrects or lanes > 1:
        select.select_topk(scores, selected)
        copy.gather(*fetch)
    frequencies = torch.empty(d // 2)
    append.append(
        *new,
        None,
        cursor,
        *(at[name] for name in StoredTiers._fields),
        *options.layout,
        options.zero_point,
        frequencies,
    )
    copy.write_through(*new, cursor, at["host"])


def run_extend(dtype: torch.dtype, d: int) -> None:
    q, (k, v) = torch.empty(1, 32, 512, d, dtype=dtype), torch.empty(2, 1, 8, 512, d, dtype=dtype)
    host = torch.empty(TOKENS // PAGE, 8, PAGE, 2, d, dtype=dtype)
    cursor = torch.tensor([[0, 0, 0, *range(len(host))]])
    extend.extend_attention(q, k, v, None, None, cursor, host, 0.1, None)


def compile_launch(launch: Launch, label: str) -> None:
    """Compile a launch for all targets."""
    names = launch.kernel.arg_names
    places = {(names.index(name),): value for name, value in launch.constants}
    hints = {(names.index(name), *at): [["tt.divisibility", 16]] for name, *at in launch.aligned}
    source = ASTSource(launch.kernel, dict(launch.signature), places, hints)
    for target in TARGETS:
        made = compile_kernel(source, target=TARGETS[target], options=dict(launch.options))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(made.asm["cubin"])
            cubin.flush()
            used = dict(re.findall(r"\b(REG|STACK):(\d+)", tool("cuobjdump", "-res-usage", cubin.name)))
            numbers = numbers_per_turn(launch)
            sass = tool("nvdisasm", "-c", cubin.name)
            counted = f", {per_number(sass, numbers)}" if numbers else ""
            if launch.kernel is copy.fetch_missing:
                counted = f", {loads(sass)}"
        print(
            f"{target} {launch.kernel.__name__:18} {label:40} {used['REG']:>3} registers, {used['STACK']:>5} B "
            f"spilled, {made.metadata.shared:6,} B shared{counted}"
        )
        if made.metadata.shared > MOST_SHARED:
            sys.exit(f"{launch.kernel.__name__}, {label}: more than {MOST_SHARED:,} B of shared memory")


def numbers_per_turn(launch: Launch) -> float:
    """Return the stored numbers that a thread handles in a turn of the loop over codes; 0 for other kernels."""
    constants, warps = dict(launch.constants), dict(launch.options).get("num_warps", 4)
    if launch.kernel.__name__ in ("score_keys", "sum_values"):
        return 64 * constants["form"].dim / (32 * warps)
    if launch.kernel.__name__ == "attend_rows":
        return constants["form"].tile * constants["form"].dim / (32 * warps)
    return 0.0


def tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def loads(code: str) -> str:
    """Describe the loads from global memory by their bits; 8-bit pairs also load their scales."""
    found = (re.search(r"\.U?(8|16|64|128)\b", load) for load in re.findall(r"\bLDG\S*", code))
    widths = Counter(int(bits[1]) if bits else 32 for bits in found)
    return ", ".join(f"{count} loads of {width} bits" for width, count in sorted(widths.items()))


def instructions(sass: list[str]) -> Counter[str]:
    return Counter(re.findall(r"\*/\s+(?:@!?U?P\w+ )?\s*([A-Z]\w*)", "\n".join(sass)))


def jumps(sass: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the lines of each jump and of its target."""
    labels = {line.rstrip(":"): at for at, line in enumerate(sass) if re.match(r"\.L_\w+:", line)}
    for at, line in enumerate(sass):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if target is not None:
            yield at, labels[target[1]]


def per_number(code: str, numbers: float) -> str:
    """Describe the loop with the most products: its instructions per stored number, without those that a jump skips."""
    sass = code.splitlines()
    loops = [sass[start : at + 1] for at, start in jumps(sass) if start < at]
    loop = max(loops, key=lambda body: sum(instructions(body)[name] for name in ("HMMA", "HGMMA")), default=[])
    inside = {line: at for at, line in enumerate(loop)}
    labels = {line.rstrip(":"): at for line, at in inside.items() if line.startswith(".L_")}
    skipped = 0
    for at, line in enumerate(loop):
        target = re.search(r"@!?U?P\w+ BRA.*`\((\.L_\w+)\)", line)
        if target is not None and labels.get(target[1], 0) > at:
            skipped = max(skipped, instructions(loop[at + 1 : labels[target[1]]]).total())
    counted = instructions(loop)
    return (
        f"{(counted.total() - skipped) / numbers:.2f} instructions a number, and {skipped} that most records skip, "
        f"{counted['LDL'] + counted['STL']} for spills, {counted['LDS'] + counted['STS']} for shared memory"
    )


def main() -> None:
    compiled: set[Launch] = set()
    for label, case in CASES.items():
        launches = launches_of(lambda case=case: run_step(case))
        counts = Counter(launch.kernel.__name__ for launch in launches)
        names = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"{label}: {len(launches)} launches a layer: {names}")
        compile_new(launches, label, compiled)
    for dtype, d in itertools.product((torch.bfloat16, torch.float32), (64, 128, 256)):
        launches = launches_of(lambda given=(dtype, d): run_extend(*given))
        compile_new(launches, f"{TYPES[dtype]}, d {d}", compiled)


def compile_new(launches: list[Launch], label: str, compiled: set[Launch]) -> None:
    """Compile the launches that no earlier case made."""
    for launch in launches:
        if launch not in compiled and ONLY in f"{launch.kernel.__name__} {label}":
            compiled.add(launch)
            compile_launch(launch, label)


if __name__ == "__main__":
    main()
