"""The nodes of a graph's text, each with its layer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import GraphModule

from specache_compile.passes.reading.nodes import model_layer

STATEMENT = re.compile(r"^\s+(\w+)(?:: \"([^\"]*)\")? = (.*)$")
WEIGHT = re.compile(r"\b\w*(?:parameters|buffers)_\w+", re.IGNORECASE)
# A name, if it is not a function, a method or a keyword.
VALUE = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!\s*\(|\s*=[^=])")
ALIAS = re.compile(r"^\s+\w+ = L_\w+$")


@dataclass(frozen=True)
class OutlineRow:
    """One node. section: its layer, "before" or "after"."""

    name: str
    type: str
    call: str
    inputs: tuple[str, ...]
    section: str


def rows_of(code: str) -> list[OutlineRow]:
    """The nodes of `print_readable`'s text, in order. Those before a layer's first weight count to the layer before."""
    rows: list[OutlineRow] = []
    known: set[str] = set()
    section = "before"
    for line in code.splitlines():
        found = STATEMENT.match(line)
        if ALIAS.match(line) or not (found or line.strip().startswith("return ")):
            continue
        name, kind_of_value, call = found.groups() if found else ("return", "", line.strip()[7:])
        call = re.sub(r";\s.*$", "", call)
        layer = next((n for word in WEIGHT.findall(call) if (n := model_layer(word)) is not None), None)
        if layer is not None:
            section = str(layer)
        elif section != "before" and "parameters" in call:
            section = "after"
        words = VALUE.findall(call)
        used = tuple(dict.fromkeys(w for w in words if w in known))
        where = "after" if name == "return" else section
        rows.append(OutlineRow(name, kind_of_value or "", call, used, where))
        known.add(name)
    return rows


def spans(numbers: Iterable[str]) -> str:
    """Layers "0", "1", "2", "5" as 0-2, 5."""
    found: list[list[str]] = []
    for number in numbers:
        if found and number.isdigit() and found[-1][1].isdigit() and int(number) == int(found[-1][1]) + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(a if a == b else f"{a}-{b}" for a, b in found)


def readable_graph(graph: GraphModule | str) -> str:
    """A whole graph's text without the names and files of its inputs."""
    code = graph if isinstance(graph, str) else graph.print_readable(print_output=False)
    code = re.sub(r"def forward\(self, (.*)\):", lambda head: f"def forward(self, ...):  # {inputs_of(head)}", code)
    lines = [line for line in code.splitlines() if not ALIAS.match(line) and "# File:" not in line]
    return re.sub(r"\n\s*\n+", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def inputs_of(head: re.Match[str]) -> str:
    names = len(re.findall(r"\w+: \"", head.group(1)))
    return f"{names} inputs"
