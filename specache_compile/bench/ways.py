"""The ways to decode: each is a model and a cache that already holds the context.

The uncompiled model reads a context once. Every way starts from its keys and values if the way's cache takes them.
Weights are shared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, QuantizedCache, StaticCache

import specache_compile as sc
from specache_compile.command_line.bench import BASELINES
from specache_compile.compat import with_cache
from specache_compile.errors import OptionError, SpecacheError, first_line
from specache_compile.evaluation.settings import UNCOMPILED, parse_setting
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.session import session_of
from specache_compile.runtime.state import device_total, fields_of, tier_totals

from .llama_cpp import LLAMA_CPP, why_no_llama_cpp

COMPILED, STATIC = "compiled", "compiled-static"
# Hugging Face's quantised caches. They dequantise the whole cache in every step, layer by layer.
QUANTIZED: dict[str, dict[str, Any]] = {
    "quanto-2bit": {"backend": "quanto", "nbits": 2, "axis_key": 0, "axis_value": 0},
    "hqq-2bit": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
    "hf-fp8": {"backend": "fp8"},
}
# How many numbers hqq packs at once: groups of 64, four to a byte.
HQQ_GROUPS = {"hqq-2bit": 4 * 64}
CHUNK = 512
NONE: Mapping[str, Any] = MappingProxyType({})


def can_extend(name: str) -> bool:
    """Whether a way's cache takes several tokens behind others, and can be copied for it."""
    return name in (UNCOMPILED, COMPILED) or name not in BASELINES


def check_name(name: str) -> None:
    """OptionError where `name` is neither a baseline nor a setting as `specache eval` takes it."""
    if name not in BASELINES:
        try:
            parse_setting(name)
        except OptionError as error:
            raise OptionError(f"{error}; baselines are {', '.join(BASELINES)}") from None


def why_not(
    name: str, config: PreTrainedConfig, gguf: Path | None, batches: Sequence[int], contexts: Sequence[int]
) -> str | None:
    """Why a way cannot run here; None where it can."""
    if name in LLAMA_CPP:
        return "one sequence alone" if max(batches) > 1 else why_no_llama_cpp(gguf)
    if name in (STATIC, *QUANTIZED) and any(DynamicCache(config=config).is_sliding):
        return "the model has sliding layers, whose context this cache can only take as a prompt"
    if name in HQQ_GROUPS:
        text = config.get_text_config()
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        numbers = math.gcd(*(n * rows for n in contexts for rows in batches)) * text.num_key_value_heads * width
        if numbers % HQQ_GROUPS[name]:
            return f"hqq takes whole quadruples of groups, {HQQ_GROUPS[name]} numbers of a layer's keys"
    if name in QUANTIZED:
        try:
            QuantizedCache(config=config, **QUANTIZED[name])
        except (ImportError, ValueError) as error:
            return first_line(error)
    return None


class Way(Protocol):
    """step: decodes one token.
    bytes: the cache's, on the device and on the host.
    """

    def step(self) -> None: ...
    def bytes(self) -> tuple[int, int]: ...


@dataclass
class Decoding:
    """A model and its cache.

    token [B, 1]: the next token to decode.
    position: its place.
    """

    model: Any
    cache: Cache
    token: Tensor
    position: int

    @torch.no_grad()
    def step(self) -> None:
        place = torch.full_like(self.token, self.position)
        out = self.model(self.token, **with_cache(self.cache), position_ids=place, use_cache=True)
        self.token = out.logits[:, -1:].argmax(-1)
        self.position += 1

    def extension(self, ids: Tensor) -> Callable[[], Any]:
        """A call to time, which reads `ids` [B, T] behind a copy of the cache.

        Their positions are those of the newest cached tokens: a model has no others behind its longest context.
        """
        cache = copy.deepcopy(self.cache)
        place = torch.arange(self.position - ids.shape[1], self.position, device=ids.device).expand_as(ids)
        given = {**with_cache(cache), "use_cache": True, "logits_to_keep": 1}
        return torch.no_grad()(lambda: self.model(ids, position_ids=place, **given))

    def bytes(self) -> tuple[int, int]:
        session = session_of(self.cache)
        tiers = {} if session is None else session.statistics.bytes_by_tier
        return device_total(tiers) + self.plain_bytes(), tiers.get("host", 0)

    def plain_bytes(self) -> int:
        """The bytes of the layers that no session holds."""
        layers: list[Any] = self.cache.layers
        plain = [layer for layer in layers if not isinstance(getattr(layer, "keys", None), HeldTensor)]
        return sum(t.nbytes for layer in plain for t in tensors_of(vars(layer)))

    def bytes_in_16_bits(self) -> int:
        """The bytes on the device, with 16 bits for each number that has the model's dtype. This method's cache must be
        a DynamicCache."""
        plain = self.plain_bytes() * 2 // self.model.dtype.itemsize
        session = session_of(self.cache)
        if session is None:
            return plain
        tiers = session.tiers
        layers = [replace(layer, dtype=torch.bfloat16) for layer in tiers.layers]
        return plain + device_total(tier_totals(
            (field, field.nbytes(tiers.options, layer, tiers.batch, tiers.capacity))
            for layer in layers
            for field in fields_of(tiers.options, layer)
        ))  # fmt: skip


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors that a layer of a cache keeps; a tensor subclass is replaced by its inner tensors."""
    if isinstance(value, Tensor):
        inner = getattr(value, "__tensor_flatten__", None)
        return [value] if inner is None else [t for name in inner()[0] for t in tensors_of(getattr(value, name))]
    if isinstance(value, dict | list | tuple):
        return [t for item in (value.values() if isinstance(value, dict) else value) for t in tensors_of(item)]
    return []


def twin_of(model: Any, name: str, lowering: str, inductor: Mapping[str, Any] = NONE) -> Any:
    """A model of the same weights that decodes this way; inductor: config patches."""
    twin = copy.copy(model)
    twin.__dict__ = dict(model.__dict__)
    if name in (COMPILED, STATIC):
        twin.compile(dynamic=name == COMPILED, options=dict(inductor))
    elif name not in BASELINES:
        options = parse_setting(name).measured
        twin.compile(backend="specache", options={"lowering": lowering, "inductor": dict(inductor), **options})
    return twin


def empty_cache(name: str, config: PreTrainedConfig, room: int) -> Cache:
    """A cache of this way's kind; a static one has room for `room` tokens."""
    if name in QUANTIZED:
        return QuantizedCache(config=config, **QUANTIZED[name])
    return StaticCache(config=config, max_cache_len=room) if name == STATIC else DynamicCache(config=config)


@dataclass(frozen=True)
class Prefill:
    """What the uncompiled model has prefilled.

    ids: [B, n].
    cache: their pairs [B, H, n, d].
    token: [B, 1], the next one.
    """

    ids: Tensor
    cache: DynamicCache
    token: Tensor


@torch.no_grad()
def read(model: Any, ids: Tensor, tell: Callable[[str], None] = lambda progress: None) -> Prefill:
    """The uncompiled model's prefill of `ids` [B, n], in chunks. tell: receives the progress."""
    cache, done = DynamicCache(config=model.config), 0
    for part in ids.split(CHUNK, 1):
        tell(f"{done:,} of {ids.shape[1]:,} tokens")
        out = model(part, **with_cache(cache), use_cache=True, logits_to_keep=1)
        done += part.shape[1]
    return Prefill(ids, cache, out.logits[:, -1:].argmax(-1))


def way(name: str, twin: Any, prefill: Prefill, room: int) -> Decoding:
    """A way that holds a prefilled context.

    twin: the model that decodes this way (`twin_of`).
    room: tokens that will follow.
    """
    # A copy with strides of its own: Dynamo would take a row's stride for the cache's length, and trace again when the
    # cache grows.
    token, length = prefill.token.clone(memory_format=torch.contiguous_format), prefill.ids.shape[1]
    if name in (UNCOMPILED, COMPILED):
        return Decoding(twin, copy.deepcopy(prefill.cache), token, length)
    if name in BASELINES:
        return Decoding(twin, filled(empty_cache(name, twin.config, length + room), prefill.cache), token, length)
    try:
        held = sc.hold(prefill.cache, twin)
    except SpecacheError:  # its own prefill does not keep every pair
        held = DynamicCache(config=twin.config)
        with torch.no_grad():
            twin(prefill.ids, **with_cache(held), use_cache=True, logits_to_keep=1)
    session = session_of(held)
    if session is not None:
        session.reserve(room)  # no bucket grows, and no graph is compiled, in the timed steps
    return Decoding(twin, held, token, length)


def filled(cache: Cache, plain: DynamicCache) -> Cache:
    layers: list[Any] = plain.layers
    for number, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, number)
    return cache


@torch.no_grad()
def first_tokens(name: str, model: Any, ids: Tensor, room: int) -> Sequence[Any]:
    """Two calls to time: the first reads the prompt `ids` [B, n] into an empty cache, the second decodes a token."""
    cache = empty_cache(name, model.config, ids.shape[1] + room)
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    given = {**with_cache(cache), "use_cache": True}
    return (
        lambda: model(ids, position_ids=place, logits_to_keep=1, **given),
        lambda: model(ids[:, -1:], position_ids=place[:, -1:] + 1, **given),
    )
