"""What a request may ask. `transformers serve` leaves fields unread that it has no use for; those that would change the
answer are refused here, so that no answer is silently another one."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import BaseHandler
from transformers.utils.chat_template_utils import render_jinja_template

from .model import ServedModel

# Arguments of the chat template's call that are the server's.
RESERVED = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
    "messages",
    "load_audio_from_video",
}
# Below it the likeliest token has all of the chance; logits that are divided by far less overflow.
COLDEST = 1e-5

Text = Annotated[str, Field(min_length=1)]


def warm_enough(temperature: float) -> float:
    return temperature if temperature >= COLDEST else 0.0


def is_json(text: str) -> str:
    json.loads(text)
    return text


class Body(BaseModel):
    """Of both endpoints. Fields that are not here go on to the handlers, which refuse unknown ones."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(warm_enough)] | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=0, le=2)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    stop: Text | list[Text] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Literal[1] | None = None
    generation_config: None = None


class CompletionBody(Body):
    prompt: str
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: str | None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Function(BaseModel):
    name: str
    arguments: Annotated[str, AfterValidator(is_json)]


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    function: Function


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None


class ResponseFormat(BaseModel):
    type: Literal["text"]


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Literal["auto", "none"] | None = None
    tools: list[dict[str, Any]] | None = None
    functions: None = None
    function_call: None = None
    reasoning_effort: None = None
    audio: None = None
    web_search_options: None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def are_the_templates(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        reserved = sorted(RESERVED & set(given or {}))
        if reserved:
            raise ValueError(f"{', '.join(reserved)}: not the client's to set")
        return given

    @model_validator(mode="after")
    def has_no_tools_where_none_may_be_called(self) -> ChatBody:
        if self.tool_choice == "none":
            self.tools = None
        return self


class AsOpenAI(BaseHandler):
    """How a request's fields become a generation's: as OpenAI has them, where `transformers serve` differs."""

    model_manager: ServedModel

    def _build_generation_config(self, body: dict[str, Any], *given: Any, **more: Any) -> Any:
        # The seed is set when the model begins with the request, not while another one draws.
        own = {name: value for name, value in body.items() if name != "seed" and value not in ([], {})}
        config = super()._build_generation_config(own, *given, **more)
        config.max_new_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        if body.get("temperature") is not None or body.get("top_p") is not None:
            config.do_sample = body.get("temperature") != 0
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        config.cache_implementation = None  # the cache is a conversation's
        bias = body.get("logit_bias") or {}
        unknown = [token for token in bias if token >= self.model_manager.vocabulary]
        if unknown:
            raise HTTPException(400, f"logit_bias: the model has no token {unknown[0]}")
        if bias:  # of completions too, whose handler reads none
            config.sequence_bias = {(token,): value for token, value in bias.items()}
        return config


class Completions(AsOpenAI, CompletionHandler):
    pass


class ChatCompletions(AsOpenAI, ChatCompletionHandler):
    pass
