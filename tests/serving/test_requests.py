"""Fields of a request: each one is followed or rejected."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest
import torch
from fastapi import HTTPException
from transformers import GenerationConfig, LlamaForCausalLM

from conftest import byte_tokenizer, tiny_llama
from served import TEMPLATE, Served, posted, serving, write_checkpoint
from specache_compile.serving.processors import Penalties
from specache_compile.serving.questions import chat, config_of
from specache_compile.serving.requests import ChatBody, CompletionBody, arguments_of

pytestmark = pytest.mark.one_process


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": ["~"]})
    tokenizer.save_pretrained(checkpoint)
    with serving(checkpoint) as served:
        yield served


END = 2
ENDS = {str(END): 100}
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"{", "JSON"),
        ({"messages": []}, "messages: List should have at least 1"),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "no critics here"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates not allowed"),
        ({"chat_template_kwargs": {"tokenize": False}}, "tokenize"),
        ({"max_completion_tokens": 2, "max_tokens": 3}, "max_tokens differs from"),
        ({"logprobs": True, "top_logprobs": 0}, "logprobs, top_logprobs: not supported"),
        ({"tools": [TOOL]}, "tools: the chat template of"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs: not supported. Leave it out; use response_format"),
    ],
)
def test_an_unsupported_chat_is_rejected(served: Served, given: Any, message: str) -> None:
    body = given if isinstance(given, bytes) else {"messages": [HELLO], **given}
    status, reply = posted(served, "v1/chat/completions", body)
    assert (status, message in reply) == (400, True), reply


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {"128": 1}}, "the model has no token 128"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"stop": ""}, "stop"),
        ({"stop": list("abcde")}, "List should have at most 4 items"),
        ({"stop": ["x" * 65]}, "String should have at most 64 characters"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens: 3 is more than max_tokens, 2"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only with stream"),
        ({"n": 2}, "n: Input should be less than or equal to 1"),
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, "logprobs: not supported"),
        ({"temperature": -1}, "temperature"),
        ({"seed": "1"}, "seed"),
        ({"prompt": "a" * 2048}, "the prompt has 2,048 tokens: the model's context is 2,048"),
        ({"prompt": "a" * 2000, "max_tokens": 49}, "49 would follow"),
    ],
)
def test_an_unsupported_completion_is_rejected(served: Served, given: Any, message: str) -> None:
    status, reply = posted(served, "v1/completions", {"prompt": "a", **given})
    assert (status, message in reply) == (400, True), reply


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("v1/completions", {"prompt": "a", "model": "gpt-9"}, 404, "model 'gpt-9' does not exist"),
        ("v1/completions", b" " * ((16 << 20) + 1), 413, "16,777,216 bytes"),
        ("other", {"model": "other"}, 404, "Not Found"),
    ],
)
def test_what_is_not_here_is_refused(served: Served, path: str, body: Any, status: int, message: str) -> None:
    refused, reply = posted(served, path, body)
    assert (refused, message in reply) == (status, True), reply


def test_a_body_of_no_type_is_refused(served: Served) -> None:
    """A web page may send one to this machine without a preflight request of the browser."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}')
        assert connection.getresponse().status == 400


def test_fields_without_effect_are_accepted(served: Served) -> None:
    nothing: dict[str, Any] = {"n": 1, "presence_penalty": 0.0, "stop": [], "logit_bias": {}, "logprobs": False}
    nothing |= {"user": "me", "metadata": {"run": "1"}, "store": True, "service_tier": "auto", "modalities": ["text"]}
    ask: dict[str, Any] = {"model": served.name, "messages": [HELLO], "max_completion_tokens": 3}
    assert served.client.chat.completions.create(**ask, **nothing).usage.completion_tokens == 3


def test_ignored_fields_are_named_in_one_line_of_the_log(served: Served, logged: list[str]) -> None:
    body = {"prompt": "a", "max_tokens": 1, "keep_alive": "5m", "cache_prompt": True}
    assert posted(served, "v1/completions", body)[0] == 200
    assert [line for line in logged if "ignored" in line] == ["ignored: cache_prompt, keep_alive"]


@pytest.mark.parametrize(
    "given",
    [{"top_k": 1}, {"min_p": 1.0}, {"repetition_penalty": 1.5, "temperature": 0}],
    ids=lambda given: next(iter(given)),
)
def test_a_sampling_field_is_that_of_generate(served: Served, given: dict[str, Any]) -> None:
    """Each value leaves one token that may be drawn, so the uncompiled model generates the same."""
    reference = LlamaForCausalLM.from_pretrained(served.name).eval()
    ids, sampled = torch.tensor([list(b"Once. " * 8)]), {"do_sample": True, "top_k": 0}
    more = {name: value for name, value in given.items() if name != "temperature"}
    said = reference.generate(ids, max_new_tokens=12, **({} if "temperature" in given else sampled) | more)
    body = {"prompt": ["Once. " * 8], "max_tokens": 12, **given}
    status, text = posted(served, "v1/completions", body)
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, bytes(said[0, ids.shape[1] :].tolist()).decode())


def test_a_stop_token_ends_an_answer_and_is_no_part_of_it(served: Served) -> None:
    whole = served.complete("Once. " * 8, 12).choices[0].text
    stop = next(letter for letter in whole[3:] if letter not in whole[:3])
    choice = served.complete("Once. " * 8, 12, extra_body={"stop_token_ids": [ord(stop)]}).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}


def test_every_answer_follows_its_schema(served: Served) -> None:
    """Several rows of one batch, of a model that answers at random otherwise."""
    ask: dict[str, Any] = {"model": served.name, "messages": [HELLO], "max_tokens": 200, "temperature": 1}

    def answer(seed: int) -> Any:
        return served.client.chat.completions.create(**ask, seed=seed, response_format=FORMAT).choices[0]

    with ThreadPoolExecutor() as clients:
        for choice in clients.map(answer, range(3)):
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_replayed_call_may_have_no_arguments_or_cut_ones() -> None:
    assert [arguments_of(text) for text in ("", '{"x": 7}', '{"x": ')] == [{}, {"x": 7}, '{"x": ']


def test_an_answer_ends_at_its_stop_token_unless_more_is_requested(served: Served) -> None:
    said = [
        served.complete("End. " * 8, 6, logit_bias=ENDS, extra_body=more)
        for more in ({}, {"min_tokens": 3}, {"ignore_eos": True})
    ]
    assert [answer.usage.completion_tokens for answer in said] == [1, 4, 6]
    assert [answer.choices[0].finish_reason for answer in said] == ["stop", "stop", "length"]


def test_min_tokens_overrides_the_default_length(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specache_compile.serving.generation.ANSWER", 4)
    said = served.complete("End. " * 8, logit_bias=ENDS, extra_body={"min_tokens": 7})
    assert said.usage.completion_tokens == 7


def test_penalties_count_generated_tokens_and_not_the_prompt() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 2]])
    scores = Penalties(frequency=0.5, presence=1.0, prompt=2)(ids, torch.zeros(1, 4))
    assert scores.tolist() == [[0.0, -2.0, -1.5, 0.0]]


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_a_penalty_makes_room_for_another_token(served: Served, penalty: str) -> None:
    bias = {"logit_bias": {str(ord("z")): 100, str(ord("y")): 98.5}}
    assert served.complete("z. " * 8, 8, **bias).choices[0].text == "zzzzzzzz"
    assert "y" in served.complete("z. " * 8, 8, **bias, **{penalty: 2.0}).choices[0].text


def prompt_of(template: str, **given: Any) -> str:
    """The prompt that a chat of these fields becomes."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    served: Any = SimpleNamespace(name="tiny", tokenizer=tokenizer, model=tiny_llama(), vocabulary=128)
    prompt = bytes(chat(served, ChatBody(**{"messages": [HELLO], **given})).ids).decode()
    assert prompt.endswith("<assistant>")
    return prompt


WITH_TOOLS = "{% if tools %}{{ tools | map(attribute='function.name') | join }}{% endif %}" + TEMPLATE


def test_the_prompt_contains_the_tools_that_the_model_may_call() -> None:
    assert prompt_of(WITH_TOOLS, tools=[TOOL]).startswith("look<user>")
    assert prompt_of(WITH_TOOLS, tools=[TOOL], tool_choice="none").startswith("<user>")


@pytest.mark.parametrize(
    ("own", "given", "drawn"),
    [
        ({}, {"temperature": 1.5}, (True, 1.5, None, 0)),
        ({}, {"top_p": 0.5}, (True, None, 0.5, 0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"top_p": 0.5}, (True, 0.6, 0.5, 20)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {}, (True, 0.6, None, 20)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0}, (False, None, None, None)),
        ({"do_sample": True, "top_k": 20}, {"top_k": 5}, (True, None, None, 5)),
        ({"do_sample": True, "top_k": 20}, {"top_k": -1}, (True, None, None, 0)),
    ],
)
def test_all_tokens_are_sampled_unless_checkpoint_or_request_restricts_them(
    own: dict[str, Any], given: dict[str, Any], drawn: tuple[Any, ...]
) -> None:
    served: Any = SimpleNamespace(model=SimpleNamespace(generation_config=GenerationConfig(**own)), vocabulary=128)
    config = config_of(served, CompletionBody(prompt="a", **given))
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == drawn


def test_a_template_has_all_of_a_message() -> None:
    """The text parts are its lines."""
    template = "{% for m in messages %}{{ m.name }}: {{ m.content }} {{ m.tool_calls[0].function.arguments.x }}"
    template += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 7}'}}]
    parts = [{"type": "text", "text": "See", "cache_control": {"type": "ephemeral"}}]
    parts += [{"type": "input_text", "text": "this"}]
    message = {"role": "user", "name": "Ada", "content": parts, "tool_calls": calls}
    assert prompt_of(template, messages=[message]).startswith("Ada: See\nthis 7")


def test_messages_that_a_template_fails_at_are_refused() -> None:
    template = "{% for name, value in messages[0].tool_calls[0].function.arguments | items %}{% endfor %}"
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "3"}}]}
    with pytest.raises(HTTPException, match="400: the chat template: Can only get item pairs from a mapping"):
        prompt_of(template, messages=[message])


def test_the_server_has_one_model_and_names_it(served: Served) -> None:
    assert served.client.models.retrieve(served.name).id == served.name
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' does not exist"):
        served.client.models.retrieve("gpt-9")


def test_health_supports_head_requests(served: Served) -> None:
    assert urllib.request.urlopen(urllib.request.Request(f"{served.url}/health", method="HEAD")).status == 200
