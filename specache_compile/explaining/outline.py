"""A readable graph, folded by layer: nodes are rows, layers that are alike are shown once, a pass's changes are
marked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from specache_compile.passes.reading.nodes import model_layer

from .tables import spans

STATEMENT = re.compile(r"^\s+(\w+)(?:: \"([^\"]*)\")? = (.*)$")
WEIGHT = re.compile(r"\b\w*(?:parameters|buffers)_\w+", re.IGNORECASE)
CALL = re.compile(r"^(?:torch\.ops\.)?([\w.]+)\(")
ALIAS = re.compile(r"^\s+\w+ = L_\w+$")
WORK = ("mm", "addmm", "bmm", "linear", "matmul", "scaled_dot_product_attention", "embedding")
VIEWS = ("view", "transpose", "t", "reshape", "permute", "expand", "unsqueeze", "slice", "select", "getitem")


@dataclass(frozen=True)
class Row:
    """One node.

    kind: tier, work, view, other.
    change: " ", "+" or "-".
    section: its layer, "before" or "after".
    """

    name: str
    type: str
    call: str
    inputs: tuple[str, ...]
    kind: str
    section: str
    change: str = " "

    @property
    def text(self) -> str:
        return f"{self.name} = {self.call}"


@dataclass(frozen=True)
class Section:
    """Rows of one layer and of the layers like it: "layers 0-31"."""

    title: str
    rows: tuple[Row, ...]
    added: int = 0
    removed: int = 0


def rows_of(code: str) -> list[Row]:
    """The nodes of `print_readable`'s text, in order."""
    rows: list[Row] = []
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
        words = re.findall(r"\b[A-Za-z_]\w*\b", call)
        rows.append(
            Row(name, kind_of_value or "", call, tuple(dict.fromkeys(w for w in words if w in known)), kind(call),
                "after" if name == "return" else section)
        )  # fmt: skip
        known.add(name)
    return rows


def kind(call: str) -> str:
    """The kind of a call, for its colour."""
    if "specache." in call:
        return "tier"
    found = CALL.match(call)
    parts = found.group(1).split(".") if found else re.findall(r"\.(\w+)\(", call)[:1]
    if any(part in WORK for part in parts):
        return "work"
    return "view" if any(part.lstrip("_") in (*VIEWS, "unsafe_view") for part in parts) else "other"


def changes(before: list[Row], after: list[Row]) -> list[Row]:
    """Both graphs' rows in one list: "-" removed, "+" added, " " kept."""
    matcher = difflib.SequenceMatcher(None, [r.text for r in before], [r.text for r in after], autojunk=False)
    rows: list[Row] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            rows += after[c:d]
        else:
            rows += [replace(row, change="-") for row in before[a:b]]
            rows += [replace(row, change="+") for row in after[c:d]]
    return rows


def folded(rows: Iterable[Row]) -> list[Section]:
    """Sections in the graph's order. Layers whose rows differ only in numbers are one section, with the first's
    rows."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(row.section, []).append(row)
    alike: dict[tuple[str, ...], list[str]] = {}
    for title, members in sections.items():
        key = tuple(f"{row.change}{re.sub(r'[0-9]+', '#', row.call)}" for row in members)
        alike.setdefault(key if title.isdigit() else (title, *key), []).append(title)
    result = []
    for titles in alike.values():
        shown = sections[titles[0]]
        name = titles[0] if not titles[0].isdigit() else f"layer{'s' if len(titles) > 1 else ''} {spans(titles)}"
        added, removed = (sum(row.change == sign for row in shown) for sign in "+-")
        result.append(Section({"before": "before the layers", "after": "after the layers"}.get(name, name),
                              tuple(shown), added, removed))  # fmt: skip
    return result


def only_changed(sections: list[Section], context: int = 1) -> list[Section]:
    """The sections that changed, with `context` rows around each change."""
    result = []
    for section in sections:
        if not section.added and not section.removed:
            continue
        near = {
            j for i, row in enumerate(section.rows) if row.change != " " for j in range(i - context, i + context + 1)
        }
        result.append(replace(section, rows=tuple(row for i, row in enumerate(section.rows) if i in near)))
    return result
