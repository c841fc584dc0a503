"""One request of a batch: its prompt, how its tokens are drawn, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList


class Stage(Enum):
    """Where a request is. It goes down this list, but for one that gives way, and is over from any of them."""

    WAITING = "waits for memory, for a row, or for another's prompt to be read"
    READING = "its prompt is being read"
    SAYING = "a row of the batch"
    OVER = "over"


class End(Enum):
    """Why a request is over."""

    STOP = "said a token that ends a text"
    LENGTH = "said as many tokens as it may"
    REMOVED = "was removed"
    FAILED = "its prompt, one of its decode steps or one of its processors failed"


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the model's probabilities for one token, before temperature and processors.

    said: the token's that was said.
    likeliest: the likeliest tokens with theirs, the likeliest first.
    """

    said: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """What `Batch.add` gives: read its fields; the batch alone changes them.

    prompt: token ids, int64 [n].
    resumed: the number of said tokens that are prefilled again after the prompt: the RoPE changed there.
    said: token ids so far; a token that ends the text is the last.
    reached: the number of said tokens that the current cache has led to. After an interrupt it is lower than len(said):
        the decode steps of the known tokens run again, since a prefill of them would differ in a lossy setting.
    end: why it is over; None until then.
    error: what it failed with.
    config: Hugging Face's, with the model's defaults filled in.
    processors: that make of its logits what its tokens are drawn from.
    generator: its own, where it samples.
    cache: of a row alone, until it joins the batch; and when it is over, where it `keeps` that.
    read: tokens of the text (prompt and resumed tokens) that are cached.
    whole: its text is read in one call, and shares no prefix.
    alone: it is never a row beside others.
    crosses: its RoPE changes while it generates, and what is cached stays as it is (`batch_rope.py`).
    failures: stages and numbers of cached tokens at which a call failed, and has not succeeded since.
    numbers: the state of its random numbers by the token that they are drawn for, so that a draw can be repeated.
    prefilled_here: they were read in this batch, from the prompt's first token on.
    began: its number among those that have begun.
    aside: the folder with its cache, while it gives way to others.
    ahead: tokens that may be cached behind its last one, while a draft of them is verified.
    overtaken: how many later requests have begun before it.
    keeps: whether its cache is wanted when it is over.
    asks: of how many of the likeliest tokens `logprobs` tells; None: of none, nor of those that were said.
    logprobs: of each token that was said, where it asks for them.
    """

    prompt: Tensor
    config: GenerationConfig
    processors: LogitsProcessorList
    ends: frozenset[int]
    generator: torch.Generator | None = None
    cache: DynamicCache | None = None
    read: int = 0
    said: list[int] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    end: End | None = None
    error: Exception | None = None
    overtaken: int = 0
    keeps: bool = False
    asks: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prefilled_here: bool = True
    began: int = 0
    aside: Path | None = None
    ahead: int = 0
    resumed: int = 0
    reached: int = 0
    whole: bool = False
    alone: bool = False
    crosses: bool = False
    failures: set[tuple[Stage, int]] = field(default_factory=set)
    numbers: dict[int, Tensor] = field(default_factory=dict)

    @property
    def text(self) -> Tensor:
        """Token ids that are read before its next token, int64 [n]."""
        return self.ids_with(self.resumed)[0]

    @property
    def longest(self) -> int:
        """Tokens that it may have cached at its end."""
        return len(self.prompt) + int(self.config.max_new_tokens or 0) + self.ahead

    @property
    def cached(self) -> int:
        """Tokens that are cached: the last that was said is not."""
        return self.read + max(0, self.reached - 1 - self.resumed)

    @property
    def due(self) -> int:
        """Tokens that may be cached before it says its next token."""
        return max(len(self.prompt) + self.resumed, self.cached + 1) + self.ahead

    @property
    def ids(self) -> Tensor:
        """Prompt and what was said, int64 [1, n]."""
        return self.ids_with(len(self.generated))

    @property
    def context(self) -> Tensor:
        """Prompt and the tokens that are `reached`, int64 [1, n]: what the next token follows."""
        return self.ids_with(self.reached)

    def ids_with(self, said: int) -> Tensor:
        """Prompt and the first said tokens, int64 [1, n]."""
        return torch.cat([self.prompt, torch.tensor(self.generated[:said], dtype=torch.int64)])[None]

    def finish(self, end: End, error: Exception | None = None) -> None:
        self.stage, self.end, self.error, self.cache = Stage.FINISHED, end, error, None

    def append(self, token: int) -> None:
        """It has said one more token, or reached a known one."""
        if self.reached == len(self.generated):
            self.generated.append(token)
        self.reached += 1
        self.end_if_done()

    def end_if_done(self) -> None:
        if self.generated and self.generated[-1] in self.ends:
            self.finish(End.STOP)
        elif len(self.generated) >= int(self.config.max_new_tokens or 0):
            self.finish(End.LENGTH)

    def restart(self) -> None:
        """Wait, without a cache: the text is prefilled again, and the known tokens are decoded again."""
        self.end_if_done()  # an interrupt came between a token and its end
        if self.stage is not Stage.FINISHED:
            self.stage, self.cache, self.read, self.prefilled_here = Stage.WAITING, None, 0, True
            self.reached = self.resumed


def request_for(model: Any, prompt: Tensor, asked: dict[str, Any], cache: DynamicCache | None, read: int) -> Request:
    """A request as `generate` would understand `asked`, its arguments about the text: config and processors are Hugging
    Face's own. ValueError where it would take no such argument, or where a batch of rows cannot follow it."""
    more, seed = asked.pop("logits_processor", LogitsProcessorList()), asked.pop("seed", None)
    config, unknown = model._prepare_generation_config(asked.pop("generation_config", None), **asked)
    if unknown:
        raise ValueError(f"no arguments about a text: {', '.join(sorted(unknown))}")
    for name in ("num_beams", "num_return_sequences"):
        if getattr(config, name) not in (None, 1):
            raise ValueError(
                f"{name}={getattr(config, name)}: a request is one row; add it as often as you want answers"
            )
    if not config.max_new_tokens:
        raise ValueError("max_new_tokens: say how many tokens follow at most; memory is kept for as many")
    model._prepare_special_tokens(config, device=model.device)
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=len(prompt), logits_processor=more, device=model.device
    )
    ends = getattr(config, "_eos_token_tensor", None)
    generator, numbers = None, {}
    if config.do_sample:
        generator = torch.Generator(model.device)
        generator.seed() if seed is None else generator.manual_seed(seed)
        numbers = {0: generator.get_state()}
    named = frozenset() if ends is None else frozenset(ends.flatten().tolist())
    return Request(
        prompt, config, processors, named, generator, cache, read, prefilled_here=cache is None, numbers=numbers
    )  # fmt: skip


def drawn(request: Request, logits: Tensor) -> int:
    """The next token of a request, from its last logits [1, V]; the same again where a step was interrupted."""
    if request.reached < len(request.generated):
        return request.generated[request.reached]
    scores, said = logits.to(torch.float32, copy=True), len(request.generated)  # a processor may write to them
    known = None if request.top_logprobs is None else scores[0].log_softmax(-1)
    if request.generator is not None:
        request.generator.set_state(request.numbers[said])
    token = chosen(request, request.ids, scores)
    if request.generator is not None:
        request.numbers = {said: request.numbers[said], said + 1: request.generator.get_state()}
    if known is not None and request.top_logprobs is not None:
        request.logprobs[said:] = [logprobs_of(known, token, request.top_logprobs)]
    return token


def chosen(request: Request, ids: Any, scores: Any) -> int:
    """The token that a request would say behind these [1, n], from logits [1, V] float32, which are written to."""
    scores = request.processors(ids.to(scores.device), scores) if request.processors else scores
    if request.generator is None:
        return int(scores.argmax(-1))
    return int(torch.multinomial(scores.softmax(-1), 1, generator=request.generator))


def logprobs_of(known: Tensor, token: int, most: int) -> Logprobs:
    """Of the next token, from the logarithms of all tokens' probabilities [V]."""
    values, tokens = known.topk(most)
    return Logprobs(float(known[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
