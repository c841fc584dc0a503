"""What diagnostics look at: a model, windows of text, and the model's runs over them, full and compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.evaluation.runner import decode, read
from specache_compile.evaluation.settings import Setting, running
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.session import Session

# Tokens of the prefill that policies encode between evictions: RoCo's Table 6 finds no loss up to 4.
EVICTION_BLOCK = 4


@dataclass(frozen=True, eq=False)
class Inspected:
    """ids [windows, n]: the text. Its last `steps` tokens are fed one by one; those before them are a prefill.
    eviction_block: how policies read the prefill, as their option of this name.
    tick: called after each measured run, for a progress bar.
    results: earlier measurements, by name and options.
    """

    model: Any
    ids: Tensor
    steps: int
    lowering: str = "eager"
    eviction_block: int | str = EVICTION_BLOCK
    tick: Callable[[], object] = lambda: None
    results: dict[Any, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    @property
    def prefill(self) -> int:
        return self.length - self.steps

    @functools.cached_property
    def attention(self) -> list[Tensor]:
        """The full cache's attention, layer by layer: float32 [windows, Hq, n, n] on the CPU, row = query."""
        layers: list[list[Tensor]] = []
        with eager_attention(self.model), torch.inference_mode():
            for window in self.ids:
                found = self.model(window[None], output_attentions=True, use_cache=False).attentions
                layers.append([layer.float().cpu() for layer in found])
        return [torch.cat(parts) for parts in zip(*layers, strict=True)]

    @functools.cached_property
    def grouped_attention(self) -> list[Tensor]:
        """Its average over each KV head's query group, layer by layer: [windows, H, n, n]."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return [layer.unflatten(1, (heads, -1)).mean(2) for layer in self.attention]

    def forced(self, policy: str, budget: int, **options: Any) -> Iterator[tuple[int, Any]]:
        """Feed the text under a policy; yield each step's token number and the session before the step."""
        options = {"budget": budget, "eviction_block": self.eviction_block, **options}
        with running(self.model, Setting(policy, tuple(options.items())), self.lowering):
            cache, _ = read(self.model, self.ids[:, : self.prefill])
            for token in range(self.prefill, self.length):
                yield token, session_of(cache)
                decode(self.model, cache, self.ids[:, token : token + 1])
        self.tick()


def session_of(cache: Any) -> Session:
    """The session behind a held cache; SpecacheError where not every layer is in it."""
    keys = [layer.keys for layer in cache.layers]
    sessions = [k.handle.now.session for k in keys if isinstance(k, HeldTensor) and k.handle is not None]
    if len(sessions) < len(keys):
        raise SpecacheError(
            f"{len(keys) - len(sessions)} of this model's {len(keys)} attentions stay as Hugging Face wrote them (the "
            "warning says why): for such a model only coverage and deviation can be measured"
        )
    return sessions[0]


@contextlib.contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Within it, the uncompiled model's attention returns its weights."""
    before, compiled = model.config._attn_implementation, model._compiled_call_impl
    model.set_attn_implementation("eager")
    model._compiled_call_impl = None
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model._compiled_call_impl = compiled
