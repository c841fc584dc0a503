"""The launches in Inductor's generated wrappers, parsed from their text."""

from __future__ import annotations

import re

from transformers import LlamaForCausalLM

from specache_compile.runtime.records import find_record


def compiled_phases(model: LlamaForCausalLM) -> list[str]:
    """Return the phases of a model's graphs for Inductor; a pre-decode runs op by op."""
    made = [form.variant.phase for graph in find_record(model).graphs for form in graph.rewrites.made.values()]
    assert any(phase.once for phase in made)
    return [phase.name for phase in made if not phase.once]


def launches(source: str) -> list[str]:
    """Return the lines of the wrapper's `call` with launches."""
    body = source.split("def call(")[1]
    pattern = re.compile(r"torch\.ops\.specache\.|extern_kernels\.|cpp_fused|aten\.|\.copy_\(|clone")
    return [line.strip() for line in body.splitlines() if pattern.search(line) and not line.strip().startswith("#")]


def names(lines: list[str]) -> list[str]:
    """Return specache op names, in C++ or not, and "work" for matrix products, in launch order."""
    found = []
    for line in lines:
        op = re.search(r"torch\.ops\.specache\.(\w+)\.default\(", line)
        if op and "assert" not in line:
            found.append(op.group(1).removesuffix("_fused"))
        elif "extern_kernels" in line:
            found.append("work")
    return found


def state_left_alone(lines: list[str]) -> int:
    """Require that only ops access state, as graph inputs; returns the number of state tensors."""
    state = set()
    for line in lines:
        call = re.search(r"torch\.ops\.specache\.(\w+)\.default\((.*)\)", line)
        if call:
            state |= set(re.findall(r"\barg\d+_1\b", call.group(2)))
    for line in lines:
        if "torch.ops.specache" not in line:
            assert not state & set(re.findall(r"\barg\d+_1\b", line)), line
    assert not any(".copy_(" in line or "aten.clone" in line for line in lines)
    return len(state)
