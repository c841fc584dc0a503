"""Answers in OpenAI's format, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import ReasoningText, ToolCall

from specache_compile.serving.answer import Answer, Likely

from .requests import CALL_ID, Usage


class Choice:
    """One answer to a completion; `ChatChoice` is for a chat."""

    def __init__(self, index: int, answer: Answer) -> None:
        self.index, self.answer = index, answer

    async def whole(self) -> dict[str, Any]:
        found = [piece async for piece in self.answer.pieces()]
        likely = [piece for piece in found if isinstance(piece, Likely)]
        return self.framed(self.content([piece for piece in found if not isinstance(piece, Likely)]), likely)

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        """The parts as they come, each with the `Likely` before it; the last one is empty and has the finish reason."""
        likely, first = list[Likely](), True
        async for piece in self.answer.pieces():
            if isinstance(piece, Likely):
                likely.append(piece)
                continue
            yield self.framed(self.part(piece, first), likely, ends=False)
            likely, first = [], False
        yield self.framed(self.part("", first), likely)

    def framed(self, content: dict[str, Any], likely: list[Likely], ends: bool = True) -> dict[str, Any]:
        found = None if self.answer.question.logprobs is None else self.logprobs(likely)
        finish = self.finish() if ends else None
        return {"index": self.index, **content, "logprobs": found, "finish_reason": finish}

    def finish(self) -> str:
        return self.answer.finish

    def content(self, pieces: list[Any]) -> dict[str, Any]:
        return {"text": "".join(pieces)}

    def part(self, piece: Any, first: bool) -> dict[str, Any]:
        return {"text": piece}

    def logprobs(self, likely: list[Likely]) -> dict[str, Any]:
        return {
            "tokens": [one.text for one in likely],
            "token_logprobs": [one.logprob for one in likely],
            "top_logprobs": [by_text(one.likeliest) for one in likely],
        }


def by_text(likeliest: Sequence[Likely]) -> dict[str, float]:
    """Log-probabilities by the tokens' texts. Of equal texts, the less likely are named token_id:N, like in vLLM."""
    named = dict[str, float]()
    for one in likeliest:
        named[f"token_id:{one.token}" if one.text in named else one.text] = one.logprob
    return named


class ChatChoice(Choice):
    """calls: number of tool calls so far."""

    calls = 0

    def finish(self) -> str:
        return "tool_calls" if self.calls else self.answer.finish

    def content(self, pieces: list[Any]) -> dict[str, Any]:
        calls = [self.call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        thought = "".join(piece for piece in pieces if isinstance(piece, ReasoningText))
        text = "".join(piece for piece in pieces if not isinstance(piece, ReasoningText | ToolCall))
        if self.answer.question.parser is not None:  # as in a whole message
            thought, text = thought.strip(), text.strip()
        message = {"role": "assistant", "content": text}
        more = {"reasoning_content": thought, "tool_calls": calls}
        return {"message": message | {name: value for name, value in more.items() if value}}

    def part(self, piece: Any, first: bool) -> dict[str, Any]:
        # The role comes with the first token: a benchmark would count an earlier event as the token.
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if isinstance(piece, ToolCall):
            delta["tool_calls"] = [{"index": self.calls, **self.call(piece)}]
        elif piece:
            delta["reasoning_content" if isinstance(piece, ReasoningText) else "content"] = piece
        return {"delta": delta}

    def call(self, piece: ToolCall) -> dict[str, Any]:
        self.calls += 1
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": uuid.uuid4().hex[:CALL_ID], "type": "function", "function": function}

    def logprobs(self, likely: list[Likely]) -> dict[str, Any]:
        def place(one: Likely) -> dict[str, Any]:
            return {"token": one.text, "logprob": one.logprob, "bytes": list(one.bytes)}

        content = [{**place(one), "top_logprobs": [place(other) for other in one.likeliest]} for one in likely]
        return {"content": content, "refusal": None}


class Reply:
    """A reply to a completion; `ChatReply` is for a chat. name: the model's name."""

    prefix, whole_object, part_object, choice = "cmpl", "text_completion", "text_completion", Choice

    def __init__(self, name: str, answers: Sequence[Answer]) -> None:
        self.choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        self.common = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    async def whole(self) -> JSONResponse:
        choices = await asyncio.gather(*(choice.whole() for choice in self.choices))
        return JSONResponse(self.framed(self.whole_object, choices, usage=self.usage()))

    def stream(self, usage: Usage) -> StreamingResponse:
        """Stream the reply. usage: which events report the usage so far; the last of them contains nothing else."""
        return StreamingResponse(self.events(usage), media_type="text/event-stream")

    async def events(self, usage: Usage) -> AsyncIterator[str]:
        try:
            async for part in together([choice.parts() for choice in self.choices]):
                so_far = {"usage": self.usage()} if usage == "every" else {}
                yield f"data: {json.dumps(self.framed(self.part_object, [part], **so_far))}\n\n"
        except Exception as error:  # the stream has begun, so the status cannot report the error
            yield f"data: {json.dumps(error_body(error)[1])}\n\n"
            return
        if usage != "none":
            yield f"data: {json.dumps(self.framed(self.part_object, [], usage=self.usage()))}\n\n"
        yield "data: [DONE]\n\n"

    def framed(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.common, "object": kind, "choices": choices, **more}

    def usage(self) -> dict[str, Any]:
        """The usage; the prompt's tokens count once."""
        answers = [choice.answer for choice in self.choices]
        prompt, generated = answers[0].prompt, sum(answer.generated for answer in answers)
        cached = {"cached_tokens": answers[0].reused}
        return {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": cached,
        }  # fmt: skip


class ChatReply(Reply):
    prefix, whole_object, part_object, choice = "chatcmpl", "chat.completion", "chat.completion.chunk", ChatChoice


async def together(sources: Sequence[AsyncIterator[Any]]) -> AsyncIterator[Any]:
    """Yield from several iterators as results come. Raises the first exception."""
    nexts = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = nexts.pop(task)
                try:
                    yield task.result()
                except StopAsyncIteration:
                    continue
                nexts[asyncio.ensure_future(anext(source))] = source
    finally:
        for task in nexts:
            task.cancel()
        await asyncio.gather(*nexts, return_exceptions=True)


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status, and the error in OpenAI's format."""
    status, message = 500, str(error) or type(error).__name__
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "code": status}}
