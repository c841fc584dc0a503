"""One layer of a graph as Python that a reader can follow.

`rows_of` gives the nodes of a graph's text. Here weights have their names in the layer, and a node that is used once is
inlined. Casts to the same dtype and arguments with default values are left out. Arguments of tier ops have their names.
The text is for reading; it does not run.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from specache_compile.errors import SpecacheError

from .outline import OutlineRow, rows_of, spans

WIDTH, LONGEST, LONGEST_NAME = 106, 116, 22  # columns of code, of code and its comment, and of a name
WEIGHT = re.compile(r"^l_(?:self|args_0)_.*_(?:parameters|buffers)_\w+$", re.IGNORECASE)
PAST = re.compile(r"^l_\w*_layers_(?:modules_)?\d+_(keys|values)_?$", re.IGNORECASE)
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
    "fp8_attention": "attention over all pairs in 8 bits, and the new one",
    "keep_fp8": "add the new pair in 8 bits",
    "extend_attention": "exact attention over all pairs, read from host memory, and the new tokens",
}
GENERATED = ("linear", "mm", "mul", "view", "transpose", "reshape", "add")  # names of nodes after their op
PREFIXES = ("torch._C._nn.", "torch.nn.functional.", "torch.ops.")
INFIX = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div}
FUNCTIONS = {"cat": "torch.cat", "stack": "torch.stack", "rsqrt": "torch.rsqrt", "silu": "silu", "gelu": "gelu"}
COPIES = ("to", "view", "reshape", "contiguous", "_to_copy", "expand")
DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}


@dataclass
class Layer:
    """The rows of one layer.

    trees: each row's expression, in the order of the graph.
    later: names of rows that other parts of the graph use.
    types: of all rows of the graph.
    names: the graph's names → the short ones.
    """

    number: int
    rows: list[OutlineRow]
    later: list[str]
    types: dict[str, str]
    trees: dict[str, ast.expr] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def layer_text(code: str, number: int) -> str:
    """One layer of a graph's text (`print_readable`) as a Python function with its shapes in comments."""
    layer = layer_of(code, number)
    results = [name for name in layer.later if name in layer.trees]
    layer.trees = merged(layer.trees, results)
    layer.names = short_names(layer.trees)
    inputs = [short for name, short in layer.names.items() if name not in layer.trees]
    head = textwrap.wrap(f"def layer_{number}({', '.join(inputs)}):", LONGEST, subsequent_indent="        ")
    lines = [f"    {line}" for statement in statements(layer, results) for line in statement]
    ends = [f"    return {', '.join(layer.names.get(name, name) for name in results)}"] if results else []
    return "\n".join([*head, *lines, *ends, ""])


def layer_of(code: str, number: int) -> Layer:
    """The layer's rows that are used or change state. Rows that are another row under a new name are replaced by it."""
    rows = rows_of(code)
    own = [row for row in rows if row.section == str(number)]
    if not own:
        numbers = dict.fromkeys(row.section for row in rows if row.section.isdigit())
        raise SpecacheError(f"layer={number}: the graph has layers {spans(numbers)}")
    later = dict.fromkeys(name for row in rows if row.section != str(number) for name in row.inputs)
    layer = Layer(number, own, list(later), {row.name: row.type for row in rows})
    same: dict[str, ast.expr] = {}
    for row in own:
        tree = Readable(layer, row, same).visit(ast.parse(row.call, mode="eval").body)
        if row.name not in later and (isinstance(tree, (ast.Name, ast.Attribute)) or is_flattened(tree)):
            same[row.name] = tree
        else:
            layer.trees[row.name] = tree
    while unused := set(layer.trees) - used_names(layer.trees) - set(later) - tier_rows(layer.trees):
        layer.trees = {name: tree for name, tree in layer.trees.items() if name not in unused}
    return layer


def is_flattened(tree: ast.expr) -> bool:
    """Whether an expression lines up the rows of a tensor for a product."""
    return isinstance(tree, ast.Call) and bool(re.fullmatch(r"[\w.]+\.view\(\[-1, \d+\]\)", ast.unparse(tree)))


def used_names(trees: dict[str, ast.expr]) -> set[str]:
    return {name for tree in trees.values() for name in names_in(tree)}


def tier_rows(trees: dict[str, ast.expr]) -> set[str]:
    return {name for name, tree in trees.items() if tier_op(tree) is not None}


def names_in(tree: ast.AST) -> Iterator[str]:
    """The values that an expression uses, in the order of the text."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(tree, ast.Call) and child is tree.func and isinstance(child, ast.Name)):
            yield from names_in(child)
    if isinstance(tree, ast.Name) and "." not in tree.id and tree.id != "torch":
        yield tree.id


def tier_op(tree: ast.expr) -> str | None:
    """The name of the tier op that an expression calls."""
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id.startswith("specache."):
        return tree.func.id.removeprefix("specache.")
    return None


class Readable(ast.NodeTransformer):
    """Shorten one node's expression. Calls of aten become operators and methods."""

    def __init__(self, layer: Layer, row: OutlineRow, same: dict[str, ast.expr]) -> None:
        self.layer, self.row, self.same = layer, row, same

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not WEIGHT.match(node.id):
            return ast.Constant(...) if node.id == "Ellipsis" else self.same.get(node.id, node)
        parts = re.split(r"_?modules_", node.id.strip("_"), flags=re.IGNORECASE)[1:]
        own = parts.index(str(self.layer.number)) + 1 if str(self.layer.number) in parts else 0
        return ast.Name(re.sub(r"_(?:parameters|buffers)_", ".", ".".join(parts[own:])))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(float(f"{node.value:.6g}")) if isinstance(node.value, float) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = ast.unparse(node.func)
        if function == "slice":
            return ast.Slice(*(None if is_none(bound) else self.visit(bound) for bound in node.args))
        self.generic_visit(node)
        node.keywords = [word for word in node.keywords if not is_default(word)]
        if function.startswith("torch.ops.aten."):
            tree = self.of_aten(function.split(".")[3], node)
        else:
            tree = node
            if function.startswith("torch."):
                short = next((p for p in PREFIXES if function.startswith(p)), "")
                node.func = ast.Name(function.removeprefix(short).removesuffix(".default"))
            if (op := tier_op(node)) is not None:
                name_arguments(node, op)
            while node.args and is_none(node.args[-1]):
                node.args.pop()
        return self.operand(tree) or tree

    def of_aten(self, op: str, call: ast.Call) -> ast.expr:
        """A call of an aten op as Python writes it."""
        first, rest = call.args[0], call.args[1:]
        if op in INFIX and len(rest) == 1:
            return ast.BinOp(first, INFIX[op](), rest[0])
        if op == "neg":
            return ast.UnaryOp(ast.USub(), first)
        if op == "t":
            return ast.Attribute(first, "T")
        if op == "mm":
            return self.product(first, rest[0])
        if op == "slice" and len(rest) == 3:
            return self.sliced(first, *rest)
        if op in FUNCTIONS:
            return ast.Call(ast.Name(FUNCTIONS[op]), call.args, call.keywords)
        if op == "clone":
            op, call.keywords = "contiguous", []
        return ast.Call(ast.Attribute(first, op), rest, call.keywords)

    def product(self, x: ast.expr, weight: ast.expr) -> ast.expr:
        """`linear(x, weight)` where a product of matrices is one."""
        rows = isinstance(x, ast.Call) and ast.unparse(x.func).endswith(".view") and ast.unparse(x.args[0])
        if not (isinstance(weight, ast.Attribute) and rows and rows.startswith("[-1, ")):
            return ast.BinOp(x, ast.MatMult(), weight)
        x = x.func.value  # type: ignore[attr-defined]
        given, width = self.layer.types.get(ast.unparse(x), ""), self.row.type.rpartition(", ")[2]
        self.layer.types[self.row.name] = f"{given.rpartition(', ')[0]}, {width}" if given else ""
        return ast.Call(ast.Name("linear"), [x, weight.value], [])

    def sliced(self, x: ast.expr, dim: ast.expr, start: ast.expr, stop: ast.expr) -> ast.expr:
        part = ast.Slice(*(bound if 0 < ast.literal_eval(bound) < 2**62 else None for bound in (start, stop)))
        place, last = ast.literal_eval(dim), self.row.type.count(",")
        before = [ast.Constant(...)] if place == last else [ast.Slice() for _ in range(place)]
        return ast.Subscript(x, ast.Tuple([*before, part]))

    def operand(self, tree: ast.expr) -> ast.expr | None:
        """The operand of a call that gives its operand itself, seen by both types; None for any other."""
        if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute)):
            return None
        value, method = tree.func.value, tree.func.attr
        if method == "permute":
            order = ast.literal_eval(tree.args[0])
            return value if list(order) == sorted(order) else None
        kind = self.layer.types.get(value.id) if isinstance(value, ast.Name) else None
        return value if method == "alias" or (method in COPIES and kind and kind == self.row.type) else None


def is_default(word: ast.keyword) -> bool:
    return word.arg in DEFAULTS and isinstance(word.value, ast.Constant) and word.value.value == DEFAULTS[word.arg]


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def name_arguments(node: ast.Call, op: str) -> None:
    """A tier op's tensors stay in their places up to the first that is None; what follows has its argument's name."""
    schema = getattr(torch.ops.specache, op).default._schema.arguments
    given = list(zip(schema, node.args, strict=False))
    places = next((i for i, (_, value) in enumerate(given) if is_none(value)), len(given))
    node.args = [value for _, value in given[:places]]
    node.keywords = [ast.keyword(each.name, value) for each, value in given[places:] if not is_none(value)]


def merged(trees: dict[str, ast.expr], results: list[str]) -> dict[str, ast.expr]:
    """The statements that remain when a value that is used once stands in its user, where the line stays short."""
    uses = Counter(name for tree in trees.values() for name in names_in(tree))
    waiting: dict[str, ast.expr] = {}
    made: dict[str, ast.expr] = {}
    for name, tree in trees.items():
        for used in [each for each in dict.fromkeys(names_in(tree)) if each in waiting]:
            whole = Replaced({used: waiting[used]}).visit(copy.deepcopy(tree))
            value = waiting.pop(used)
            length = len(re.sub(r"_\d+\b", "", ast.unparse(whole)))  # alike in all layers
            if tier_op(tree) is None and length <= WIDTH - LONGEST_NAME:
                tree = whole
            else:
                made[used] = value
        keeps_place = name in results or tier_op(tree) is not None or part_of(tree, trees)
        (made if keeps_place or uses[name] != 1 else waiting)[name] = tree
    return made | waiting


def part_of(tree: ast.expr, trees: dict[str, ast.expr]) -> str | None:
    """The tier op's row of which an expression takes one result."""
    whole = tree.value.id if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Name) else ""
    return whole if whole in trees and tier_op(trees[whole]) else None


class Replaced(ast.NodeTransformer):
    """Replace names by expressions."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


def short_names(trees: dict[str, ast.expr]) -> dict[str, str]:
    """The graph's names → short ones, each once, first those of the inputs."""
    arguments: dict[str, str] = {}
    for tree in trees.values():
        if isinstance(tree, ast.Call) and (op := tier_op(tree)) is not None:
            arguments |= {value.id: name for name, value in named_arguments(tree, op) if isinstance(value, ast.Name)}
    inputs = [name for tree in trees.values() for name in names_in(tree) if name not in trees]
    unnamed = {part_of(tree, trees) for tree in trees.values()} | (tier_rows(trees) - used_names(trees))
    names: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for name in dict.fromkeys([*inputs, *(name for name in trees if name not in unnamed)]):
        base = short_name(name, trees.get(name), arguments)
        names[name] = f"{base}_{taken[base]}" if taken[base] else base
        taken[base] += 1
    return names


def short_name(name: str, tree: ast.expr | None, arguments: dict[str, str]) -> str:
    """The name in the tier op that takes the value, the weight's, or the graph's without its number."""
    if past := PAST.match(name):
        return f"past_{past.group(1)}"
    base = re.sub(r"(_default|_tensor)?(_\d+)*_?$", "", name)
    if tree is None:
        return base
    if tier_op(tree):
        return arguments.get(name, "attention")
    if name.startswith("getitem"):
        return arguments.get(name, "attention")
    while isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute):
        tree = tree.func.value
    is_linear = isinstance(tree, ast.Call) and ast.unparse(tree.func) == "linear"
    weight = tree.args[1] if is_linear else tree.left if isinstance(tree, ast.BinOp) else tree  # type: ignore
    if base in GENERATED and isinstance(weight, ast.Name) and weight.id.endswith(".weight"):
        return weight.id.split(".")[-2]
    return f"{base}_out" if isinstance(tree, ast.Call) and ast.unparse(tree.func) == base else base


def named_arguments(tree: ast.Call, op: str) -> list[tuple[str, ast.expr]]:
    """A tier op's arguments with their names."""
    schema = getattr(torch.ops.specache, op).default._schema.arguments
    placed = [(each.name, value) for each, value in zip(schema, tree.args, strict=False)]
    return placed + [(str(word.arg), word.value) for word in tree.keywords]


def statements(layer: Layer, results: list[str]) -> Iterator[list[str]]:
    """The layer's statements, each as its lines; a tier op assigns all of its results that are used."""
    parts: dict[str, dict[int, str]] = {}
    for name, tree in layer.trees.items():
        if whole := part_of(tree, layer.trees):
            parts.setdefault(whole, {})[ast.literal_eval(tree.slice)] = layer.names[name]  # type: ignore[attr-defined]
    used = used_names(layer.trees)
    for name, tree in layer.trees.items():
        if part_of(tree, layer.trees):
            continue
        own = parts.get(name, {})
        target = ", ".join(own.get(place, "_") for place in range(max(own) + 1)) if own else layer.names.get(name, "")
        target = target if name in {*used, *results} else ""
        short = {old: ast.Name(new) for old, new in layer.names.items()}
        text = ast.unparse(Replaced({**short}).visit(copy.deepcopy(tree)))
        if len(target) + len(text) > WIDTH - 5 and isinstance(tree, ast.BinOp):
            text = f"({text})"  # it goes on on another line
        code = f"{target} = {text}" if target else text
        lines = textwrap.wrap(code, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        if layer.types[name]:
            lines[-1] += f"  # {layer.types[name]}"
        note = NOTES.get(tier_op(tree) or "")
        yield [f"# {note}", *lines] if note else lines
