"""A method's recipe for a site: one attention op per phase, and the ops that store the new pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specache_compile.kernels.state.layout import StoredTiers


@dataclass(frozen=True)
class OpCall:
    """One call of an op at a site. The op gets each operand by the name in its schema.

    op: name of the op.
    state: operand → name of the state tensor.
    settings: operand → value.
    scores: an attention op returns (out, selection scores) instead of out.
    turned: name of a state tensor [B, H, n, ...]. If that tensor is not empty, the operand `frequencies` is RoPE's
        frequencies [h], or None if none were found.

    The other operands are the site's. An attention's are q, k, v, mask, sinks, cursor, scale and softcap; a mask of one
    row is padding, to which the op adds causality. A store's are k, v, padding and cursor. A selector's is scores
    float32 [B, H, C]: the last lane's attention weight of each token; below 0 for tokens that are no candidates.
    """

    op: str
    state: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    scores: bool = False
    turned: str = ""


def named(*fields: str) -> dict[str, str]:
    """Return `OpCall.state` of state tensors that have the names of their operands."""
    return dict(zip(fields, fields, strict=True))


def operands(op: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return an op's operands in the order of its schema; KeyError where one without default is missing.

    The operand `tiers` is a list of the state tensors in `StoredTiers`.
    """
    schema = getattr(torch.ops.specache, op).default._schema.arguments
    given = {"tiers": [given[name] for name in StoredTiers._fields if name in given], **given}
    return tuple(given[each.name] for each in schema if each.name in given or not each.has_default_value())


def check_names(call: OpCall) -> None:
    """TypeError if the op has no operand of a name that a recipe gives."""
    schema = getattr(torch.ops.specache, call.op).default._schema.arguments
    unknown = {*call.state, *call.settings}.difference(StoredTiers._fields, (each.name for each in schema))
    if unknown:
        raise TypeError(f"{call.op} has no operand {', '.join(sorted(unknown))}")


@dataclass(frozen=True)
class Recipe:
    """A method at one site.

    attend: name of a phase → its attention. A missing phase keeps Hugging Face's exact attention over the new pairs
        alone, as in a prefill.
    stores: the calls that store the new pairs.
    selector: selects the pairs for the next step's slots: writes `selected` int32 [B, H, k], tokens, or -1 for none.
        None for a method that fetches nothing.
    corrects: each step selects again, by its own token, before its attention.
    """

    attend: Mapping[str, OpCall]
    stores: tuple[OpCall, ...]
    selector: OpCall | None = None
    corrects: bool = False
