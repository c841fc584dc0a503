"""An answer in OpenAI's format, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import ReasoningText, ToolCall

from .answer import Answer


class Reply:
    """A reply to a completion; `ChatReply` adds a chat's. name: the model's."""

    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, name: str, answer: Answer) -> None:
        self.answer = answer
        self.common = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self.calls = 0

    async def whole(self) -> JSONResponse:
        pieces = [piece async for piece in self.answer.pieces()]
        choice = {"index": 0, **self.content(pieces), "logprobs": None, "finish_reason": self.finish()}
        return JSONResponse(self.told(self.whole_object, [choice], usage=self.usage()))

    def stream(self, usage: bool) -> StreamingResponse:
        """usage: whether a last event reports it."""
        return StreamingResponse(self.events(usage), media_type="text/event-stream")

    async def events(self, usage: bool) -> AsyncIterator[str]:
        first = True
        try:
            async for piece in self.answer.pieces():
                yield self.event(self.part(piece, first), None)
                first = False
        except Exception as error:  # the stream has begun, so the status cannot tell it
            yield f"data: {json.dumps(told_error(error)[1])}\n\n"
            return
        yield self.event(self.part("", first), self.finish())
        if usage:
            yield f"data: {json.dumps(self.told(self.part_object, [], usage=self.usage()))}\n\n"
        yield "data: [DONE]\n\n"

    def event(self, part: dict[str, Any], finish: str | None) -> str:
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish}
        return f"data: {json.dumps(self.told(self.part_object, [choice]))}\n\n"

    def told(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.common, "object": kind, "choices": choices, **more}

    def usage(self) -> dict[str, int]:
        prompt, said = self.answer.prompt, self.answer.said
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}

    def finish(self) -> str:
        return self.answer.finish

    def content(self, pieces: list[Any]) -> dict[str, Any]:
        return {"text": "".join(pieces)}

    def part(self, piece: Any, first: bool) -> dict[str, Any]:
        return {"text": piece}


class ChatReply(Reply):
    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def finish(self) -> str:
        return "tool_calls" if self.calls else self.answer.finish

    def content(self, pieces: list[Any]) -> dict[str, Any]:
        calls = [self.call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        thought = "".join(piece for piece in pieces if isinstance(piece, ReasoningText))
        text = "".join(piece for piece in pieces if not isinstance(piece, ReasoningText | ToolCall))
        if self.answer.question.parser is not None:  # as in a message that is read at once
            thought, text = thought.strip(), text.strip()
        message = {"role": "assistant", "content": text}
        more = {"reasoning_content": thought, "tool_calls": calls}
        return {"message": message | {name: value for name, value in more.items() if value}}

    def part(self, piece: Any, first: bool) -> dict[str, Any]:
        # The role comes with the first token: who measures would take an earlier event for the token.
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if isinstance(piece, ToolCall):
            delta["tool_calls"] = [{"index": self.calls, **self.call(piece)}]
        elif piece:
            delta["reasoning_content" if isinstance(piece, ReasoningText) else "content"] = piece
        return {"delta": delta}

    def call(self, piece: ToolCall) -> dict[str, Any]:
        self.calls += 1
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def told_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """A status, and the error in OpenAI's format."""
    status, message = 500, str(error) or type(error).__name__
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "code": status}}
