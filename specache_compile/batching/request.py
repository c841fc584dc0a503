"""A request of a batch: its prompt, its sampling settings and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList


class Stage(Enum):
    """The stage of a request. A request goes through them in this order; after an interrupted step it waits again."""

    WAITING = "waits for memory, a row, or the end of another prefill"
    PREFILL = "its prompt is prefilled, or waits for rows that it cannot join"
    DECODE = "it has a row of the batch"
    FINISHED = "it is finished"


class End(Enum):
    """Why a request is finished."""

    STOP = "generated a stop token"
    LENGTH = "generated max_new_tokens"
    REMOVED = "was removed"
    FAILED = "its prompt, one of its decode steps or one of its processors failed"


@dataclass(eq=False)
class Request:
    """A request, as `Batch.add` returns it. Read its fields; only the batch changes them.

    prompt: token ids, int64 [n].
    config: Hugging Face's generation settings, with the model's defaults filled in.
    processors: applied to its logits before sampling.
    ends: stop tokens.
    generator: its random numbers; None if it is greedy.
    cache: of its row alone, while its prompt is prefilled.
    reused: tokens of the prompt that a cached prefix had.
    prefilled: tokens of the prompt that were prefilled.
    generated: token ids so far; a stop token is the last.
    end: why it is finished; None before.
    error: the error that it failed with.
    changes: the batch's number of changes of weights when it started.
    reached: generated tokens that the current cache has reproduced. After an interrupt the known tokens are decoded
        again, since a prefill of them would differ with lossy options.
    whole: its prompt is prefilled in one call, without a cached prefix.
    rng_states: state of the random numbers by the number of the token, so that a draw can be repeated.
    """

    prompt: Tensor
    config: GenerationConfig
    processors: LogitsProcessorList
    ends: frozenset[int]
    generator: torch.Generator | None = None
    cache: DynamicCache | None = None
    reused: int = 0
    prefilled: int = 0
    generated: list[int] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    end: End | None = None
    error: Exception | None = None
    changes: int = 0
    reached: int = 0
    whole: bool = False
    rng_states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Most tokens that it may have cached."""
        return len(self.prompt) + int(self.config.max_new_tokens or 0)

    @property
    def cached(self) -> int:
        """Cached tokens; the last generated token is not cached."""
        return self.prefilled + max(0, self.reached - 1)

    @property
    def ids(self) -> Tensor:
        """Prompt and generated tokens, int64 [1, n]."""
        return torch.cat([self.prompt, torch.tensor(self.generated, dtype=torch.int64)])[None]

    def finish(self, end: End, error: Exception | None = None) -> None:
        self.stage, self.end, self.error = Stage.FINISHED, end, error

    def end_if_done(self) -> None:
        if self.generated and self.generated[-1] in self.ends:
            self.finish(End.STOP)
        elif len(self.generated) >= int(self.config.max_new_tokens or 0):
            self.finish(End.LENGTH)

    def restart(self) -> None:
        """Lose the cache. An open request waits for a new prefill, after which its known tokens are decoded again."""
        self.cache = None
        if self.stage is not Stage.FINISHED:
            self.end_if_done()  # an interrupt may have come before this check
        if self.stage is not Stage.FINISHED:
            self.stage, self.prefilled, self.reached = Stage.WAITING, 0, 0


def request_for(model: Any, prompt: Tensor, arguments: dict[str, Any]) -> Request:
    """Create a request from arguments of `generate`; its settings and processors are Hugging Face's.

    ValueError for an argument that `generate` or a batch does not support.
    """
    more, seed = arguments.pop("logits_processor", LogitsProcessorList()), arguments.pop("seed", None)
    config, unknown = model._prepare_generation_config(arguments.pop("generation_config", None), **arguments)
    if unknown:
        raise ValueError(f"unknown arguments: {', '.join(sorted(unknown))}. Pass generation settings of `generate`")
    for name in ("num_beams", "num_return_sequences"):
        if (given := getattr(config, name)) not in (None, 1):
            raise ValueError(f"{name}={given}: a request is one row. Add the prompt once for each answer")
    for name in ("stop_strings", "max_time"):
        if (given := getattr(config, name)) not in (None, getattr(model.generation_config, name)):
            raise ValueError(f"{name}={given!r}: no request stops there. Call Batch.remove(request)")
    if config.token_healing and not model.generation_config.token_healing:
        raise ValueError("token_healing: no request changes its prompt. Pass the ids that model.heal_tokens returns")
    if not config.max_new_tokens:
        raise ValueError("max_new_tokens is missing: pass it, since memory is reserved for so many tokens")
    config.max_length = len(prompt) + config.max_new_tokens  # for forced_eos_token_id
    model._prepare_special_tokens(config, device=model.device)
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=len(prompt), logits_processor=more, device=model.device
    )
    ends = getattr(config, "_eos_token_tensor", None)
    generator, rng_states = None, {}
    if config.do_sample:
        generator = torch.Generator(model.device)
        generator.seed() if seed is None else generator.manual_seed(seed)
        rng_states = {0: generator.get_state()}
    named = frozenset() if ends is None else frozenset(ends.flatten().tolist())
    return Request(prompt, config, processors, named, generator, rng_states=rng_states)


def append_next(request: Request, logits: Tensor) -> None:
    """Append the next token of a request, or count a known one as reached. A request whose processor fails is
    finished."""
    if request.reached == len(request.generated):
        try:
            request.generated.append(next_token(request, logits))
        except Exception as error:
            return request.finish(End.FAILED, error)
    request.reached += 1
    request.end_if_done()


def next_token(request: Request, logits: Tensor) -> int:
    """The next token of a request, from its last logits [1, V]."""
    scores, place = logits.to(torch.float32, copy=True), len(request.generated)  # processors may write to them
    if request.processors:
        ids: Any = request.ids.to(scores.device)
        scores = request.processors(ids, scores)
    if request.generator is None:
        return int(scores.argmax(-1))
    request.generator.set_state(request.rng_states[place])
    token = int(torch.multinomial(scores.softmax(-1), 1, generator=request.generator))
    request.rng_states = {place: request.rng_states[place], place + 1: request.generator.get_state()}
    return token
