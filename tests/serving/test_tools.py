"""Tool calls through a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from served import TEMPLATE, Served, one_of, posted, serving, write_checkpoint

pytestmark = pytest.mark.one_process

CHATML = TEMPLATE.replace("}<assistant>{", "}<|im_start|>assistant\n{")
WITH_TOOLS = "{% if tools %}Call with <tool_call>: {{ tools | tojson }}{% endif %}" + CHATML
PARAMETERS = one_of(city=["Rome", "Oslo"])
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "go", "parameters": PARAMETERS}},
]


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
    status, reply = posted(served, "v1/chat/completions", ask_of(served, tool_choice=other))
    assert (status, "tools has no fly" in reply) == (400, True), reply


class Seen:
    """What a tool was called with."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def look(self, city: Literal["Rome", "Oslo"]) -> str:
        """Return the weather of a city."""
        self.cities.append(city)
        return f"Sun in {city}"


def test_the_agents_sdk_calls_a_tool_and_ends_with_a_text(served: Served) -> None:
    """The SDK requires the call in its first request alone, and sends `strict: true`."""
    seen = Seen()

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            agent = Agent(
                name="weather",
                instructions="Look.",
                model=OpenAIChatCompletionsModel(served.name, client),
                tools=[function_tool(seen.look)],
                model_settings=ModelSettings(tool_choice="required", max_tokens=80, temperature=0),
            )
            return await Runner.run(agent, "Where?", run_config=RunConfig(tracing_disabled=True))

    result = asyncio.run(run())
    assert [type(item).__name__ for item in result.new_items] == [
        "ToolCallItem", "ToolCallOutputItem", "MessageOutputItem",
    ]  # fmt: skip
    assert [item.output for item in result.new_items[1:2]] == [f"Sun in {seen.cities[0]}"]
    assert result.final_output


def test_pydantic_ai_calls_a_tool_and_ends_with_a_text(served: Served) -> None:
    seen = Seen()

    def first_a_call(context: RunContext[Any]) -> Any:
        choice, tokens = ("required", 80) if context.run_step <= 1 else ("none", 8)
        return {"tool_choice": choice, "max_tokens": tokens, "temperature": 0}

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            model = OpenAIChatModel(served.name, provider=OpenAIProvider(openai_client=client))
            return await PydanticAgent(model, tools=[seen.look], model_settings=first_a_call).run("Where?")

    result = asyncio.run(run())
    parts = [part for message in result.all_messages() for part in message.parts]
    assert [part.part_kind for part in parts] == ["user-prompt", "tool-call", "tool-return", "text"]
    assert parts[2].content == f"Sun in {seen.cities[0]}"
    assert result.output == parts[-1].content
