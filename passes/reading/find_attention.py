"""Find the sites: each attention together with the cache update that feeds it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .attention_forms import Form, NoMatch, argument, is_attention, match_form
from .in_place import memory_of, mutated
from .latents import match_latents
from .masks import read_mask
from .nodes import ancestors_of, called_name, output_node, reached, value_of
from .sites import Found, LeftAlone, Site

# The type of `read_mask`.
ReadMask = Callable[[Node], tuple[bool, Node | None]]

WINDOW = "its keys and values are not kept as they are (a sliding window keeps its newest tokens)"
KEPT_CHANGED = "its cache keeps values computed from its keys and values: use DynamicCache, the default"
NOT_KEPT = "its cache does not keep its new keys and values: use DynamicCache, the default"
UNKNOWN_FORM = (
    "the attention that reads this cache update is in none of the forms that are known: 'sdpa', and 'eager' as most "
    "models write it. Leave out output_attentions, and use attn_implementation='sdpa' where this model has it"
)


def find_attention(
    graph_module: GraphModule, held: frozenset[str] = frozenset(), exact: frozenset[int] = frozenset()
) -> Found:
    """Find a graph's sites, without changing the graph.

        keys = cat([past_k, k], -2)        Site(q, k, v, mask, scale, past_k, past_v)
        values = cat([past_v, v], -2)
        out = sdpa(q, keys, values, mask)

    HF's two forms match: SDPA (keys direct, or through repeat_kv's expand and reshape) and the eager matmul, scale,
    softcap, mask, sinks, softmax, matmul. An attention that a tier op does not fully express, or whose cache update
    is not a plain concatenation, is left alone with a reason.

    Args:
        held: names of the placeholders that are held tensors.
        exact: numbers of attentions, in the graph's order, that the option exact_layers excludes.
    """
    packed = next((node for node in graph_module.graph.nodes if called_name(node) == "set_"), None)
    masks = functools.cache(read_mask)  # layers share them
    found = Found()
    for number, attention in enumerate(filter(is_attention, graph_module.graph.nodes)):
        try:
            if number in exact:
                raise NoMatch(f"option exact_layers lists attention {number}")
            form = match_form(attention)
            latents = match_latents(attention, form)
            if latents is not None:
                found = replace(found, latents=(*found.latents, latents))
                continue
            site = match_site(attention, form, found, held, masks)
            if packed is not None:
                raise NoMatch(
                    "the graph replaces an input's memory (set_). Where that is a weight that is packed in its first "
                    "call (bitsandbytes' 4-bit ones on a CPU), the next generation is rewritten"
                )
            found = replace(found, sites=(*found.sites, site))
        except NoMatch as reason:
            left_alone = LeftAlone(attention.name, str(reason), reason.by_model)
            found = replace(found, left_alone=(*found.left_alone, left_alone))
    if found.sites or found.left_alone or found.latents:
        return found
    return Found(left_alone=unread_updates(graph_module))


@dataclass(frozen=True)
class Update:
    """A cache update, `cat([past, new], -2)`.

    node: the concatenation.
    past: None where it is empty.
    """

    node: Node
    past: Node | None
    new: Node


def match_site(attention: Node, form: Form, before: Found, held: frozenset[str], masks: ReadMask) -> Site:
    """Return the site of an attention, numbered after the sites in `before`."""
    for part in (form.keys, form.values):
        check_read_as_cached(part)
    keys, values = match_update(form.keys), match_update(form.values)
    if (keys.past is None) != (values.past is None):
        raise NoMatch("its keys and its values have different pasts")
    check_mask(form, (keys.node, values.node))
    for update in (keys, values):
        check_owned(update, attention, held)
    check_shapes(form, keys, values, value_of(attention))
    tokens = value_of(form.q).shape[2]
    if keys.past is not None and form.mask is None and (form.causal or not statically_known_true(tokens == 1)):
        raise NoMatch("its new tokens see each other by no mask that is known (bidirectional attention?)")
    mask, padding = carried_mask(form, before.padding, masks)
    heads, head_dim = value_of(keys.new).shape[1::2]
    frequencies = frequencies_of(keys.new, int(head_dim))
    return Site(
        len(before.sites), attention, form.q, keys.new, values.new, keys.node, values.node, keys.past, values.past,
        mask, padding, form.sinks, form.scale, form.softcap,
        heads=int(heads), query_heads=int(value_of(form.q).shape[1]), head_dim=int(head_dim),
        frequencies=frequencies,
        biased_keys=frequencies is not None and has_bias(keys.new),
    )  # fmt: skip


def carried_mask(form: Form, known: str | None, masks: ReadMask) -> tuple[Node | None, str | None]:
    """Return the mask for a site's op, None if it is only causality and padding; and the padding's name.

    known: the padding of the sites before. A session has one padding; the op gets a mask with another one unchanged.
    """
    if form.mask is None:
        return None, None
    causal, padding = masks(form.mask)
    if causal and (padding is None or known in (None, padding.name)):
        return None, None if padding is None else padding.name
    if form.scaled_mask:
        raise NoMatch("its mask is scaled with its scores, and hides more than later tokens and padding")
    one_row = statically_known_true(value_of(form.mask).shape[2] == 1)
    if one_row and not statically_known_true(value_of(form.q).shape[2] == 1):
        raise NoMatch("its mask hides the same tokens from all its new ones (bidirectional attention?)")
    return form.mask, None


def check_read_as_cached(part: Node) -> None:
    """Require that an attention reads the cache update itself, not a value computed from it."""
    if is_slice_of_tokens(part) and is_kept(part.all_input_nodes[0]):
        raise NoMatch(WINDOW)
    if part.target is not torch.cat and any(is_kept(source) for source in sources_of(part)):
        raise NoMatch(
            "its keys or values are computed from what the cache keeps (as in latent attention), and the form in which "
            "this model does so is not rewritten yet"
        )


def is_slice_of_tokens(node: Node) -> bool:
    """Return whether a node is `source[:, :, a:b, :]`."""
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    if not isinstance(source, Node) or not isinstance(index, tuple):
        return False
    whole = [taken == slice(None) for taken in index]
    return isinstance(index[-2], slice) and whole == [True, True, False, True]


def is_update(node: Node) -> bool:
    """Return whether a node is a cache update."""
    try:
        match_update(node)
    except NoMatch:
        return False
    return True


def is_kept(node: Node) -> bool:
    """Return whether a node is a cache update that the cache keeps whole."""
    return is_update(node) and any(user.op == "output" for user in node.users)


def sources_of(node: Node) -> Iterator[Node]:
    """Yield every node that this one depends on, in-place writes to its memory included."""
    writers: dict[int | None, list[Node]] = {}
    for other in node.graph.nodes:
        for target in mutated(other):
            if (memory := memory_of(target)) is not None:
                writers.setdefault(memory, []).append(other)
    return reached([node], lambda at: (*at.all_input_nodes, *writers.get(memory_of(at), ())))


def match_update(node: Node) -> Update:
    if node.target is not torch.cat:
        raise NoMatch(
            "its keys or values are no concatenation of past and new ones: use DynamicCache, the default, and no graph "
            "break before the attention (output_attentions with 'sdpa' causes one)"
        )
    parts, dim = node.args[0], argument(node, 1, "dim")
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-2, 2) or value_of(node).dim() != 4:
        raise NoMatch("its cache update is not cat([past, new], -2)")
    past, new = parts
    if statically_known_true(value_of(past).numel() == 0):
        return Update(node, None, new)
    if past.op != "placeholder":
        raise NoMatch("its past is computed in the graph")
    return Update(node, past, new)


def check_owned(update: Update, attention: Node, held: frozenset[str]) -> None:
    """Require that the cache keeps the update unchanged, and that only this attention reads the update or its past."""
    check_kept(update.node, attention)
    if read_elsewhere(update.node, attention):
        raise NoMatch("its keys, values or weights are read elsewhere too (layers that share them, output_attentions)")
    if update.past is None:
        return
    if update.past.name not in held:
        raise NoMatch(
            "its past is a plain tensor: the cache was filled by an uncompiled model, or by a call left exact"
        )
    if any(user is not update.node and is_used(user) for user in update.past.users):
        raise NoMatch(f"its past {update.past.name} is read elsewhere too")


def check_kept(update: Node, attention: Node) -> None:
    """Require that the cache keeps the update unchanged."""
    if any(user.op == "output" for user in update.users):
        return
    if any(is_slice_of_tokens(user) and is_used(user) for user in update.users):
        raise NoMatch(WINDOW)
    raise NoMatch(KEPT_CHANGED if read_elsewhere(update, attention) else NOT_KEPT)


def is_used(node: Node) -> bool:
    """Return whether an output depends on a node; sizes that Dynamo only guards on have no users."""
    return any(user.op == "output" for user in reached([node], lambda at: at.users))


def read_elsewhere(update: Node, attention: Node) -> bool:
    """Return whether an output other than the update depends on it by a path that avoids the attention."""
    others = [user for user in update.users if user.op != "output" and user is not attention]
    users = reached(others, lambda at: (user for user in at.users if user is not attention))
    return any(user.op == "output" for user in users)


def check_mask(form: Form, updates: tuple[Node, Node]) -> None:
    """Require that a mask does not depend on cached keys or values, which no other node may read."""
    if form.mask is not None and any(behind in updates for behind in ancestors_of(form.mask)):
        raise NoMatch("its mask is computed from the keys or values that its cache keeps", by_model=True)


def check_shapes(form: Form, keys: Update, values: Update, out: torch.Tensor) -> None:
    """Require one head size, one dtype, whole query groups, and as many new keys as queries."""
    q, k, v = (value_of(node) for node in (form.q, keys.new, values.new))
    if q.dim() != 4 or k.shape != v.shape or q.shape[3] != k.shape[3]:
        raise NoMatch(
            f"queries, keys and values have unlike shapes: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if len({q.dtype, k.dtype, v.dtype, out.dtype}) > 1:
        raise NoMatch(f"queries, keys and values have unlike dtypes: {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[1] % k.shape[1] or not statically_known_true(q.shape[2] == k.shape[2]):
        raise NoMatch(f"queries {tuple(q.shape)} do not go with keys {tuple(k.shape)}")


def frequencies_of(keys: Node, head_dim: int) -> str | None:
    """Return the name of the input [h] with RoPE's frequencies, from which the cosines of the keys are computed."""
    cosines = (node for node in ancestors_of(keys) if node.target in ("cos", torch.cos))
    for node in (behind for cos in cosines for behind in ancestors_of(cos)):
        value = value_of(node)  # a number for a length
        is_vector = node.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim() == 1
        if is_vector and value.is_floating_point() and statically_known_true(2 * value.shape[0] <= head_dim):
            return node.name
    return None


def has_bias(keys: Node) -> bool:
    """Return whether the linear layer that computes the keys adds a bias."""
    projection = next((node for node in ancestors_of(keys) if node.target is F.linear), None)
    return projection is not None and argument(projection, 2, "bias") is not None


def unread_updates(graph_module: GraphModule) -> tuple[LeftAlone, ...]:
    """Return the cache updates of a graph without recognised attentions: it has attentions in an unknown form."""
    updates = [node for node in output_node(graph_module).all_input_nodes if is_kept(node)]
    return tuple(LeftAlone(node.name, UNKNOWN_FORM) for node in updates)
