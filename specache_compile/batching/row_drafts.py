"""What the rows of a batch draft (options verify and lookup), and what each says of its draft.

A draft may be anything: a row says what its own processors and random numbers make of the verification's logits, token
by token, while that is what was drafted. So greedy or drawn, it says what it says one token a step, the same for
the same seed. Rows with shorter drafts than others' are filled up with tokens that nobody says.
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
from specache_compile.generate.drafts import IN_PARTS, draft_length_of
from specache_compile.generate.look_up import DRAFTED, looked_up
from specache_compile.generate.verify import forgetful
from specache_compile.options import MethodOptions
from specache_compile.runtime.draft_length import MOST
from specache_compile.runtime.session import Mode, Session, session_of, sessions_of

from .request import End, Request, Stage, chosen, drawn
from .twice import FailedTwice, twice

# What a row is filled up with.
NOTHING = 0
# One token of every row: tokens and positions [B, 1] → logits [B, V].
OneToken = Callable[[Tensor, Tensor], Tensor]


def most_drafted(options: MethodOptions) -> int:
    """Tokens of a draft, at most."""
    if options.lookup:
        return DRAFTED
    return options.verify if isinstance(options.verify, int) else MOST if options.drafts else 0


def drafting_session(cache: DynamicCache) -> Session | None:
    """The session of a cache that takes drafts; None where each of its steps says a token a row."""
    session = session_of(cache)
    return session if session is not None and session.options.drafts else None


def reason_not_to_draft(model: Any, cache: DynamicCache, rows: int) -> str | None:
    """Why rows whose options draft say one token a step; None where they draft."""
    if len(sessions_of(cache)) > 1:
        return IN_PARTS
    if rows > 1 and not is_held_whole(cache):
        return "a layer that is not held cannot drop a different number of tokens in each row"
    return forgetful(model, cache)


def room_of(request: Request) -> int:
    """Tokens that may be drafted for a request: behind them it says one more."""
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in request.processors):
        return 0  # it runs the model on a cache of its own, in the order of the tokens
    return int(request.config.max_new_tokens or 0) - request.reached - 1


def looked_up_for(requests: Sequence[Request]) -> list[list[int]]:
    """Of each request what followed its last tokens where they stood before."""
    drafts = []
    for request in requests:
        ids, room = request.context, min(DRAFTED, room_of(request))
        ends = torch.tensor(sorted(request.ends), dtype=torch.int64)
        found = looked_up(ids, ends if len(ends) else None, room, ids.shape[1] + room + 1) if room > 0 else ids
        drafts.append(found[0, ids.shape[1] :].tolist())
    return drafts


def decoded_for(requests: Sequence[Request], session: Session, one_token: OneToken) -> list[list[int]]:
    """Of each request what its decode steps say next, with the random numbers that it will be verified with: the same
    ones choose the same of two distributions that are close. The cache has these tokens then."""
    rooms = [room_of(request) for request in requests]
    tokens = min(draft_length_of(session), max(rooms))
    drafts: list[list[int]] = [[] for _ in requests]
    with session.steps_for(Mode.DRAFT), random_numbers_kept(requests):
        for _ in range(tokens):
            newest = (part[:, -1:].clone(memory_format=torch.contiguous_format) for part in fed(requests, drafts))
            logits = one_token(*newest)
            for row, request in enumerate(requests):
                if len(drafts[row]) < rooms[row]:
                    drafts[row].append(candidate(request, drafts[row], logits[row : row + 1]))
    return drafts


def candidate(request: Request, draft: Sequence[int], logits: Tensor) -> int:
    """The next token of a draft, from the last one's logits [1, V]."""
    ids = torch.cat([request.context, torch.tensor([draft], dtype=torch.int64)], 1)
    try:
        return twice(lambda: chosen(request, ids, logits.to(torch.float32, copy=True)))
    except FailedTwice:  # of a processor, behind tokens that may never be said: if they are, it raises again
        return NOTHING


@contextlib.contextmanager
def random_numbers_kept(requests: Sequence[Request]) -> Iterator[None]:
    """Behind it the requests draw the numbers that they have drawn within."""
    states = [(generator, generator.get_state()) for r in requests if (generator := r.generator) is not None]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def fed(requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and positions [B, T] of a step that reads each request's last token, and its draft. A row that is
    filled up has no position behind its longest text's: a model may know none."""
    width = 1 + max(map(len, drafts))
    tokens = [
        [r.generated[r.reached - 1], *draft, *[NOTHING] * (width - 1 - len(draft))]
        for r, draft in zip(requests, drafts, strict=True)
    ]
    first = torch.tensor([[request.cached] for request in requests])
    last = torch.tensor([[len(r.prompt) + int(r.config.max_new_tokens or 0) - 1] for r in requests])
    return torch.tensor(tokens), torch.minimum(first + torch.arange(width), last)


def verifying(session: Session, drafts: Sequence[Sequence[int]]) -> contextlib.AbstractContextManager[None]:
    """Within it, a step is the verification of these drafts; a plain one where there is none."""
    drafted = [len(draft) for draft in drafts]
    return session.steps_for(Mode.VERIFY, drafted) if any(drafted) else session.steps_for(Mode.PLAIN)


def say(request: Request, draft: Sequence[int], logits: Tensor) -> None:
    """Have a request say what of its draft is right, and one token more, from the logits [T, V] behind its last token
    and each of the draft's. A request whose processor fails is over."""
    for place, guess in enumerate(itertools.chain(draft, [None])):
        try:
            token = twice(functools.partial(drawn, request, logits[place : place + 1]))
        except FailedTwice as failed:
            request.finish(End.FAILED, failed.error)
            return
        request.append(token)
        if token != guess or request.stage is Stage.FINISHED:
            return


def note_round(
    session: Session,
    drafts: Sequence[Sequence[int]],
    before: Sequence[int],
    after: Sequence[int],
    seconds: float | None,
) -> None:
    """Count a round of rows that had so many tokens cached before and after it. seconds: None where it compiled."""
    length = session.draft_length
    for draft, had, has in zip(drafts, before, after, strict=True):
        if has == had:  # a row that failed has said nothing
            continue
        accepted, held = has - had - 1, session.tiers.host_bytes(had) // session.tiers.batch
        session.statistics.verified.note(len(draft), accepted, held, streamed=0 if session.options.lookup else held)
        if length is not None and draft:
            length.note(len(draft), accepted, None)
    if length is not None and seconds is not None and any(drafts):
        length.took(max(map(len, drafts)), seconds)
