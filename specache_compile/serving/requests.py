"""The fields of a request. Fields that would make the answer wrong are rejected; unknown fields are ignored
and logged."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# Unsupported fields that would change the answer. Other unknown fields are ignored.
REFUSED = (
    "functions", "function_call", "suffix", "echo", "logprobs", "top_logprobs", "continue_final_message", "bad_words",
    "allowed_token_ids", "typical_p", "grammar", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar",
)  # fmt: skip

# Strict: "1", 1.0 and true are not the number 1.
Count = Annotated[int, Field(strict=True, ge=1)]
One = Annotated[int, Field(strict=True, ge=1, le=1)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
# Below 1e-5 the likeliest token has probability 1, as at 0; far below it logits overflow.
Temperature = Annotated[Number, Field(ge=0, le=2), AfterValidator(lambda given: given if given >= 1e-5 else 0.0)]
# Langchain sends a list of one text.
Prompt = Annotated[str, BeforeValidator(lambda x: x[0] if isinstance(x, list) and len(x) == 1 else x)]
# Bounded, because each token's text is searched for all stop strings.
Stop = Annotated[str, Field(min_length=1, max_length=64)]


class StreamOptions(BaseModel):
    include_usage: Flag | None = None


class JsonSchema(BaseModel):
    rules: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing: type json_schema requires it")
        return self


class Body(BaseModel):
    """The fields of both endpoints."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    ignore_eos: Flag | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    stop_token_ids: list[Annotated[int, Field(strict=True, ge=0)]] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 63)] | None = None
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[Number, Field(ge=-100, le=100)]] | None = None
    n: One | None = None
    best_of: One | None = None
    response_format: ResponseFormat | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text."""
        form = self.response_format
        if form is not None and form.json_schema is not None:
            return form.json_schema.rules
        return {"type": "object"} if form is not None and form.type == "json_object" else None

    @model_validator(mode="before")
    @classmethod
    def is_unicode(cls, given: Any) -> Any:
        if isinstance(given, dict):  # bytes are a body of another content type
            json.dumps(given, ensure_ascii=False).encode()  # half of a surrogate pair raises a ValueError
        return given

    @model_validator(mode="after")
    def agrees_with_itself(self) -> Body:
        given = self.model_extra or {}
        refused = [name for name in REFUSED if (value := given.get(name)) or (value == 0 and value is not False)]
        if refused:
            raise ValueError(f"{', '.join(refused)}: not supported. Leave it out; use response_format for a schema")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if self.max_tokens not in (None, self.longest):
            raise ValueError("max_tokens differs from max_completion_tokens. Pass one of them")
        if self.min_tokens is not None and self.longest is not None and self.min_tokens > self.longest:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.longest}")
        return self


class CompletionBody(Body):
    prompt: Prompt


class TextPart(BaseModel):
    type: Literal["text", "input_text"]
    text: str


def joined(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def arguments_of(given: Any) -> Any:
    """A replayed call's arguments: an object, or the text if it is not one."""
    try:
        found = (json.loads(given) if given.strip() else {}) if isinstance(given, str) else given
    except ValueError:
        return given
    return found if isinstance(found, dict) else given


# Letters and digits of a call's id; Mistral's templates accept no other number.
CALL_ID = 9


def call_id(given: str) -> str:
    """An id of nine letters and digits: `given`, or its hash."""
    return given if len(given) == CALL_ID and given.isalnum() else hashlib.sha256(given.encode()).hexdigest()[:CALL_ID]


CallId = Annotated[str, AfterValidator(call_id)]


class Called(BaseModel):
    name: str
    arguments: Annotated[dict[str, Any] | str, BeforeValidator(arguments_of)]


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: CallId | None = None
    function: Called


class Message(BaseModel):
    """A message as templates expect it: its text is one string, and a call's arguments are an object. Further fields
    are passed on."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Annotated[str | list[TextPart] | None, AfterValidator(joined)] = ""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: CallId | None = None


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
    modalities: list[Literal["text"]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | Tool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
