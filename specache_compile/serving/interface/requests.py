"""The fields of a request. Fields that would make the answer wrong are rejected; unknown fields are ignored
and logged."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

# Arguments of the chat template that only the server sets.
RESERVED = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
    "messages",
    "load_audio_from_video",
}
# Below this temperature the likeliest token has probability 1; far below it logits overflow.
COLDEST = 1e-5
# Unsupported fields that would change the answer. Other unknown fields are ignored.
REFUSED = (
    "functions", "function_call", "suffix", "continue_final_message", "bad_words", "allowed_token_ids", "grammar",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
# Most answers to one request.
MOST_CHOICES = 16


def warm_enough(temperature: float) -> float:
    return temperature if temperature >= COLDEST else 0.0


# Strict: "1", 1.0 and true are not the number 1.
Count = Annotated[int, Field(strict=True, ge=1)]
One = Annotated[int, Field(strict=True, ge=1, le=1)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
# Bounded, because each token's text is searched for all stop strings.
Stop = Annotated[str, Field(min_length=1, max_length=64)]


# Which events of a stream report usage.
Usage = Literal["none", "last", "every"]


class StreamOptions(BaseModel):
    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None

    @property
    def usage(self) -> Usage:
        """Which events report usage. Without `include_usage` none does, like in vLLM."""
        if not self.include_usage:
            return "none"
        return "every" if self.continuous_usage_stats else "last"


class JsonSchema(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    rules: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing: type json_schema requires it")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.rules
        return {"type": "object"} if self.type == "json_object" else None


class Body(BaseModel):
    """The fields of both endpoints."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    ignore_eos: Flag | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    stop_token_ids: list[Annotated[int, Field(strict=True, ge=0)]] | None = None
    skip_special_tokens: Flag | None = None
    temperature: Annotated[Number, Field(ge=0, le=2), AfterValidator(warm_enough)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 63)] | None = None
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[Number, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES)] | None = None
    response_format: ResponseFormat | None = None

    @property
    def ignored(self) -> list[str]:
        """The names of the ignored fields."""
        return sorted(self.model_extra or {})

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens to report at each place; None: no log-probabilities."""
        return None

    @model_validator(mode="before")
    @classmethod
    def is_unicode(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, dict) else ():
            try:
                json.dumps([name, value], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name!r} is not Unicode text: it has half of a surrogate pair") from None
        return given

    @model_validator(mode="after")
    def agrees_with_itself(self) -> Body:
        refused = [name for name in REFUSED if self.model_extra and self.model_extra.get(name)]
        if refused:
            raise ValueError(f"{', '.join(refused)}: not supported; use tools, or response_format for a schema")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if self.min_tokens is not None and self.longest is not None and self.min_tokens > self.longest:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.longest}")
        return self


class CompletionBody(Body):
    prompt: str
    best_of: One | None = None
    echo: Literal[False] | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=5)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class TextPart(BaseModel):
    type: Literal["text", "input_text"]
    text: str


class Called(BaseModel):
    name: str
    arguments: str


# Letters and digits of a call's id; Mistral's templates accept no other number.
CALL_ID = 9


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    function: Called


class Message(BaseModel):
    """A message. Further fields are passed to the template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None


class Function(BaseModel):
    """A function. strict: its arguments must follow `parameters`; it is for the server, so templates do not get it."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[Flag | None, Field(exclude=True)] = None


class Tool(BaseModel):
    """A function that the answer may call; as `tool_choice`, by its name, the one that it must call."""

    type: Literal["function"]
    function: Function


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    modalities: list[Literal["text"]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | Tool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("chat_template_kwargs")
    @classmethod
    def are_the_templates(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        reserved = sorted(RESERVED & set(given or {}))
        if reserved:
            raise ValueError(f"{', '.join(reserved)}: only the server sets these. Leave them out")
        return given

    @model_validator(mode="after")
    def asks_for_one_thing(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens differs from max_completion_tokens. Pass one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        return self
