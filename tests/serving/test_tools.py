"""Tool calls through a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from served import TEMPLATE, Served, posted, serving, write_checkpoint

pytestmark = pytest.mark.one_process

CHATML = TEMPLATE.replace("}<assistant>{", "}<|im_start|>assistant\n{")
WITH_TOOLS = "{% if tools %}Call with <tool_call>: {{ tools | tojson }}{% endif %}" + CHATML
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "go", "parameters": PARAMETERS}},
]
LOOK: Any = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (checkpoint / "chat_template.jinja").write_text(WITH_TOOLS)
    with serving(checkpoint) as served:
        yield served


def ask_of(served: Served, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Where?"}]
    return {"model": served.name, "messages": messages, "tools": TOOLS, "max_tokens": 200, "temperature": 0, **more}


def test_a_named_function_is_called_with_arguments_of_its_schema(served: Served) -> None:
    choice = served.client.chat.completions.create(**ask_of(served, tool_choice=LOOK)).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert not choice.message.content


def test_a_streamed_call_is_the_whole_one(served: Served) -> None:
    whole = served.client.chat.completions.create(**ask_of(served, tool_choice="required")).choices[0]
    parts = list(served.client.chat.completions.create(**ask_of(served, tool_choice="required", stream=True)))
    choices = [choice for part in parts for choice in part.choices]
    calls = [call.function for choice in choices for call in choice.delta.tool_calls or []]
    assert [(one.name, one.arguments) for one in calls] == [
        (one.function.name, one.function.arguments) for one in whole.message.tool_calls
    ]
    assert choices[-1].finish_reason == whole.finish_reason == "tool_calls"


def test_a_function_that_is_not_offered_cannot_be_required(served: Served) -> None:
    other = {"type": "function", "function": {"name": "fly"}}
    status, told = posted(served, "v1/chat/completions", ask_of(served, tool_choice=other))
    assert (status, "tools has no fly" in told) == (400, True), told
