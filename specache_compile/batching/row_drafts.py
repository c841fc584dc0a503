"""Drafts of the rows of a batch (option verify), and their verification.

A row accepts drafted tokens while they equal what its own processors and random numbers choose from the verification's
logits. So each row generates, greedily or sampled, the tokens that it generates one a step, with the same seed. Shorter
drafts are padded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor

from specache_compile.caches.joining import is_held_whole
from specache_compile.generate.drafts import IN_PARTS, draft_length_of, note_draft
from specache_compile.generate.verify import forgetful
from specache_compile.options import MethodOptions
from specache_compile.runtime.draft_length import MOST
from specache_compile.runtime.session import Session, session_of, sessions_of

from .request import End, Request, Stage, chosen, next_token
from .twice import FailedTwice, twice

# Pads shorter drafts.
PADDING = 0
# Decodes one token of every row: tokens and positions [B, 1] → logits [B, V].
OneToken = Callable[[Tensor, Tensor], Tensor]


def most_drafted(options: MethodOptions) -> int:
    """Most tokens of a draft."""
    return options.verify if isinstance(options.verify, int) else MOST if options.drafts else 0


def drafting_session(cache: DynamicCache) -> Session | None:
    """The session of a cache whose options draft; None if they do not."""
    session = session_of(cache)
    return session if session is not None and session.options.drafts else None


def reason_not_to_draft(model: Any, cache: DynamicCache, rows: int) -> str | None:
    """Why rows whose options draft decode one token a step; None if they draft."""
    if len(sessions_of(cache)) > 1:
        return IN_PARTS
    if rows > 1 and not is_held_whole(cache):
        return "a layer that is not held cannot drop a different number of tokens in each row"
    return forgetful(model, cache)


def room_of(request: Request) -> int:
    """Most tokens to draft for a request; verification adds one more."""
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in request.processors):
        return 0  # it runs the model on a second cache, token by token
    return int(request.config.max_new_tokens or 0) - request.reached - 1


def decoded_for(requests: Sequence[Request], session: Session, one_token: OneToken) -> list[list[int]]:
    """For each request, the next tokens of its decode phase, which are then in the cache.

    They use the random numbers of the verification: equal numbers choose equal tokens from two close distributions.
    """
    rooms = [room_of(request) for request in requests]
    tokens = min(draft_length_of(session), max(rooms))
    drafts: list[list[int]] = [[] for _ in requests]
    with session.drafting_steps(), random_numbers_kept(requests):
        for _ in range(tokens):
            newest = (part[:, -1:].clone(memory_format=torch.contiguous_format) for part in fed(requests, drafts))
            logits = one_token(*newest)
            for row, request in enumerate(requests):
                if len(drafts[row]) < rooms[row]:
                    drafts[row].append(candidate(request, drafts[row], logits[row : row + 1]))
    return drafts


def candidate(request: Request, draft: Sequence[int], logits: Tensor) -> int:
    """The next token of a draft, from logits [1, V]."""
    ids = torch.cat([request.context, torch.tensor([draft], dtype=torch.int64)], 1)
    try:
        return twice(lambda: chosen(request, ids, logits.to(torch.float32, copy=True)))
    except FailedTwice:  # a processor failed on tokens that may be rejected; if they are accepted, it fails again
        return PADDING


@contextlib.contextmanager
def random_numbers_kept(requests: Sequence[Request]) -> Iterator[None]:
    """Restore the state of the requests' random numbers afterwards."""
    states = [(generator, generator.get_state()) for r in requests if (generator := r.generator) is not None]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def fed(requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and positions [B, T] of a step over each request's last token and its draft. Padding gets no position
    beyond the request's longest text, which the model may not support."""
    width = 1 + max(map(len, drafts))
    tokens = [
        [r.generated[r.reached - 1], *draft, *[PADDING] * (width - 1 - len(draft))]
        for r, draft in zip(requests, drafts, strict=True)
    ]
    first = torch.tensor([[request.cached] for request in requests])
    last = torch.tensor([[len(r.prompt) + int(r.config.max_new_tokens or 0) - 1] for r in requests])
    return torch.tensor(tokens), torch.minimum(first + torch.arange(width), last)


def accept(request: Request, draft: Sequence[int], logits: Tensor) -> None:
    """Append the accepted part of a draft and one more token to a request.

    logits: [T, V], after the last token and after each drafted one. A request whose processor fails is finished.
    """
    for place, drafted in enumerate(itertools.chain(draft, [None])):
        try:
            token = twice(functools.partial(next_token, request, logits[place : place + 1]))
        except FailedTwice as failed:
            request.finish(End.FAILED, failed.error)
            return
        request.append(token)
        if token != drafted or request.stage is Stage.FINISHED:
            return


def note_round(
    session: Session,
    drafts: Sequence[Sequence[int]],
    before: Sequence[int],
    after: Sequence[int],
    seconds: float | None,
) -> None:
    """Count a round. before, after: tokens cached of each row. seconds: None if the round compiled."""
    for draft, had, now in zip(drafts, before, after, strict=True):
        if now > had:  # a failed row has generated nothing
            note_draft(session, len(draft), now - had - 1, None)
    if session.draft_length is not None and seconds is not None and any(drafts):
        session.draft_length.took(max(map(len, drafts)), seconds)
