"""A graph as text: as a whole, or one layer as Python that a reader can follow.

A layer's weights have their names in the layer, and a value that is used once is inlined. Casts to the same
dtype and arguments with default values are left out. Arguments of tier ops have their names, and the first sentence of
an op's docstring stands above its call. The text is for reading; it does not run.
"""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import magic_methods
from torch.utils._dtype_abbrs import dtype_abbrs

from specache_compile.errors import SpecacheError
from specache_compile.kernels.op import op_of
from specache_compile.passes.pipeline import readable
from specache_compile.passes.reading.nodes import arguments_of, value_of

from .times.step_nodes import layers_of, operator_name

WIDTH, LONGEST, LONGEST_VALUE = 106, 116, 88  # columns of code, of a head, and of a statement's right side
PAST = re.compile(r"^l_\w*_layers_(?:modules_)?\d+_(keys|values)_?$", re.IGNORECASE)
HEAD, INPUT = re.compile(r"def forward\(self, (.*)\):"), re.compile(r"\w+: \"")
ALIAS = re.compile(r"^\s+\w+ = L_\w+$")
GENERATED = ("linear", "mm", "mul", "view", "transpose", "reshape", "add")  # names of nodes after their op
COPIES = ("to", "view", "reshape", "contiguous", "clone", "_to_copy", "expand", "alias", "permute")
DEFAULTS = ("None", "False", "0.0")  # of keyword arguments, which are left out
VIEWS = ("view", "reshape", "transpose", "unsqueeze")


def layer_text(graph_module: GraphModule, number: int) -> str:
    """One layer of a graph as a Python function with its shapes in comments."""
    layers = layers_of(graph_module)
    own = [node for node, layer in layers.items() if layer == str(number) and node.op.startswith("call")]
    if not own:
        numbers = dict.fromkeys(layer for layer in layers.values() if layer.isdigit())
        raise SpecacheError(f"layer={number}: the graph has layers {spans(numbers)}")
    return LayerText(own).function(number)


class LayerText:
    """The text of a layer.

    own: its nodes that an output or a state tensor depends on.
    results: those that other parts of the graph use.
    waiting: the expressions of values that are used once and not yet written.
    names: the values' names, in the order of their first use.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        inside, live = set(nodes), set[Node]()
        for node in reversed(nodes):
            if op_of(node.target) is not None or any(user not in inside or user in live for user in node.users):
                live.add(node)
        self.own = [node for node in nodes if node in live and origin(node) is node and not is_turned_weight(node)]
        self.results = list(dict.fromkeys(origin(node) for node in nodes if not inside.issuperset(node.users)))
        self.uses = Counter(origin(used) for node in self.own for used in node.all_input_nodes)
        self.waiting: dict[Node, str] = {}
        self.names: dict[Node, str] = {}
        self.taken = Counter[str]()
        self.lines: list[str] = []

    def function(self, number: int) -> str:
        for node in self.own:
            if not is_part(node):
                self.add(node)
        inputs = [name for node, name in self.names.items() if node not in self.own]
        head = textwrap.wrap(f"def layer_{number}({', '.join(inputs)}):", LONGEST, subsequent_indent="        ")
        ends = [f"return {', '.join(map(self.name, self.results))}"] if self.results else []
        return "\n".join([*head, *(f"    {line}" for line in [*self.lines, *ends]), ""])

    def add(self, node: Node) -> None:
        """Write a node's statement, or keep its expression for its only user."""
        is_tier = is_tier_op(node)
        inlined = [used for used in map(origin, node.all_input_nodes) if used in self.waiting]
        while inlined and (is_tier or len(self.expression(node)) > LONGEST_VALUE):
            used = inlined.pop()
            self.write(used, self.waiting.pop(used))
        text = self.expression(node)
        for used in inlined:
            del self.waiting[used]
        if is_tier or node in self.results or self.uses[node] != 1:
            self.write(node, text)
        else:
            self.waiting[node] = text

    def write(self, node: Node, text: str) -> None:
        """A statement as its lines; a tier op assigns all of its results that are used."""
        parts = {args_of(user)[1]: self.name(user) for user in node.users if is_part(user) and user in self.own}
        target = ", ".join(parts.get(place, "_") for place in range(max(parts) + 1)) if parts else ""
        if not parts and (self.uses[node] or node in self.results):
            target = self.name(node)
        if len(target) + len(text) > WIDTH - 5 and isinstance(ast.parse(text, mode="eval").body, ast.BinOp):
            text = f"({text})"  # it goes on on another line
        code = f"{target} = {text}" if target else text
        lines = textwrap.wrap(code, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        lines[-1] += f"  # {kind}" if (kind := kind_of(node)) else ""
        if (tier_op := op_of(node.target)) and tier_op.run.__doc__:
            self.lines.append(f"# {' '.join(str(tier_op.run.__doc__).split()).split('. ')[0].removesuffix('.')}")
        self.lines += lines

    def expression(self, node: Node) -> str:
        """A node's call as Python writes it, with no more brackets than are necessary."""
        return ast.unparse(ast.parse(self.call(node), mode="eval"))

    def call(self, node: Node) -> str:
        op, args = operator_name(node), args_of(node)
        if is_tier_op(node):
            return f"specache.{op}({', '.join(self.tier_arguments(node))})"
        texts = list(map(self.text, args))
        if op == "getitem" and isinstance(args[1], tuple):
            return f"{texts[0]}[{', '.join(map(self.text, args[1]))}]"
        if op in magic_methods and magic_methods[op].count("{}") == len(args):
            return magic_methods[op].format(*texts)
        if op == "t":
            return f"{texts[0]}.T"
        if op == "mm":
            weight = linear_weight(node)
            return " @ ".join(texts) if weight is None else f"linear({texts[0]}, {self.text(weight)})"
        if op == "slice" and len(args) == 4:
            return f"{texts[0]}[{sliced(node, *args[1:])}]"
        while texts and texts[-1] == "None":
            texts.pop()
        texts += [f"{name}={self.text(value)}" for name, value in node.kwargs.items() if repr(value) not in DEFAULTS]
        if node.op == "call_method" or (is_aten(node) and isinstance(args[0], Node) and hasattr(Tensor, op)):
            return f"{texts[0]}.{op}({', '.join(texts[1:])})"
        is_in_torch = hasattr(torch, op) and (is_aten(node) or getattr(torch, op) is node.target)
        return f"{'torch.' if is_in_torch else ''}{op}({', '.join(texts)})"

    def tier_arguments(self, node: Node) -> list[str]:
        """Arguments stay in their places up to the first that is None; what follows has its name."""
        given = list(arguments_of(node).items())
        places = next((place for place, (_, value) in enumerate(given) if value is None), len(given))
        named = [f"{name}={self.text(value)}" for name, value in given[places:] if value is not None]
        return [*(self.text(value) for _, value in given[:places]), *named]

    def text(self, value: Any) -> str:
        """An argument: the name of a value or a weight, the expression of a value that waits, or a constant."""
        if isinstance(value, Node):
            node = origin(value)
            if is_module_tensor(node) or is_turned_weight(node):
                return weight_path(node) if is_module_tensor(node) else f"{weight_path(args_of(node)[0])}.T"
            return f"({self.waiting[node]})" if node in self.waiting else self.name(node)
        if isinstance(value, slice):
            bounds = ("" if bound is None else self.text(bound) for bound in (value.start, value.stop))
            return ":".join(bounds) + (f":{value.step}" if value.step is not None else "")
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.text, value))}]"
        return "..." if value is ... else repr(float(f"{value:.6g}")) if isinstance(value, float) else repr(value)

    def name(self, node: Node) -> str:
        """A value's unique name; repeated names get a number."""
        if node not in self.names:
            base = base_name(node)
            self.names[node] = f"{base}_{self.taken[base]}" if self.taken[base] else base
            self.taken[base] += 1
        return self.names[node]


def base_name(node: Node) -> str:
    """The name in the tier op that takes the value, the weight's, or the graph's without its number."""
    if past := PAST.match(node.name):
        return f"past_{past.group(1)}"
    if is_tier_op(node) or is_part(node):
        takers = (arguments_of(user).items() for user in node.users if is_tier_op(user))
        return next((name for taken in takers for name, value in taken if value is node), "attention")
    base = re.sub(r"(_default|_tensor)?(_\d+)*_?$", "", node.name)
    inner = node
    while operator_name(inner) in VIEWS:
        inner = args_of(inner)[0]
    weight = linear_weight(inner) or next(filter(is_module_tensor, inner.all_input_nodes), None)
    if base in GENERATED and weight is not None:
        return weight_path(weight).split(".")[-2]
    is_function = node.op == "call_function" and not hasattr(Tensor, base) and base not in ("slice", "getitem")
    return f"{base}_out" if keyword.iskeyword(base) or (is_function and base == operator_name(node)) else base


def origin(node: Node) -> Node:
    """The value that a node is: its operand's where the call changes nothing, or lines up rows for a product."""
    while operator_name(node) in COPIES:
        given, *order = args_of(node)
        is_same = kind_of(given) == kind_of(node) != "" and (operator_name(node) != "permute" or is_sorted(order))
        if not (is_same or is_flattened(node)):
            break
        node = given
    return node


def is_sorted(order: list[Any]) -> bool:
    dims = list(order[0] if isinstance(order[0], list | tuple) else order)
    return dims == sorted(dims)


def is_flattened(node: Node) -> bool:
    """Whether a node lines up the rows of a tensor for products of matrices."""
    is_view = operator_name(node) == "view" and all(operator_name(user) == "mm" for user in node.users)
    return is_view and value_of(node).dim() == 2


def linear_weight(node: Node) -> Node | None:
    """The weight of a product of lined up rows, which is a linear layer's."""
    if operator_name(node) != "mm" or not is_flattened(args_of(node)[0]):
        return None
    turned = args_of(node)[1]
    return args_of(turned)[0] if is_turned_weight(turned) else None


def is_turned_weight(node: Node) -> bool:
    return operator_name(node) == "t" and is_module_tensor(args_of(node)[0])


def is_module_tensor(node: Node) -> bool:
    """Whether a node is a parameter or a buffer of a module."""
    return node.op == "placeholder" and re.search("_(parameters|buffers)_", node.name, re.IGNORECASE) is not None


def kind_of(node: Node) -> str:
    """A tensor's dtype and shape; that of a linear layer's product is of rows that were not lined up."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        return ""
    shape = list(value.shape)
    if operator_name(node) == "mm" and linear_weight(node) is not None:
        shape = [*value_of(args_of(args_of(node)[0])[0]).shape[:-1], shape[-1]]
    return f"{dtype_abbrs[value.dtype]}[{', '.join(map(str, shape))}]"


def weight_path(node: Node) -> str:
    """A weight's name in its layer, or in the model."""
    parts = re.split(r"_?modules_", node.name.strip("_"), flags=re.IGNORECASE)[1:]
    own = next((place + 1 for place, part in enumerate(parts) if part.isdigit()), 0)
    return re.sub(r"_(?:parameters|buffers)_", ".", ".".join(parts[own:]))


def sliced(node: Node, dim: int, start: int, stop: int) -> str:
    part = ":".join(str(bound) if 0 < bound < 2**62 else "" for bound in (start, stop))
    return f"..., {part}" if dim == value_of(node).dim() - 1 else ":, " * dim + part


def is_tier_op(node: Node) -> bool:
    return op_of(node.target) is not None


def is_part(node: Node) -> bool:
    """Whether a node is one of the results of a tier op."""
    return operator_name(node) == "getitem" and is_tier_op(args_of(node)[0])


def args_of(node: Node) -> tuple[Any, ...]:
    """A node's arguments, without their types."""
    return node.args


def is_aten(node: Node) -> bool:
    return str(node.target).startswith("aten.")


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
    """A whole graph's text, with the number of its inputs instead of their names and files."""
    code = readable(graph) if isinstance(graph, GraphModule) else graph
    code = HEAD.sub(lambda head: f"def forward(self, ...):  # {len(INPUT.findall(head[1]))} inputs", code)
    lines = [line for line in code.splitlines() if not ALIAS.match(line) and "# File:" not in line]
    return re.sub(r"\n\s*\n+", "\n\n", "\n".join(lines)).strip("\n") + "\n"
