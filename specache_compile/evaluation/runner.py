"""Run a model under a setting for a task: answers to prompts, and logits of forced tokens."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specache_compile.caches.holding import hold, reason_not_to_hold, twin
from specache_compile.compat import cache_of, with_cache
from specache_compile.compile.compiled_options import options_of
from specache_compile.methods import parse_options
from specache_compile.runtime.break_even import free_memory

from .baselines import kvzip, snapkv
from .baselines.prompt_eviction import hold_chosen
from .baselines.sdpa_calls import LAST, Watched, calls_once_a_layer, joined, last_queries
from .reader import Reader

Prompt = Sequence[int]


@dataclass(frozen=True)
class Prefill:
    """A prefill of the uncompiled model.

    cache: a plain cache of the prompts.
    logits: the next logits, float32 [rows, 1, vocabulary], on the host.
    first: the greedy tokens [rows, 1] of `generate` for these logits.
    queries: `last_queries` of each layer, or none: see `calls_once_a_layer`.
    """

    cache: Any
    logits: Tensor
    first: Tensor
    queries: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        pairs = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
        return pairs + sum(query.nbytes for query in self.queries)


class Prefills:
    """Exact prefills of one cell's prompts on the model's device, each computed once by the uncompiled model.

    A prefill is most of the work of a short answer to a long prompt. `specache_compile.hold` fills a method's tiers
    from it, with the same result as the method's own prefill (tests/caches/test_hold.py).

    most: a limit in bytes, by default half of the free memory; further prefills are computed again.
    chunk: tokens to prefill at a time; None: all.
    """

    def __init__(self, device: torch.device | str = "cpu", most: int | None = None, chunk: int | None = None) -> None:
        self.chunk = chunk
        self.most = free_memory(torch.device(device)) // 2 if most is None else most
        self.cell = ""
        self.made: dict[str, Prefill] = {}

    def begin(self, cell: str) -> None:
        if cell != self.cell:
            self.cell = cell
            self.made.clear()

    def can_continue(self, model: Any) -> bool:
        """Whether the model, as it is compiled now, can continue from such a prefill."""
        given = options_of(model)
        options = None if given is None else parse_options(given)
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
        if isinstance(options, kvzip.KVzipOptions):
            return kinds == {DynamicLayer}  # all layers share its budget
        if isinstance(options, snapkv.SnapKVOptions):
            holds = options.window <= LAST and calls_once_a_layer(model)
        else:
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


@dataclass
class Runner:
    """A model (compiled in place or not), its reader, and the maximum batch size.

    prefills: prefills of the uncompiled model, used if the compiled model's prefill is exact.
    """

    model: Any
    reader: Reader
    batch_size: int = 8
    prefills: Prefills | None = None

    def ids(self, prompts: Sequence[Prompt]) -> Tensor:
        """Prompts of one length as token ids [rows, tokens] on the model's device."""
        return torch.tensor([list(prompt) for prompt in prompts], device=self.model.device)

    @property
    def shares(self) -> bool:
        """Whether prompts are prefilled by `prefills`."""
        return self.prefills is not None and self.prefills.can_continue(self.model)

    @property
    def chunk(self) -> int | None:
        """Tokens at a time of a method's own prefill: those of `prefills` if it evicts block by block; None: all."""
        given = options_of(self.model) or {}
        if self.prefills and type(given.get("budget")) is int and type(given.get("eviction_block")) is int:
            return self.prefills.chunk
        return self.model.generation_config.prefill_chunk_size

    def read(self, ids: Tensor) -> tuple[Any, Tensor]:
        """A new cache filled by `ids` [rows, tokens], and the next logits [rows, 1, vocabulary] on the host."""
        if not self.shares:
            return read(self.model, ids, self.chunk)
        prefill = self.prefilled(ids)
        return self.going_on(ids, prefill), prefill.logits

    def prefilled(self, ids: Tensor) -> Prefill:
        """The shared prefill of `ids`."""
        assert self.prefills is not None
        with self.uncompiled():
            return self.prefills.of(ids, functools.partial(exact_prefill, self.model, ids, self.prefills.chunk))

    def going_on(self, ids: Tensor, prefill: Prefill) -> Any:
        """The cache of a prefill of `ids`, compressed if the model is compiled."""
        given = options_of(self.model)
        if given is None:
            return prefill.cache
        options = parse_options(given)
        if isinstance(options, snapkv.SnapKVOptions):
            chosen = snapkv.chosen(prefill.cache, prefill.queries, options)
            return hold_chosen(prefill.cache, self.model, options, chosen)
        if not isinstance(options, kvzip.KVzipOptions):
            return hold(prefill.cache, self.model)
        before, behind = self.reader.turn()
        start = len(before) if all(row[: len(before)] == before for row in ids.tolist()) else 0
        with self.uncompiled():
            chosen = kvzip.chosen(self.model, prefill.cache, ids, options, start, self.reader.encode, behind)
        return kvzip.held(prefill.cache, self.model, options, chosen)

    def continued(self, ids: Tensor, new_tokens: int, **more: Any) -> list[list[int]]:
        """The new tokens of greedy continuations of `ids` [rows, tokens]."""
        more = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False, **more}
        return self.model.generate(ids, **more)[:, ids.shape[1] :].tolist()

    def continued_from_prefills(self, ids: Tensor, new_tokens: int) -> list[list[int]]:
        """As `continued`, from a shared prefill. new_tokens: 2 or more."""
        prefill = self.prefilled(ids)
        begun = torch.cat([ids, prefill.first], 1)
        more = self.continued(begun, new_tokens - 1, **with_cache(self.going_on(ids, prefill)))
        ends, firsts = as_list(self.model.generation_config.eos_token_id), prefill.first.flatten().tolist()
        return [[token] if token in ends else [token, *rest] for token, rest in zip(firsts, more, strict=True)]

    def answers(self, prompts: Sequence[Prompt], new_tokens: int) -> list[str]:
        """One answer per prompt. Neighbours of one length share a batch, so that no row is padded."""
        own = functools.partial(self.continued, prefill_chunk_size=self.chunk)
        answer = self.continued_from_prefills if self.shares and new_tokens > 1 else own
        return [
            self.reader.decode(one) for batch in self.batches(prompts) for one in answer(self.ids(batch), new_tokens)
        ]

    def answers_apart(self, prompts: Sequence[tuple[Prompt, Prompt]], new_tokens: int) -> list[str]:
        """One answer per context and question. The question is prefilled after its context's cache is complete.

        Neighbours of equal lengths share a batch.
        """
        found: list[str] = []
        for batch in self.batches(prompts, lambda prompt: (len(prompt[0]), len(prompt[1]))):
            cache, _ = self.read(self.ids([context for context, _ in batch]))
            whole = self.ids([[*context, *question] for context, question in batch])
            found += map(self.reader.decode, self.continued(whole, new_tokens, **with_cache(cache)))
        return found

    def batches(self, items: Sequence[Any], key: Callable[[Any], object] = len) -> Iterable[Sequence[Any]]:
        """Neighbours of one key, in batches, with a progress bar."""
        groups = (list(same) for _, same in itertools.groupby(items, key))
        return shown([batch for same in groups for batch in chunks(same, self.batch_size)], "batch")

    def forced_logits(self, ids: Tensor, prefill: int) -> Tensor:
        """Logits [rows, n - 1 - prefill, vocabulary] of the tokens after `prefill`, fed one by one through the cache.

        ids [rows, n]. The prefill attends exactly, except under an eviction policy whose `eviction_block` is not
        "prompt". Step i has read ids[:, : prefill + 1 + i] and predicts the next token.
        """
        cache, _ = self.read(ids[:, :prefill])
        return decode(self.model, cache, ids[:, prefill:-1])

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[Runner]:
        """A context with the same model, uncompiled: the full cache."""
        before = self.model._compiled_call_impl
        self.model._compiled_call_impl = None
        try:
            yield self
        finally:
            self.model._compiled_call_impl = before


@torch.inference_mode()
def exact_prefill(model: Any, ids: Tensor, chunk: int | None) -> Prefill:
    """A prefill of `ids` [rows, tokens] by `generate`, so that the first tokens follow the model's configuration.

    chunk: tokens at a time; None: as in the model's configuration.
    """
    watched = Watched(last_queries)
    with watched if calls_once_a_layer(model) else contextlib.nullcontext():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, output_logits=True,
            return_dict_in_generate=True, prefill_chunk_size=chunk or model.generation_config.prefill_chunk_size,
        )  # fmt: skip
    cache = cache_of(out)
    for layer in cache.layers:
        if layer.is_sliding:  # its window is a view of all pairs
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    queries = joined(watched.seen, len(cache.layers))
    return Prefill(cache, out.logits[0][:, None].float().cpu(), out.sequences[:, -1:], queries)


@torch.inference_mode()
def read(model: Any, ids: Tensor, chunk: int | None = None) -> tuple[Any, Tensor]:
    """A new cache filled by `ids` [rows, tokens], and the next logits, float32 [rows, 1, vocabulary] on the host."""
    cache = DynamicCache(config=model.config)
    for tokens in ids.split(chunk or ids.shape[1], 1):
        out = model(tokens, **with_cache(cache), use_cache=True, logits_to_keep=1)
    return cache, out.logits[:, -1:].float().cpu()


@torch.inference_mode()
def decode(model: Any, cache: Any, tokens: Tensor, at_once: int = 1) -> Tensor:
    """Logits after each of `tokens` [rows, n], `at_once` in a call; float32 [rows, n, vocabulary] on the host."""
    steps = tokens.split(at_once, 1)
    return torch.cat([model(t, **with_cache(cache), use_cache=True).logits.float().cpu() for t in steps], 1)


def as_list(value: int | Sequence[int] | None) -> Sequence[int]:
    return [] if value is None else [value] if isinstance(value, int) else value


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def shown(parts: Iterable[Any], unit: str) -> Iterable[Any]:
    """The parts of a row, with a progress bar below that of the rows, on a terminal only."""
    return tqdm(list(parts), unit=unit, leave=False, disable=None)
