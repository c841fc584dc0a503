"""`hold(cache, model)`: a plain cache that was filled elsewhere, as one that the compiled model goes on from."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .compiled_options import options_of
from .errors import held_already, not_compiled, not_to_be_held, split_session
from .methods import METHODS, parse_options
from .methods.field import LayerShape
from .methods.low_bit import LowBitOptions
from .options import MethodOptions
from .passes.context import Part
from .passes.phase import PREFILL
from .runtime.held import HeldTensor
from .runtime.ranks import ranks_of
from .runtime.session import Session

PARTS: tuple[Part, Part] = ("keys", "values")
# A projection that adds a bias to the keys, by its name in the models that have one.
KEY_BIAS = re.compile(r"(k_proj|key|qkv|kv|c_attn)\w*\.bias$")


def hold(cache: DynamicCache, model: torch.nn.Module, attention_mask: Tensor | None = None) -> DynamicCache:
    """A held cache with the tokens of `cache`, plain keys and values [B, H, n, d] that the same weights have made: by
    the uncompiled model, on another machine, of a prefix that many prompts share. `model`, compiled by this backend,
    goes on from it as from a prompt that it read itself.

    attention_mask [B, n]: where rows are padded. `cache` stays as it is. SpecacheError where the backend has not
    compiled the model, where the cache is held, empty or keeps a window of its tokens alone, where the method drops
    pairs while it reads a prompt, and for a model on several ranks.
    """
    options = parse_options(given_of(model))
    pairs = [pairs_of(number, layer) for number, layer in enumerate(cache.layers)]
    sites = [number for number in range(len(pairs)) if number not in options.exact_layers]
    if not sites:
        raise not_to_be_held("no layer of it is one that the backend would hold")
    if ranks_of(list(model.parameters())) is not None:
        raise split_session()
    if (reason := reason_not_to_hold(options, model)) is not None:
        raise not_to_be_held(reason)
    session = session_for(options, [pairs[number] for number in sites], attention_mask)
    session.weights = [weakref.ref(weight) for weight in model.parameters()]
    held: Any = copy.copy(cache)
    held.layers = [copy.copy(layer) for layer in cache.layers]
    for number, (layer, (keys, values)) in enumerate(zip(held.layers, pairs, strict=True)):
        if number in sites:
            layer.keys, layer.values = (session.held(sites.index(number), part) for part in PARTS)
        else:
            layer.keys, layer.values = keys.clone(), values.clone()
    return held


def given_of(model: torch.nn.Module) -> Any:
    given = options_of(model)
    if given is None:
        raise not_compiled("hold")
    return given


def pairs_of(number: int, layer: Any) -> tuple[Tensor, Tensor]:
    """A layer's keys and values; SpecacheError where they are not plain, or not those of every token."""
    if type(layer) is not DynamicLayer:
        raise not_to_be_held(f"layer {number} of it, a {type(layer).__name__}, does not keep every token's pair")
    keys, values = layer.keys, layer.values
    if keys is None or values is None or not keys.numel():
        raise not_to_be_held(f"layer {number} of it is empty")
    if isinstance(keys, HeldTensor):
        raise held_already()
    return keys, values


def reason_not_to_hold(options: MethodOptions, model: torch.nn.Module) -> str | None:
    """Why what a plain cache has is not all that a prefill under these options keeps."""
    if PREFILL.name in METHODS[options.method].recipe(options, 0).attend:
        return f"method {options.method!r} chooses what it keeps while it reads a prompt"
    center = options.center if isinstance(options, LowBitOptions) else "never"
    biased = any(KEY_BIAS.search(name) for name, _ in model.named_parameters())
    if center == "always" or (center == "auto" and biased):
        return f"center={center!r} takes a mean off the keys as they were before RoPE, and center='never' would not"
    return None


@torch.inference_mode(False)
@torch.no_grad()
def session_for(
    options: MethodOptions, pairs: Sequence[tuple[Tensor, Tensor]], attention_mask: Tensor | None
) -> Session:
    """A session with every token's pairs in its tiers, put there by the ops that its method's prefill stores with."""
    layers = [
        LayerShape(keys.shape[1], keys.shape[3], keys.dtype, keys.device, site) for site, (keys, _) in enumerate(pairs)
    ]
    batch, _, tokens, _ = pairs[0][0].shape
    session = Session(options, layers, batch, tokens)
    session.begin(tokens, attention_mask)
    padding = session.padding if session.padded else None
    for site, (keys, values) in enumerate(pairs):
        for call in METHODS[session.options.method].recipe(session.options, site).stores:
            state = [session.state[site][name] for name in call.state]
            op = getattr(torch.ops.specache, call.op)
            op(keys.contiguous(), values.contiguous(), padding, session.cursor, *state, *call.settings)
    session.finish(tokens, PREFILL)
    return session
