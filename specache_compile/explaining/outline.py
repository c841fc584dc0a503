"""A graph's text (`print_readable`) for people: whole, or one layer of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch.fx import GraphModule

from specache_compile.errors import SpecacheError
from specache_compile.passes.reading.nodes import model_layer

# `name: "f32[1, 4]" = call;  other = None`
STATEMENT = re.compile(r"^\s+(\w+)(?:: \"([^\"]*)\")? = (.*?)(?:;\s.*)?$")
WEIGHT = re.compile(r"\bl_\w*(?:parameters|buffers)_\w+", re.IGNORECASE)
ALIAS = re.compile(r"^\s+\w+ = L_\w+$")
PREFIX = re.compile(r"\btorch\.(?:_C\._nn|nn\.functional|ops)\.")
NOTES = {
    "decode_attention": "attention over window and slots in 16 bits, and the rest in few bits; scores: per token",
    "score_low_bit": "logits of all tokens, from keys in few bits; scores: how much attention each token gets",
    "correct": "copy the k best pairs that are not in the slots from host memory, and wait for them",
    "attend_scored": "the attention's output: window and slots in 16 bits, the rest in few bits",
    "select_topk": "the k tokens of the highest scores",
    "prefetch": "begin to copy their pairs into the slots, for the next step",
    "wait": "wait for the copy that the last step began",
    "offload": "copy the new pair to host memory",
    "append": "add the new pair to the window; quantize the group of tokens that leaves it",
}


def statements(code: str) -> Iterator[tuple[str, str, str, str]]:
    """The name, call and type of each node of a graph's text, and its layer's number.

    A node without a weight belongs to the layer of the newest weight before it; "" where there is none, or where that
    weight is in no layer.
    """
    layer = ""
    for line in code.splitlines():
        found = STATEMENT.match(line)
        if found and not ALIAS.match(line):
            name, kind, call = found.groups()
            for weight in WEIGHT.findall(call):
                layer = str(number) if (number := model_layer(weight)) is not None else ""
            yield name, call, kind or "", layer


def layer_text(code: str, number: int) -> str:
    """One layer of a graph's text: a line for each node, weights with their names in the layer, shapes in comments."""
    found = list(statements(code))
    own = [(name, call, kind) for name, call, kind, layer in found if layer == str(number)]
    if not own:
        raise SpecacheError(f"layer={number}: the graph has layers {spans(dict.fromkeys(s[3] for s in found if s[3]))}")
    lines = []
    for name, call, kind in own:
        call = PREFIX.sub("", WEIGHT.sub(weight_name, call))
        op = re.match(r"specache\.(\w+)\.default", call)
        lines += [f"# {NOTES[op[1]]}"] if op and op[1] in NOTES else []
        lines.append(f"{name} = {call.replace('.default(', '(', 1)}" + (f"  # {kind}" if kind else ""))
    return "\n".join([*lines, ""])


def weight_name(weight: re.Match[str]) -> str:
    """`self_attn.q_proj.weight` of a weight's whole name in the graph."""
    parts = re.split(r"_?modules_", weight[0].strip("_"), flags=re.IGNORECASE)[1:]
    first = next((place + 1 for place, part in enumerate(parts) if part.isdigit()), 0)
    return re.sub(r"_(?:parameters|buffers)_", ".", ".".join(parts[first:]))


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
