"""Find the sites: each attention together with the cache update that feeds it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .context import Context, LeftAlone, PassReport, Site, value_of

MATMULS = (torch.matmul, operator.matmul, "matmul", torch.bmm)
PASS_THROUGH = ("contiguous", "to", "type_as", "float", torch.clone, "clone")


class NoMatch(Exception):
    """Why an attention cannot be rewritten; the message becomes the reason that a person reads."""


@dataclass
class Scores:
    """What happens between q·kᵀ and the product with v."""

    scale: float = 1.0
    softcap: float | None = None
    mask: Node | None = None
    sinks: Node | None = None


def find_attention(graph_module: GraphModule, context: Context) -> tuple[GraphModule, PassReport]:
    """Fill `context.sites`; the graph stays as it is.

        keys = cat([past_k, k], -2)        Site(q, k, v, mask, scale, past_k, past_v)
        values = cat([past_v, v], -2)
        out = sdpa(q, keys, values, mask)

    Both forms that HF writes are found: SDPA (keys direct, or behind repeat_kv's expand and reshape) and the eager
    matmul, scale, softcap, mask, sinks, softmax, matmul. An attention whose cache update is not a plain
    concatenation is left as it is, with the reason.
    """
    for attention in graph_module.graph.nodes:
        if not is_attention(attention):
            continue
        try:
            context.sites.append(match_site(attention, len(context.sites), context.held))
        except NoMatch as reason:
            context.left_alone.append(LeftAlone(attention.name, str(reason)))
    drop_inconsistent(context)
    return graph_module, PassReport(
        "find_attention", {"sites": len(context.sites), "left alone": len(context.left_alone)}
    )


def is_attention(node: Node) -> bool:
    """An SDPA call, or the matmul with the values behind a softmax."""
    if node.target is F.scaled_dot_product_attention:
        return True
    return node.target in MATMULS and softmax_behind(node.args[0]) is not None


def softmax_behind(node: object) -> Node | None:
    """The softmax that a node's value comes from, through casts, dropout and the slice that drops the sink."""
    while isinstance(node, Node):
        if node.target in (F.softmax, torch.softmax, "softmax"):
            return node
        if node.target not in (*PASS_THROUGH, F.dropout, operator.getitem):
            return None
        node = node.args[0]
    return None


def match_site(attention: Node, layer: int, held: frozenset[str]) -> Site:
    if attention.target is F.scaled_dot_product_attention:
        q, keys, values, scores = match_sdpa(attention)
    else:
        q, keys, values, scores = match_eager(attention)
    cat_k, past_k, k = match_update(keys)
    cat_v, past_v, v = match_update(values)
    if (past_k is None) != (past_v is None):
        raise NoMatch("its keys and its values have different pasts")
    query_shape, key_shape, value_shape = (value_of(node).shape for node in (q, k, v))
    if len(query_shape) != 4 or key_shape != value_shape:
        raise NoMatch(f"keys {tuple(key_shape)} and values {tuple(value_shape)} have different shapes")
    for node, past in ((cat_k, past_k), (cat_v, past_v)):
        if not any(user.op == "output" for user in node.users):
            raise NoMatch("its keys and values are not kept as they are (a sliding window keeps its newest tokens)")
        if past is not None and past.name not in held:
            raise NoMatch("its past is a plain tensor: the cache was filled by an uncompiled model")
        if past is not None and any(user.users for user in past.users if user is not node):
            raise NoMatch(f"its past {past.name} is read elsewhere too")
    return Site(
        layer, attention, q, k, v, cat_k, cat_v, past_k, past_v, scores.mask, scores.sinks,
        scores.scale, scores.softcap,
        heads=int(key_shape[1]), query_heads=int(query_shape[1]), head_dim=int(key_shape[3]),
    )  # fmt: skip


def match_sdpa(node: Node) -> tuple[Node, Node, Node, Scores]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("dropout_p"):
        raise NoMatch("it uses dropout: call model.eval()")
    scale = given.get("scale")
    if scale is None:
        scale = int(value_of(given["query"]).shape[-1]) ** -0.5
    scores = Scores(number(scale), mask=given.get("attn_mask"))
    return given["query"], unrepeated(given["key"]), unrepeated(given["value"]), scores


def number(value: object) -> float:
    """A constant; under dynamic=True it is a symbolic float, which Dynamo then guards on."""
    return float(value_of(value) if isinstance(value, Node) else value)  # type: ignore[arg-type]


def match_eager(node: Node) -> tuple[Node, Node, Node, Scores]:
    """Walk back from the product with the values to q·kᵀ, noting what is done to the scores on the way."""
    scores = Scores()
    softmax = softmax_behind(node.args[0])
    assert softmax is not None
    at: object = softmax.args[0]
    while True:
        if not isinstance(at, Node):
            raise NoMatch("its scores do not come from a product of queries and keys")
        if at.target in MATMULS:
            break
        at = step_back(at, scores)
    q, transposed = at.args[0], at.args[1]
    if not isinstance(transposed, Node) or transposed.target not in ("transpose", torch.transpose):
        raise NoMatch("its keys are not transposed in a known way")
    return q, unrepeated(transposed.args[0]), unrepeated(node.args[1]), scores


def step_back(node: Node, scores: Scores) -> object:
    """One operation on the scores, last to first: scale, softcap, mask, sinks, or the shift by the maximum."""
    first, second = node.args[0], node.args[1] if len(node.args) > 1 else None
    if node.target in PASS_THROUGH:
        return first
    if node.target in (torch.sub, operator.sub) and isinstance(second, Node) and is_maximum(second):
        return first
    if node.target is torch.cat and isinstance(first, (list, tuple)) and len(first) == 2:
        scores.sinks = sink_parameter(first[1])
        return first[0]
    if node.target in (torch.add, operator.add) and isinstance(second, Node):
        if scores.mask is not None:
            raise NoMatch("two terms are added to its scores")
        scores.mask = second
        return first
    if node.target in (torch.mul, operator.mul) and isinstance(second, (int, float)):
        if isinstance(first, Node) and first.target in (torch.tanh, "tanh"):
            inner = first.args[0]
            if isinstance(inner, Node) and inner.target in (operator.truediv, torch.div) and inner.args[1] == second:
                scores.softcap = float(second)
                return inner.args[0]
            raise NoMatch("its scores pass through a tanh that is no softcap")
        scores.scale *= second
        return first
    if node.target in (operator.truediv, torch.div) and isinstance(second, (int, float)):
        scores.scale /= second
        return first
    raise NoMatch(f"its scores pass through {node.target}, which is not known")


def is_maximum(node: Node) -> bool:
    if node.target in ("max", torch.max, "amax", torch.amax):
        return True
    return any(
        is_maximum(arg) for arg in node.args[:1] if isinstance(arg, Node) and node.target in (operator.getitem, getattr)
    )


def sink_parameter(node: Node) -> Node:
    """The [Hq] sinks behind their reshape and expand."""
    while node.target in ("expand", "reshape", "view", "to"):
        node = node.args[0]  # type: ignore[assignment]
    if value_of(node).dim() != 1:
        raise NoMatch("its sinks are not one number a head")
    return node


def unrepeated(node: object) -> Node:
    """The node before repeat_kv: keys[:, :, None].expand(...).reshape(...)."""
    if not isinstance(node, Node):
        raise NoMatch("its keys or values are not a tensor of the graph")
    while node.target in ("contiguous", "to") and isinstance(node.args[0], Node):
        if value_of(node).dtype != value_of(node.args[0]).dtype:
            raise NoMatch("its keys or values are cast between the cache and the attention")
        node = node.args[0]
    if node.target not in ("reshape", "view"):
        return node
    expand = node.args[0]
    if not isinstance(expand, Node) or expand.target != "expand":
        raise NoMatch("its keys or values are reshaped in an unknown way")
    index = expand.args[0]
    if not isinstance(index, Node) or index.target is not operator.getitem:
        raise NoMatch("its keys or values are expanded in an unknown way")
    return index.args[0]  # type: ignore[return-value]


def match_update(node: Node) -> tuple[Node, Node | None, Node]:
    """`cat([past, new], -2)`: the node, the past (None where it is empty), the new pairs."""
    if node.target is not torch.cat:
        raise NoMatch(
            "its keys or values are no concatenation of a past and new ones (a static, quantised or absent cache): "
            "use DynamicCache, the default"
        )
    parts, dim = node.args[0], node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-2, 2):
        raise NoMatch("its cache update is not cat([past, new], -2)")
    past, new = parts
    if past.target is torch.tensor:
        return node, None, new
    if past.op != "placeholder":
        raise NoMatch("its past is computed in the graph")
    return node, past, new


def drop_inconsistent(context: Context) -> None:
    """Several attentions on one cache update (shared KV) cannot be owned by one site: none of them is."""
    owners: dict[Node, int] = {}
    for site in context.sites:
        for node in (site.cat_k, site.cat_v):
            owners[node] = owners.get(node, 0) + 1
    shared = [s for s in context.sites if owners[s.cat_k] > 1 or owners[s.cat_v] > 1]
    for site in shared:
        context.left_alone.append(LeftAlone(site.attention.name, "several attentions share its keys and values"))
    context.sites = [site for site in context.sites if site not in shared]
    for layer, site in enumerate(context.sites):
        site.layer = layer
