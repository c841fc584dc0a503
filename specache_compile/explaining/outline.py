"""The nodes of a graph's text, each with its layer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from specache_compile.passes.reading.nodes import model_layer

STATEMENT = re.compile(r"^\s+(\w+)(?:: \"([^\"]*)\")? = (.*)$")
WEIGHT = re.compile(r"\b\w*(?:parameters|buffers)_\w+", re.IGNORECASE)
CALL = re.compile(r"^(?:torch\.ops\.)?([\w.]+)\(")
# A name, if it is not a function, a method or a keyword.
VALUE = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!\s*\(|\s*=[^=])")
ALIAS = re.compile(r"^\s+\w+ = L_\w+$")
SUM = re.compile(r"^(?:torch\.ops\.aten\.add\.Tensor\(\w+, \w+\)|\w+ \+ \w+)$")
WORK = {"mm", "addmm", "bmm", "linear", "matmul", "scaled_dot_product_attention", "embedding"}


@dataclass(frozen=True)
class OutlineRow:
    """One node. section: its layer, "before" or "after"."""

    name: str
    type: str
    call: str
    inputs: tuple[str, ...]
    section: str


def rows_of(code: str) -> list[OutlineRow]:
    """The nodes of `print_readable`'s text, in order."""
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
    return with_first_rows(rows)


def with_first_rows(rows: list[OutlineRow]) -> list[OutlineRow]:
    """Give each layer the rows before its first weight that only its norm uses."""
    users: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        for name in row.inputs:
            users.setdefault(name, []).append(place)
    result = list(rows)
    for first in (i for i in range(1, len(rows)) if rows[i].section != rows[i - 1].section):
        section, before = rows[first].section, rows[first - 1].section
        work = next((i for i in range(first, len(rows)) if is_work(rows[i].call)), first)
        own = set(range(first, work + 1))
        for place in range(first - 1, -1, -1):
            if rows[place].section != before or "parameters" in rows[place].call:
                break
            used = users.get(rows[place].name, [])
            is_sum = len(rows[place].inputs) == 2 and SUM.match(rows[place].call)  # the end of a layer
            if used and own.issuperset(used) and not is_sum:
                own.add(place)
                result[place] = replace(rows[place], section=section)
    return result


def is_work(call: str) -> bool:
    """Whether a call is a product, an attention or an embedding."""
    found = CALL.match(call)
    parts = found.group(1).split(".") if found else re.findall(r"\.(\w+)\(", call)[:1]
    return "specache" not in parts and not WORK.isdisjoint(parts)


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
