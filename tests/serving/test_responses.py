"""OpenAI's Responses, as its client asks for them: a chat's answers, in events of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams
from pydantic import TypeAdapter
from transformers import GenerationConfig, LlamaForCausalLM

from conftest import byte_tokenizer
from served import Served, answer, parser_of, posted, prompt_of, serving, write_checkpoint
from specache_compile.serving.answer import Answer, Question, Ticket
from specache_compile.serving.interface.responses import ResponseBody, ResponseReply
from specache_compile.serving.metrics import Metrics

pytestmark = pytest.mark.one_process


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(write_checkpoint(tmp_path_factory.mktemp("checkpoint"))) as served:
        yield served


def test_a_response_is_the_uncompiled_models_answer(served: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a tier? " * 5}]
    uncompiled = LlamaForCausalLM.from_pretrained(served.name).eval()
    expected = answer(uncompiled, prompt_of(messages), 9)
    ask: dict[str, Any] = {
        "model": served.name, "instructions": "Be brief.", "input": messages[1]["content"], "max_output_tokens": 9,
        "temperature": 0,
    }  # fmt: skip
    whole = served.client.responses.create(**ask)
    assert (whole.output_text, whole.status) == (expected, "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(prompt_of(messages)), 9)

    *_, last = events = list(served.client.responses.create(**ask, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert (last.type, last.response.output_text) == ("response.incomplete", expected)
    assert last.response.usage.input_tokens_details.cached_tokens == len(prompt_of(messages)) - 1

    # The next turn, with the response's own items in front.
    spoken = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": messages[1]["content"]}]}
    turn = [spoken, *(item.model_dump() for item in whole.output), {"role": "user", "content": "Why?"}]
    messages += [{"role": "assistant", "content": expected}, {"role": "user", "content": "Why?"}]
    assert served.client.responses.create(**{**ask, "input": turn}).output_text == answer(
        uncompiled, prompt_of(messages), 9
    )


def events_of(text: str) -> list[dict[str, Any]]:
    """Where a model says this text."""

    async def said() -> list[str]:
        question = Question({}, GenerationConfig(max_new_tokens=200, eos_token_id=7), parser=parser_of())
        one = Answer(Ticket(), question, byte_tokenizer(), Metrics())
        for tokens in (b"<user>Hi", *(bytes([byte]) for byte in text.encode())):
            one.put(torch.tensor(list(tokens)))
        one.close()
        return [event async for event in ResponseReply("tiny", [one]).events()]

    return [json.loads(event.partition("data: ")[2]) for event in asyncio.run(said())]


def test_every_event_is_one_of_openais_and_reasoning_is_an_item_of_its_own() -> None:
    events = events_of("Hm.</think>\n\nI look.")
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = Response.model_validate(events[-1]["response"])
    assert [item.type for item in last.output] == ["reasoning", "message"]
    assert last.output[0].content[0].text.strip() == "Hm."
    assert last.output_text.strip() == "I look."
    assert 0 < last.usage.output_tokens_details.reasoning_tokens < last.usage.output_tokens
    for index, name in enumerate(("reasoning_text", "output_text")):
        kinds = [event["type"] for event in events if event.get("output_index") == index]
        shown = [f"response.{name}.delta" if kind.endswith("delta") else kind for kind in dict.fromkeys(kinds)]
        assert shown == [
            "response.output_item.added", "response.content_part.added", f"response.{name}.delta",
            f"response.{name}.done", "response.content_part.done", "response.output_item.done",
        ]  # fmt: skip


def test_an_error_in_a_stream_is_its_last_event() -> None:
    async def said() -> list[str]:
        one: Any = SimpleNamespace(pieces=failing, prompt=1, said=0, reused=0, thought=0)
        return [event async for event in ResponseReply("tiny", [one]).events()]

    async def failing() -> Any:
        yield "Yes"
        raise RuntimeError("no memory")

    last = json.loads(asyncio.run(said())[-1].partition("data: ")[2])
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "no memory")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input: no message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"max_tokens": 3}, "max_tokens: max_output_tokens here"),
        ({"n": 2}, "n: a response is one answer"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "function", "name": "look"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_cannot_be_answered_as_asked_is_refused(served: Served, given: Any, message: str) -> None:
    status, told = posted(served, "v1/responses", {"input": "Hello", **given})
    assert (status, message in told) == (400, True), told


def test_every_field_of_openais_is_known() -> None:
    assert set(ResponseParams.__mutable_keys__) <= set(ResponseBody.model_fields)
