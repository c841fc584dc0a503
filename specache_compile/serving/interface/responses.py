"""OpenAI's Responses: what may be asked, as a chat, and its answer, whole or as typed events. Nothing is stored: no
response goes on from another one."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers.cli.serving.utils import ReasoningText, ToolCall

from specache_compile.serving.answer import Answer

from .replies import told_error
from .requests import Body, ChatBody, Count, Flag, ResponseFormat, Usage

Kind = Literal["message", "reasoning"]


class Part(BaseModel):
    """A piece of a message: its own text, or that of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str


class Said(BaseModel):
    type: Literal["message"] = "message"
    role: str
    content: str | list[Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else " ".join(part.text for part in self.content)


class Thought(BaseModel):
    """An earlier answer's reasoning, which the next one does not read."""

    type: Literal["reasoning"]


class Text(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: ResponseFormat | None = None


class ResponseBody(Body):
    input: str | Annotated[list[Said | Thought], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: Text | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Flag | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    access_programs: None = None
    background_options: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    max_tool_calls: None = None
    moderation: None = None
    previous_response_id: None = None
    prompt: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning: None = None
    top_logprobs: None = None

    @property
    def longest(self) -> int | None:
        return self.max_output_tokens

    @model_validator(mode="after")
    def has_one_answer(self) -> ResponseBody:
        if self.max_tokens is not None:
            raise ValueError("max_tokens: max_output_tokens here")
        if self.n not in (None, 1):
            raise ValueError("n: a response is one answer")
        if self.instructions is None and not isinstance(self.input, str) and not messages_of(self.input):
            raise ValueError("input: no message is among it")
        return self

    def as_chat(self) -> ChatBody:
        """The same question in a chat's words."""
        system: list[Any] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        said = [Said(role="user", content=self.input)] if isinstance(self.input, str) else messages_of(self.input)
        messages: list[Any] = [{"role": one.role, "content": one.text} for one in said]
        shared = self.model_dump(include=set(Body.model_fields) - {"n", "max_tokens", "stream", "stream_options"})
        return ChatBody(messages=[*system, *messages], max_tokens=self.max_output_tokens, **shared)


def messages_of(given: Sequence[Said | Thought]) -> list[Said]:
    return [one for one in given if isinstance(one, Said)]


@dataclass
class Item:
    """One item of the output as it grows: a message, or reasoning before it."""

    kind: Kind
    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def name(self) -> str:
        """What its events are called by."""
        return "reasoning_text" if self.kind == "reasoning" else "output_text"

    def part(self) -> dict[str, Any]:
        more: dict[str, Any] = {} if self.kind == "reasoning" else {"annotations": [], "logprobs": []}
        return {"type": self.name, "text": self.text, **more}

    def whole(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        more: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {"type": self.kind, "id": self.id, "status": status, "content": content, **more}


class ResponseReply:
    """name: the model's."""

    def __init__(self, name: str, answers: Sequence[Answer]) -> None:
        (self.answer,) = answers
        self.name, self.id, self.created = name, f"resp_{uuid.uuid4().hex}", int(time.time())
        self.output: list[dict[str, Any]] = []

    async def whole(self) -> JSONResponse:
        last = {"response": self.response("completed")}
        async for event in self.told():
            last = event
        return JSONResponse(last["response"])

    def stream(self, usage: Usage) -> StreamingResponse:
        """usage: nothing; the last event always reports it."""
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self) -> AsyncIterator[str]:
        numbers = itertools.count()
        try:
            async for event in self.told():
                yield sent(event, next(numbers))
        except Exception as error:  # the stream has begun, so the status cannot tell it
            told = {"code": "server_error", "message": told_error(error)[1]["error"]["message"]}
            yield sent({"type": "response.failed", "response": self.response("failed", error=told)}, next(numbers))

    async def told(self) -> AsyncIterator[dict[str, Any]]:
        """The events of the answer as its pieces come."""
        for begun in ("created", "in_progress"):
            yield {"type": f"response.{begun}", "response": self.response("in_progress")}
        item: Item | None = None
        async for piece in self.answer.pieces():
            kind: Kind = "reasoning" if isinstance(piece, ReasoningText) else "message"
            if item is None or item.kind != kind:
                for event in self.closed(item):
                    yield event
                item = Item(kind)
                for event in self.opened(item):
                    yield event
            text = piece.arguments if isinstance(piece, ToolCall) else str(piece)  # a call of a tool that nobody offers
            item.text += text
            yield {"type": f"response.{item.name}.delta", "delta": text, **self.place(item)}
        status = "incomplete" if self.answer.finish == "length" else "completed"
        for event in self.closed(item, status):
            yield event
        yield {"type": f"response.{status}", "response": self.response(status)}

    def place(self, item: Item) -> dict[str, Any]:
        more: dict[str, Any] = {} if item.kind == "reasoning" else {"logprobs": []}
        return {"item_id": item.id, "output_index": len(self.output), "content_index": 0, **more}

    def opened(self, item: Item) -> list[dict[str, Any]]:
        added = {"item": item.whole("in_progress"), "output_index": len(self.output)}
        return [
            {"type": "response.output_item.added", **added},
            {"type": "response.content_part.added", "part": item.part(), **self.place(item)},
        ]

    def closed(self, item: Item | None, status: str = "completed") -> list[dict[str, Any]]:
        """The last events of an item, which is now part of the output."""
        if item is None:
            return []
        place, done = self.place(item), item.whole(status)
        self.output.append(done)
        return [
            {"type": f"response.{item.name}.done", "text": item.text, **place},
            {"type": "response.content_part.done", "part": item.part(), **place},
            {"type": "response.output_item.done", "item": done, "output_index": place["output_index"]},
        ]

    def response(self, status: str, error: Any = None) -> dict[str, Any]:
        """All that is known by now."""
        prompt, said = self.answer.prompt, self.answer.said
        usage = {
            "input_tokens": prompt, "output_tokens": said, "total_tokens": prompt + said,
            "input_tokens_details": {
                "cached_tokens": self.answer.reused, "cache_write_tokens": prompt - self.answer.reused,
            },
            "output_tokens_details": {"reasoning_tokens": self.answer.thought},
        }  # fmt: skip
        return {
            "id": self.id, "object": "response", "created_at": self.created, "model": self.name, "status": status,
            "output": list(self.output), "error": error, "store": False, "tools": [], "tool_choice": "auto",
            "parallel_tool_calls": True, "usage": usage if status in ("completed", "incomplete") else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }  # fmt: skip


def sent(event: dict[str, Any], number: int) -> str:
    return f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"
