"""`hold(cache, model)` converts a plain cache into one that the compiled model continues; `materialize` the reverse."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specache_compile.compile.compiled_options import required_options
from specache_compile.errors import SpecacheError, split_session
from specache_compile.methods import METHODS
from specache_compile.methods.field import LayerShape
from specache_compile.model_key import decoder_of, prefill_key
from specache_compile.options import MethodOptions
from specache_compile.passes.phase import PREFILL
from specache_compile.passes.reading.sites import PARTS
from specache_compile.rope_switch import rope_switch
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.ranks import ranks_of
from specache_compile.runtime.records import find_record
from specache_compile.runtime.session import Session, held_layers, plain_already, sessions_of
from specache_compile.runtime.step import Step, opened

Pairs = tuple[Tensor, Tensor]
# Names of a bias of the key projection, and of RoPE's frequencies of layers that keep all pairs, in models.
KEY_BIAS = re.compile(r"(k_proj|key|qkv|kv|c_attn)\w*(\.base_layer)?\.bias$")
FREQUENCIES = re.compile(r"(^|\.)(full_attention_)?inv_freq$")
# The projection of latent attention, whose cache stays Hugging Face's own.
LATENTS = re.compile(r"(^|\.)kv_b_proj\.")


def hold(cache: DynamicCache, model: torch.nn.Module, attention_mask: Tensor | None = None) -> DynamicCache:
    """Convert a plain cache into one that the compiled model continues.

    The plain cache may come from the uncompiled model, another process, or a prefix that many prompts share. The same
    weights must have filled it.

    Args:
        cache: a DynamicCache with keys and values [B, H, n, d]; it is not changed. Sliding layers stay plain.
        model: a model with the same weights, compiled with this backend.
        attention_mask: [B, n], 1 for tokens and 0 for padding; None if no row is padded.

    Returns:
        A cache that the backend holds; for a model with latent attention, whose cache stays plain, a copy.

    Raises:
        SpecacheError: the model is not compiled or is split over ranks, or the cache is held already. Also for layers
            of other classes than DynamicLayer and DynamicSlidingWindowLayer, for layers that differ in length or
            device, and for methods that drop pairs during the prefill.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)  # uncompiled
        model.compile(backend="specache")
        cache = sc.hold(sc.cache_of(output), model)
        model.generate(output.sequences, **sc.with_cache(cache), max_new_tokens=4)
    """
    options = required_options(model, "hold")
    if reason := reason_not_to_hold(options):
        raise not_to_be_held(reason)
    if has_latents(model):
        return copy.deepcopy(cache)
    return taken_over(cache, model, options, attention_mask, lambda step, pairs: step.fill(pairs))


def materialize(cache: DynamicCache) -> DynamicCache:
    """Return a plain copy of a held cache, with real keys and values.

    The copy has the cached values bit for bit; with `host_bits=8` they have been rounded once to 8 bits.

    Args:
        cache: a cache that the backend holds; it stays usable.

    Returns:
        A DynamicCache with keys and values [B, H, n, d] in the model's dtype, on the model's device.

    Raises:
        SpecacheError: the cache is plain already, or its method does not keep all pairs.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        inputs = tokenizer("Hello", return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        print(sc.materialize(sc.cache_of(output)).layers[0].keys.shape)
    """
    if not sessions_of(cache):
        raise plain_already()
    plain = twin(cache)
    for layer, copied in zip(held_layers(cache), held_layers(plain), strict=True):
        for part in PARTS:
            handle = getattr(layer, part).handle
            handle.session.replay(handle.version, handle.edits)
            setattr(copied, part, handle.session.plain(handle.site, part))
            setattr(layer, part, handle.session.held(handle.site, part))
    return plain


@torch.inference_mode(False)
@torch.no_grad()
def taken_over(
    cache: DynamicCache, model: torch.nn.Module, options: MethodOptions, attention_mask: Tensor | None,
    fill: Callable[[Step, Sequence[Pairs]], object],
) -> DynamicCache:  # fmt: skip
    """Convert a plain cache under these options; `fill` stores the sites' pairs in the tiers."""
    pairs = [pairs_of(number, layer) for number, layer in enumerate(cache.layers)]
    sites = sites_of(cache, options)
    if ranks_of(list(model.parameters())) is not None:
        raise split_session()
    lengths = [cache.get_seq_length(number) for number in range(len(pairs))]
    if reason := reason_of_shapes(pairs, lengths, sites, attention_mask, model):
        raise not_to_be_held(reason)
    biased = frequencies_of(model) is not None and any(
        KEY_BIAS.search(name) for name, _ in decoder_of(model).named_parameters()
    )
    kept = [pairs[number] for number in sites]
    layers = [
        LayerShape(keys.shape[1], keys.shape[3], keys.dtype, keys.device, site, biased)
        for site, (keys, _) in enumerate(kept)
    ]
    batch, tokens = kept[0][0].shape[0], kept[0][0].shape[2]
    session = Session(options, layers, batch, tokens)
    set_model(session, model)
    session.progress.keys = (prefill_key(model, model.parameters()),) * batch
    record = find_record(model)
    is_causal = record is None or all(graph.captured.is_causal for graph in record.graphs)  # as far as they have shown
    with opened(session, tokens, attention_mask, is_causal) as step:
        fill(step, kept)
    held = twin(cache)
    for number in set(range(len(pairs))) - set(sites):
        held.layers[number].keys, held.layers[number].values = (part.clone() for part in pairs[number])
    for site, number in enumerate(sites):
        held.layers[number].keys, held.layers[number].values = (session.held(site, part) for part in PARTS)
    return held


def sites_of(cache: Any, options: MethodOptions) -> list[int]:
    """The numbers of the layers that are compressed: those that keep every pair."""
    whole = [number for number, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]
    return [number for number in whole if number not in options.exact_layers]


def twin(cache: Any) -> Any:
    """A copy of a cache, of the same class, with new lists and layer objects over the same keys and values. Recurrent
    states, which steps write in place, are copied."""
    other = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(other, name, list(value))
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in other.layers:
        for name, states in vars(layer).items():
            if isinstance(states, dict):  # recurrent states by number, or their flags
                copied = {n: state.clone() if isinstance(state, Tensor) else state for n, state in states.items()}
                setattr(layer, name, copied)
    return other


def pairs_of(number: int, layer: Any) -> Pairs:
    """A layer's keys and values; SpecacheError if they are not plain or are empty."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise not_to_be_held(
            f"layer {number} is a {type(layer).__name__}, not a DynamicLayer or a DynamicSlidingWindowLayer"
        )
    keys, values = layer.keys, layer.values
    if keys is None or values is None or not keys.numel():
        raise not_to_be_held(f"layer {number} is empty")
    if isinstance(keys, HeldTensor):
        raise SpecacheError(
            "hold: the specache backend holds this cache already. Use it as it is, or copy.deepcopy(cache)"
        )
    return keys, values


def reason_not_to_hold(options: MethodOptions) -> str | None:
    """Why a method's prefill does not keep every pair; None if it does."""
    if PREFILL.name in METHODS[options.method].recipe(options, 0).attend:
        return f"method {options.method!r} drops pairs during the prefill"
    return None


def reason_of_shapes(
    pairs: Sequence[Pairs], lengths: Sequence[int], sites: Sequence[int], mask: Tensor | None, model: torch.nn.Module
) -> str | None:
    """Why a cache's tensors do not fit together or do not fit the model; None if they do. lengths: tokens by layer."""
    if not pairs:
        return "it is empty"
    if not sites:
        return "option exact_layers lists all layers without a sliding window"
    first, _ = pairs[sites[0]]
    shape = (first.shape[0], first.shape[2])
    devices = {weight.device for weight in model.parameters()}
    for number, (keys, values) in enumerate(pairs):
        if keys.shape != values.shape or keys.dtype != values.dtype:
            return f"layer {number} has keys {tuple(keys.shape)} and values {tuple(values.shape)}"
        if (keys.shape[0], lengths[number]) != shape:
            return f"layer {number} has another number of rows or tokens than layer {sites[0]}"
        if keys.device != first.device or devices != {first.device}:
            where = ", ".join(sorted(map(str, devices)))
            return f"layer {number} is on {keys.device}, layer {sites[0]} on {first.device}, and the model on {where}"
    if mask is not None and (mask.dim() != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]):
        return f"attention_mask has shape {tuple(mask.shape)} for {shape[0]} rows of {shape[1]} tokens"
    return None


def set_model(session: Session, model: torch.nn.Module) -> None:
    """Set what a prefill graph would set: the weights and RoPE's frequencies, with their switch."""
    session.weights = [weakref.ref(weight) for weight in model.parameters()]
    session.rope_switch = rope_switch(model.config)
    session.tiers.frequencies = [frequencies_of(model)] * len(session.layers)


def has_latents(model: torch.nn.Module) -> bool:
    return any(LATENTS.search(name) for name, _ in model.named_parameters())


def frequencies_of(model: torch.nn.Module) -> Tensor | None:
    """RoPE's frequencies, a buffer of the model."""
    return next((buffer for name, buffer in decoder_of(model).named_buffers() if FREQUENCIES.search(name)), None)


def not_to_be_held(why: str) -> SpecacheError:
    return SpecacheError(f"hold: this cache cannot be held: {why}. Prefill the prompt with the compiled model instead")
