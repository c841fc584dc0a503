"""Match the two forms in which Hugging Face writes attention: SDPA, and the eager softmax.

If an attention does anything that `Form` cannot express, it does not match: a rewrite must compute the same result.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .nodes import called_name, value_of

MATMULS = (torch.matmul, operator.matmul, "matmul", torch.bmm)
SOFTMAXES = (F.softmax, torch.softmax, "softmax")
CASTS = ("contiguous", "to", "type", "type_as", "float", torch.clone, "clone")
WHOLE = slice(None)
# The eager form's operations on q·kᵀ, last to first. SHIFT subtracts a number per row, which no softmax depends on.
SHIFT, SINKS, MASK, SOFTCAP, SCALE, CAST = range(6)


class NoMatch(Exception):
    """An attention cannot be rewritten. The message becomes the reason that the user sees.

    by_model: the reason holds for every call of this model.
    """

    def __init__(self, reason: str, by_model: bool = False) -> None:
        super().__init__(reason)
        self.by_model = by_model


@dataclass
class Form:
    """softmax(cap(q·kᵀ · scale) + mask, and the sinks) · v, with the cache's keys and values of H heads.

    mask: [B|1, Hq|1, T|1, n], bool (True: visible) or additive.
    sinks: [Hq].
    causal: SDPA applies its own causal mask, aligned to the first key.
    scaled_mask: the mask is scaled with the scores, which does not change a mask of 0 and -inf.
    """

    q: Node
    keys: Node
    values: Node
    scale: float = 1.0
    softcap: float | None = None
    mask: Node | None = None
    sinks: Node | None = None
    causal: bool = False
    scaled_mask: bool = False


def is_attention(node: Node) -> bool:
    """Return whether a node is an SDPA call, or a matmul of a softmax's weights and values."""
    if node.target is F.scaled_dot_product_attention:
        return True
    return node.target in MATMULS and bool(softmax_path(node.args[0]))


def softmax_path(node: object) -> list[Node]:
    """Return the path from attention weights back to their softmax: casts, dropout, the slice without sink; else []."""
    path = []
    while isinstance(node, Node):
        path.append(node)
        if node.target in SOFTMAXES:
            return path
        if node.target not in (*CASTS, F.dropout, operator.getitem):
            return []
        node = node.args[0]
    return []


def match_form(attention: Node) -> Form:
    """Return the form that an attention computes. Raises: NoMatch, with the reason."""
    form = match_sdpa(attention) if attention.target is F.scaled_dot_product_attention else match_eager(attention)
    if form.mask is not None:
        mask, tokens = value_of(form.mask), value_of(form.keys).shape[2]
        if mask.dim() != 4 or (statically_known_true(mask.shape[3] == 1) and not statically_known_true(tokens == 1)):
            raise NoMatch(f"its mask {tuple(mask.shape)} has no column for each key", by_model=True)
    return form


def match_sdpa(node: Node) -> Form:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("dropout_p"):
        raise NoMatch("it uses dropout: call model.eval()")
    scale = given.get("scale")
    if scale is None:
        scale = int(value_of(given["query"]).shape[-1]) ** -0.5
    return Form(
        given["query"], unrepeated(given["key"]), unrepeated(given["value"]), number(scale),
        mask=given.get("attn_mask"), causal=bool(given.get("is_causal")),
    )  # fmt: skip


def number(value: object) -> float:
    """Return a constant; under dynamic=True it is a symbolic float, and Dynamo adds a guard."""
    return float(value_of(value) if isinstance(value, Node) else value)  # type: ignore[arg-type]


def match_eager(attention: Node) -> Form:
    """Walk back from the product with the values to q·kᵀ, and collect the operations on the scores."""
    path = softmax_path(attention.args[0])
    softmax = path[-1]
    if argument(softmax, 1, "dim") not in (-1, 3):
        raise NoMatch("its softmax is not over the keys")
    form = Form(q=softmax, keys=softmax, values=unrepeated(attention.args[1]))
    at, stage = softmax.args[0], -1
    while not (isinstance(at, Node) and at.target in MATMULS):
        if not isinstance(at, Node):
            raise NoMatch("its scores do not come from a product of queries and keys")
        masked = form.mask is not None
        step, at = step_back(at, form)
        if step == MASK and stage == SCALE and not masked and form.scale > 0:  # only a scale may come before this mask
            form.scaled_mask, step = True, SCALE
        if step < stage or step == stage != SCALE:
            raise NoMatch("its scores are scaled, capped, masked and shifted in an order that is not known")
        stage = stage if step == CAST else step
    check_weights(path[:-1], form)
    form.q, form.keys = at.args[0], untransposed(at.args[1])  # type: ignore[assignment]
    return form


def check_weights(path: list[Node], form: Form) -> None:
    """Require that only casts, inactive dropout and the sink's removal lie between softmax and values."""
    dropped = 0
    for node in path:
        if node.target is F.dropout and argument(node, 1, "p") and argument(node, 2, "training"):
            raise NoMatch("it uses dropout: call model.eval()")
        if node.target is operator.getitem:
            if node.args[1] != (Ellipsis, slice(None, -1, None)):
                raise NoMatch("some of its attention weights are cut off")
            dropped += 1
    if dropped != (form.sinks is not None):
        raise NoMatch("its sink is not dropped from its attention weights in a known way")


def step_back(node: Node, form: Form) -> tuple[int, object]:
    """Match one operation on the scores; returns its stage and the scores before it."""
    first, second = node.args[0], node.args[1] if len(node.args) > 1 else None
    constant = isinstance(second, (int, float))
    if node.target in CASTS:
        return CAST, first
    if node.target in (torch.sub, operator.sub, "sub") and isinstance(second, Node) and value_of(second).shape[-1] == 1:
        return SHIFT, first
    if node.target is torch.cat and isinstance(first, (list, tuple)) and len(first) == 2:
        if argument(node, 1, "dim") not in (-1, 3):
            raise NoMatch("its scores are concatenated with something that is no sink")
        form.sinks = sink_parameter(first[1], heads=value_of(node).shape[1])
        return SINKS, first[0]
    if node.target in (torch.add, operator.add, "add") and isinstance(second, Node):
        if not value_of(second).is_floating_point():
            raise NoMatch("what is added to its scores is no mask")
        form.mask = second
        return MASK, first
    if node.target in (torch.mul, operator.mul, "mul") and constant:
        if isinstance(first, Node) and first.target in (torch.tanh, "tanh"):
            return SOFTCAP, uncapped(first, float(second), form)  # type: ignore[arg-type]
        form.scale *= second  # type: ignore[operator]
        return SCALE, first
    if node.target in (operator.truediv, torch.div, "div") and constant:
        form.scale /= second  # type: ignore[operator]
        return SCALE, first
    raise NoMatch(f"its scores pass through {called_name(node)}, which is not known")


def uncapped(tanh: Node, cap: float, form: Form) -> object:
    """Return the scores before tanh(scores / cap) · cap."""
    inner = tanh.args[0]
    if not (isinstance(inner, Node) and inner.target in (operator.truediv, torch.div) and inner.args[1] == cap):
        raise NoMatch("its scores pass through a tanh that is no softcap")
    form.softcap = cap
    return inner.args[0]


def sink_parameter(node: Node, heads: int) -> Node:
    """Return the sinks [Hq] before their reshape to a column and its expand."""
    column = value_of(node)
    while node.target in ("expand", "reshape", "view", "to"):
        node = node.args[0]  # type: ignore[assignment]
    if value_of(node).shape != (heads,) or column.dim() != 4 or column.shape[1] != heads or column.shape[3] != 1:
        raise NoMatch("its sinks are not one number a head")
    return node


def untransposed(node: object) -> Node:
    if not isinstance(node, Node) or node.target not in ("transpose", torch.transpose):
        raise NoMatch("its keys are not transposed in a known way")
    if sorted(dim % 4 for dim in node.args[1:]) != [2, 3]:  # type: ignore[operator]
        raise NoMatch("its keys are not transposed in a known way")
    return unrepeated(node.args[0])


def unrepeated(node: object) -> Node:
    """Return the input of repeat_kv, keys[:, :, None].expand(...).reshape(...): query head h uses KV head h // n."""
    node = uncast(node)
    if node.target not in ("reshape", "view"):
        return node
    expand = node.args[0]
    if not isinstance(expand, Node) or expand.target != "expand":
        raise NoMatch("its keys or values are reshaped in an unknown way")
    index = expand.args[0]
    where = index.args[1] if isinstance(index, Node) and index.target is operator.getitem else None
    if not isinstance(where, tuple) or len(where) < 3 or [*where[:2], *where[3:]] != [WHOLE] * (len(where) - 1):
        raise NoMatch("its keys or values are expanded in an unknown way")
    repeated, whole = value_of(expand), value_of(node)
    if where[2] is not None or repeated.dim() != 5 or whole.shape[1] != repeated.shape[1] * repeated.shape[2]:
        raise NoMatch("its keys or values are repeated in an unknown way")
    return uncast(index.args[0])  # type: ignore[union-attr]


def uncast(node: object) -> Node:
    while isinstance(node, Node) and node.target in ("contiguous", "to"):
        before = node.args[0]
        if value_of(node).dtype != value_of(before).dtype:  # type: ignore[arg-type]
            raise NoMatch("its keys or values are cast between the cache and the attention")
        node = before
    if not isinstance(node, Node) or not isinstance(value_of(node), Tensor):
        raise NoMatch("its keys or values are not a tensor of the graph")
    return node


def argument(node: Node, position: int, name: str) -> object:
    """Return an argument of a call, by position or by name."""
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else None)
