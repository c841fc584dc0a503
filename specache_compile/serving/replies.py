"""Answers in OpenAI's format, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import ReasoningText, ToolCall

from specache_compile.errors import RequestError

from .answer import Answer
from .requests import CALL_ID


class Reply:
    """A reply to a completion; `ChatReply` is for a chat. name: the model's name."""

    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, name: str, answer: Answer) -> None:
        self.answer = answer
        self.common = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    async def whole(self) -> JSONResponse:
        content = self.content([piece async for piece in self.answer.pieces()])
        return JSONResponse(self.framed(self.whole_object, content, self.finish()) | {"usage": self.usage()})

    async def events(self, usage: bool) -> AsyncIterator[str]:
        """The pieces as they come. usage: the last event is the usage."""
        first = True
        try:
            async for piece in self.answer.pieces():
                yield event(self.framed(self.part_object, self.part(piece, first)))
                first = False
        except Exception as error:  # the stream has begun, so the status cannot report the error
            yield event(error_body(error))
            return
        last = self.framed(self.part_object, self.part("", first), self.finish())
        yield event(last)
        if usage:
            yield event(last | {"choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def framed(self, kind: str, content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self.common, "object": kind, "choices": [choice]}

    def finish(self) -> str:
        return self.answer.finish

    def content(self, pieces: list[Any]) -> dict[str, Any]:
        return {"text": "".join(pieces)}

    def part(self, piece: Any, first: bool) -> dict[str, Any]:
        return {"text": piece}

    def usage(self) -> dict[str, Any]:
        prompt, generated = len(self.answer.question.ids), self.answer.generated
        return {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self.answer.reused},
        }  # fmt: skip


class ChatReply(Reply):
    """calls: number of tool calls so far."""

    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
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


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def refusal(error: Exception) -> JSONResponse:
    body = error_body(error)
    return JSONResponse(body, body["error"]["code"], getattr(error, "headers", None))


def error_body(error: Exception) -> dict[str, Any]:
    """An error in OpenAI's format. Its code is the status."""
    status, message = 500, str(error) or type(error).__name__
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestError):
        status = 400
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}
