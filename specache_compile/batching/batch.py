"""`Batch(model)`: requests that start and end at any step, each with the tokens that it would have alone."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specache_compile.caches.joining import append_rows, drop, keep_rows, reason_against, reserve_cache_rows, row_of
from specache_compile.compat import cache_of, with_cache
from specache_compile.compile.compiled_options import required_options
from specache_compile.errors import RequestError, SpecacheError
from specache_compile.rope_switch import RopeSwitch, rope_switch

from .batch_memory import BatchMemory, Bytes, Running, bytes_or_inf
from .prefixes import SpillFolder, can_crop
from .request import End, Request, Stage, append_next, request_for

log = logging.getLogger(__name__)

# Prompt tokens to prefill between two decode steps.
CHUNK = 512


class Batch:
    """Generate for many requests at once, with one compiled model and without a server.

    A step prefills one chunk of one prompt, and generates a token for every running request. A request's tokens do not
    depend on other requests. Requests whose rows cannot be joined (sliding windows, methods that drop pairs) run one
    after another.

    Running requests keep their tokens in pages of 256, and share the pages of common prompt prefixes (`prefixes.py`). A
    batch belongs to the thread that calls `step`.

    Args:
        model: a decoder that was compiled with this backend.
        rows: most requests that decode together.
        chunk: prompt tokens to prefill between two decode steps.
        device_memory, host_memory: most bytes of the tiers; None is unbounded. A request starts when all of its
            bytes, up to its last token, are free. On a CPU without device_memory, host_memory is the budget of all
            tiers.
        sessions: most finished requests whose caches are kept, the most recently used ones. A prompt that begins with
            tokens of one computes only the others. With a lossy setting it may differ from a prompt alone.
        spill_folder: evicted sessions are written to this folder. The batch deletes its files at its end.
        spill_bytes: most bytes of evicted sessions in that folder; None is unbounded.

    Raises:
        SpecacheError: the model is not compiled with this backend, its options verify drafts, or the folder cannot be
            written or is given without sessions.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        batch = sc.Batch(model, host_memory=2 << 30)
        first = batch.add(tokenizer("Hello").input_ids, max_new_tokens=8)
        second = batch.add(tokenizer("World").input_ids, max_new_tokens=4, do_sample=True, temperature=0.7, seed=1)
        while batch.open:
            for request, token in batch.step():
                print("first" if request is first else "second", token)
        print(tokenizer.decode(first.generated), second.end)
    """

    def __init__(
        self, model: Any, *, rows: int = 32, chunk: int = CHUNK, device_memory: int | None = None,
        host_memory: int | None = None, sessions: int = 0, spill_folder: Path | None = None,
        spill_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.options = required_options(model, "Batch")
        if self.options.drafts:
            raise verifies_nothing()
        if spill_folder is not None and not sessions:
            raise SpecacheError("spill_folder: it stores evicted sessions, and sessions is 0. Pass sessions too")
        # Rows of different lengths require position_ids.
        wrapped = getattr(model, "_orig_mod", model)
        self.joins = "position_ids" in inspect.signature(wrapped.forward).parameters
        self.model, self.most_rows, self.chunk = model, rows, chunk
        self.switch = rope_switch(wrapped.config)
        self.indexed = hasattr(wrapped.config.get_text_config(), "index_topk")
        budget = Bytes(bytes_or_inf(device_memory), bytes_or_inf(host_memory))
        self.spill = None if spill_folder is None else SpillFolder(spill_folder, bytes_or_inf(spill_bytes))
        self.memory = BatchMemory(self.options, budget, rows, chunk, sessions, self.spill)
        self.cache: DynamicCache | None = None  # of the rows; one in pages stays when all rows are finished
        self.decoding: list[Request] = []  # by row
        self.requests: list[Request] = []  # those that are open, and those that the last step has finished
        self.returned: dict[Request, int] = {}  # tokens that steps have returned
        self.unfinished = False  # the last step did not return

    @property
    def open(self) -> list[Request]:
        """The requests that are not finished, and those with tokens that no step has returned."""
        return [
            request for request in self.requests
            if request.stage is not Stage.FINISHED or len(request.generated) > self.returned.get(request, 0)
        ]  # fmt: skip

    @property
    def prefilling(self) -> Request | None:
        """The request whose prompt is prefilled. Prompts are prefilled one at a time."""
        return next((request for request in self.requests if request.stage is Stage.PREFILL), None)

    @property
    def running(self) -> list[Running]:
        rows: list[Running] = [(request, self.cache, row) for row, request in enumerate(self.decoding)]
        return rows if (prefilling := self.prefilling) is None else [*rows, (prefilling, prefilling.cache, 0)]

    def add(self, ids: Tensor | Sequence[int], *, seed: int | None = None, **arguments: Any) -> Request:
        """Add a request.

        Args:
            ids: token ids of one prompt: a list of ints, or int64 [n] or [1, n].
            seed: of its random numbers; None is a different one each time.
            arguments: generation settings as for `generate`: max_new_tokens (required) or generation_config, do_sample,
                temperature, top_p, eos_token_id, logits_processor.

        Returns:
            The `Request`; `step` updates its fields.

        Raises:
            ValueError: an argument is unknown or unsupported.
            SpecacheError: the memory budget could never hold the request, or the model's RoPE changes within it.
        """
        prompt = token_ids(ids)
        if not len(prompt):
            raise ValueError("the prompt has 0 tokens: pass at least one")
        request = request_for(self.model, prompt, {**arguments, "seed": seed})
        # The last generated token is not cached.
        if request.longest - 1 > self.switch.longest_from(len(prompt)):
            raise changes_its_rope(request, self.switch)
        request.whole = self.indexed or len(prompt) > self.switch.tokens
        if (error := self.memory.error_alone(request)) is not None:
            raise error
        self.requests.append(request)
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Run one step, and return the generated tokens as (request, token).

        A step admits a waiting request, prefills one chunk of one prompt, and decodes a token for each running request.
        If a call of the model fails, its requests are finished, with their `error`; so is a request whose logits
        processor fails.

        After an interrupt (Ctrl-C) `step` can be called again. It prefills all open requests again, decodes their known
        tokens again, and returns the tokens that the interrupted step could not.
        """
        if self.unfinished:
            self.restart()
        self.unfinished = True
        self.run_step()
        new_tokens = [
            (request, token)
            for request in self.requests
            for token in request.generated[self.returned.get(request, 0) :]
        ]
        returned = {request: len(request.generated) for request in self.requests}
        self.returned, self.unfinished = returned, False  # no call follows, so no signal handler runs in between
        return new_tokens

    @torch.no_grad()
    def run_step(self) -> None:
        self.requests = self.open
        self.admit()
        self.memory.make_room_for_step(self.running)
        keeps = self.prefilling is not None or bool(self.decoding and self.memory.sessions)
        self.memory.notice_before_step(self.model, keeps)
        if self.decoding:
            self.attempt(self.decode, self.decoding)
        if (request := self.prefilling) is not None:
            self.attempt(functools.partial(self.prefill, request), [request])
        if not self.running:
            self.memory.watch = None  # it would keep replaced weights alive

    def attempt(self, call: Callable[[], None], requests: Sequence[Request]) -> None:
        """Make a call for these requests. If it fails, they are finished, and all others start again."""
        try:
            return call()
        except Exception as error:
            log.warning("a call for %d requests has failed", len(requests), exc_info=True)
            free_frames(error)
            for request in requests:
                if request.stage is not Stage.FINISHED:
                    request.finish(End.FAILED, error)
        self.restart()

    def restart(self) -> None:
        """Rebuild the state from the requests: only they are sure to be complete."""
        for cache in (self.cache, *(request.cache for request in self.requests)):
            if cache is not None and self.memory.tiers_of(cache) is not None:
                drop(cache)
        self.cache, self.decoding = None, []
        for request in self.requests:
            request.restart()

    def run(self) -> None:
        """Step until every request is finished."""
        while self.open:
            self.step()

    def remove(self, request: Request) -> None:
        """End a request in any stage; it has no row in the next step. With sessions its cache is kept. It has ended
        even if `remove` raises."""
        try:
            if self.unfinished:
                self.restart()
            self.unfinished = True
            if request.stage is not Stage.FINISHED:
                request.finish(End.REMOVED)
                self.release([request])
        except BaseException:  # the next call recovers without the request
            request.finish(request.end or End.REMOVED, request.error)
            raise
        self.unfinished = False

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes and sessions.

        A batch does so itself when it sees that the model's weights or settings have changed. It samples the weights
        when a request starts, and one value of each weight before each step whose pairs it may keep. Call this after
        writes through `.data` or numpy that change only a few values. Running requests continue with their caches.
        """
        self.memory.forget_prefixes()

    def admit(self) -> None:
        """Start the first waiting request, if it fits."""
        first = next((request for request in self.requests if request.stage is Stage.WAITING), None)
        if first is None or self.prefilling is not None or len(self.decoding) == self.most_rows:
            return
        while self.memory.fits(first, self.running):
            if not self.memory.notice_weights(self.model):  # else it is checked again, without the prefixes
                return self.attempt(functools.partial(self.start, first), [first])

    def start(self, request: Request) -> None:
        self.memory.attach_prefix(request, self.model)
        request.stage = Stage.PREFILL

    def prefill(self, request: Request) -> None:
        """Prefill one chunk of a prompt. After the last one the request has its first token, and becomes a row."""
        first, last = request.prefilled, len(request.prompt)
        if first < last:
            end = last if request.whole else min(last, first + self.chunk)
            cache, logits = self.call_model(
                request.prompt[first:end][None], torch.arange(first, end)[None], request.cache
            )
            if not self.memory.layers:
                self.memory.set_layers(cache, self.joins)
                self.refuse_too_long()
            if request.stage is Stage.FINISHED:
                return self.release([request])
            request.cache, request.prefilled = self.memory.paged_or_same(cache), end
            self.memory.keep_prefill(request)
            if end < last:
                return
            append_next(request, logits[0, -1:])
        if request.stage is Stage.FINISHED:
            self.release([request])
        else:
            self.join(request)

    def refuse_too_long(self) -> None:
        """Fail the requests that the budget could not hold alone, once the model's layers are known."""
        for request in self.open:
            if (error := self.memory.error_alone(request)) is not None:
                request.finish(End.FAILED, error)

    def join(self, request: Request) -> None:
        """Make a prefilled request a row. If it cannot run beside the rows, it waits until they are finished."""
        own, rows = request.cache, self.cache
        assert own is not None
        is_paged = self.memory.tiers_of(own) is not None
        if is_paged and rows is not None and self.is_paged and reason_against([rows, own]) is None:
            self.cache = append_rows(rows, own)
        elif self.decoding:
            return
        else:
            if rows is not None and self.is_paged:
                drop(rows)  # for example, the weights have been replaced
            self.cache = reserve_cache_rows(own, self.most_rows) if is_paged else own
        request.cache, request.stage = None, Stage.DECODE
        self.decoding.append(request)

    @property
    def is_paged(self) -> bool:
        """Whether the rows are in pages. A cache that is not has one row."""
        return self.memory.tiers_of(self.cache) is not None

    def decode(self) -> None:
        """Decode one token of each row."""
        tokens = torch.tensor([[one.generated[one.reached - 1]] for one in self.decoding])
        positions = torch.tensor([[one.cached] for one in self.decoding])
        self.cache, logits = self.call_model(tokens, positions, self.cache)
        for request, row in zip(self.decoding, logits, strict=True):
            append_next(request, row[-1:])
        self.release([request for request in self.decoding if request.stage is Stage.FINISHED])

    def release(self, finished: Sequence[Request]) -> None:
        """Free the caches of finished requests; with sessions they are kept."""
        for request in finished:
            cache = self.cache if request in self.decoding else request.cache
            if self.memory.sessions and cache is not None and request.end is not End.FAILED:
                self.memory.keep(request, functools.partial(self.taken, request), can_crop(cache))
            if request.cache is not None:
                drop(request.cache)
                request.cache = None
        # The last row moves into the place of a row that leaves; no other row moves.
        kept = [row for row, request in enumerate(self.decoding) if request not in finished]
        if len(kept) == len(self.decoding):
            return
        last = [row for row in kept if row >= len(kept)]
        rows = [row if row in kept else last.pop() for row in range(len(kept))]
        if self.cache is not None and self.is_paged:
            keep_rows(self.cache, rows)
        else:
            self.cache = None  # it may be a session by now
        self.decoding = [self.decoding[row] for row in rows]

    def taken(self, request: Request) -> DynamicCache:
        """The cache of a request that leaves."""
        if request not in self.decoding:
            cache, request.cache = request.cache, None
        elif self.is_paged and self.cache is not None:
            cache = row_of(self.cache, self.decoding.index(request))
        else:
            cache = self.cache
        assert cache is not None
        return cache

    def call_model(self, tokens: Tensor, positions: Tensor, cache: DynamicCache | None) -> tuple[DynamicCache, Tensor]:
        """Run the model on new tokens [B, T]. Returns the cache and the last token's logits [B, 1, V]; those of all
        tokens if the model has no logits_to_keep."""
        more: dict[str, Any] = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        if self.joins:
            more["position_ids"] = positions.to(self.model.device)
        if cache is None and self.model._supports_default_dynamic_cache():
            # as in `generate`, so that both run one graph
            cache = DynamicCache(config=self.model.config)
        tokens = tokens.to(self.model.device)
        out = self.model(input_ids=tokens, **with_cache(cache), use_cache=True, return_dict=True, **more)
        return cache_of(out), out.logits


def free_frames(error: BaseException | None) -> None:
    """Free what the frames of an error and of its causes hold: tensors of a failed call, for example."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def verifies_nothing() -> SpecacheError:
    return SpecacheError(
        "option verify: a batch does not verify drafts. Compile with method='offload', whose tokens are exact too, or "
        "call generate for one sequence"
    )


def changes_its_rope(request: Request, switch: RopeSwitch) -> RequestError:
    prompt = len(request.prompt)
    return RequestError(
        f"a request of {prompt:,} prompt and {request.longest - prompt:,} new tokens: beyond {switch.tokens:,} tokens "
        f"this model's RoPE ({switch.kind}) depends on the length of a call, which a batch cannot reproduce. Lower "
        "max_new_tokens, or call model.generate"
    )


def token_ids(ids: Tensor | Sequence[int]) -> Tensor:
    """Convert the token ids of one prompt to int64 [n]. ValueError if they are no ids, or several prompts."""
    given = torch.as_tensor(ids).cpu()
    if given.numel() and (given.is_floating_point() or given.dtype == torch.bool):
        raise ValueError(f"the prompt is {given.dtype}: pass token ids, which are integers")
    if given.dim() > 1 and given.numel() != given.shape[-1]:
        raise ValueError(f"the prompt has shape {[*given.shape]}: add each row as a request of its own")
    return given.reshape(-1).to(torch.int64)
