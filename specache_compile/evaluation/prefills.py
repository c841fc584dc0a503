"""Shared exact prefills: the uncompiled model computes each once for all methods with an exact prefill.

The prefill is most of the work of a short answer to a long prompt. `specache_compile.hold` fills a method's tiers from
it, with the same result as the method's own prefill (tests/caches/test_hold.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specache_compile.caches.holding import reason_not_to_hold, twin
from specache_compile.compile.compiled_options import options_of
from specache_compile.kernels.memory.host_memory import free_memory
from specache_compile.methods import parse_options

from .baselines.kvzip import KVzipOptions


@dataclass(frozen=True)
class Prefill:
    """A prefill of the uncompiled model.

    cache: a plain cache of the prompts.
    logits: the next logits, float32 [rows, 1, vocabulary], on the host.
    first: the greedy tokens [rows, 1] of `generate` for these logits.
    """

    cache: Any
    logits: Tensor
    first: Tensor

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class Prefills:
    """The prefills of one cell's prompts on the model's device.

    most: a limit in bytes, by default half of the free memory; further prefills are computed again.
    chunk: tokens to prefill at a time; None: all.
    """

    def __init__(self, device: torch.device | str = "cpu", most: int | None = None, chunk: int | None = None) -> None:
        self.chunk = chunk
        on_cuda = torch.device(device).type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if on_cuda else free_memory()
        self.most = free // 2 if most is None else most
        self.cell = ""
        self.made: dict[str, Prefill] = {}

    def begin(self, cell: str) -> None:
        if cell != self.cell:
            self.cell = cell
            self.made.clear()

    def serve(self, model: Any) -> bool:
        """Whether the model, as it is compiled now, can continue from such a prefill."""
        given = options_of(model)
        options = None if given is None else parse_options(given)
        kinds = {type(layer) for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers}
        if isinstance(options, KVzipOptions):
            return kinds == {DynamicLayer}  # all layers share its budget
        holds = options is None or reason_not_to_hold(options) is None
        return holds and DynamicLayer in kinds and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}

    def of(self, ids: Tensor, make: Callable[[], Prefill]) -> Prefill:
        """The prefill of `ids` [rows, tokens], for one use. A missing one is computed by `make`."""
        found = self.made.get(key := str(ids.tolist()))
        if found is None:
            found = make()
            if found.nbytes + sum(other.nbytes for other in self.made.values()) <= self.most:
                self.made[key] = found
        return replace(found, cache=twin(found.cache))
