"""Answers in OpenAI's format: which events are sent for which text, and when."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig

from conftest import byte_tokenizer
from served import qwens_parser
from served import reply as reply_of
from specache_compile.serving.answer import Question, Stops
from specache_compile.serving.replies import ChatReply, Reply

pytestmark = pytest.mark.one_process

TOKENIZER = byte_tokenizer()
PROMPT = list(b"<user>Hi")


def reply(text: str, kind: type[Reply] = Reply, streamed: bool = False, **given: Any) -> Any:
    """What a client receives where a model generates this text."""
    config = GenerationConfig(max_new_tokens=200, min_new_tokens=given.pop("min_tokens", None), eos_token_id=[7, 8])
    return reply_of(list(text.encode()), Question(PROMPT, config, **given), TOKENIZER, kind, streamed)


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [(["lo"], "Hel", 5), (["o, w", "or"], "Hell", 8), (["x", "llo, worms"], "Hello, world", 12), (["H"], "", 1)],
)
def test_an_answer_ends_before_its_stop_string(stop: list[str], text: str, tokens: int) -> None:
    """Whole or streamed."""
    whole = reply("Hello, world", stop=stop)
    choice = Completion.model_validate(whole).choices[0]
    assert choice.text == text
    assert whole["usage"]["completion_tokens"] == tokens
    events = reply("Hello, world", streamed=True, stop=stop)
    assert "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]) == text


def test_what_may_become_a_stop_string_is_withheld_until_it_does_not() -> None:
    stops = Stops(["abcd", "bce"])
    assert [stops.feed(letter) for letter in "xabcbcf"] == ["x", "", "", "", "abc", "", "bcf"]
    assert not stops.found


@pytest.mark.parametrize(("text", "stop", "sent"), [("a.b.c.d", ["."], "a.b"), ("abcdef", ["cd", "abc"], "ab")])
def test_a_stop_string_that_is_complete_before_the_least_tokens_is_text(text: str, stop: list[str], sent: str) -> None:
    said = reply(text, stop=stop, min_tokens=3)
    assert said["choices"][0]["text"] == sent
    assert said["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("text", "finish"), [("x" * 199 + "\a", "stop"), ("x" * 200, "length"), ("x\b", "stop")])
def test_an_end_token_is_no_text_and_an_end_at_the_longest_length_too(text: str, finish: str) -> None:
    said = reply(text)
    assert said["choices"][0]["text"] == text.strip("\a\b")
    assert said["choices"][0]["finish_reason"] == finish
    assert said["usage"]["completion_tokens"] == len(text)


def test_a_stream_begins_with_its_first_token_and_ends_with_done() -> None:
    """The role is not a separate event: it would come before the first token, and be counted as one. An answer of
    nothing has a role too."""
    first, *_ = reply("x", ChatReply, streamed=True, stop=["x"])
    assert ChatCompletionChunk.model_validate_json(first).choices[0].delta.role == "assistant"
    *events, done = reply("Yes", ChatReply, streamed=True)
    chunks = [ChatCompletionChunk.model_validate_json(event) for event in events]
    assert done == "[DONE]"
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "Y")
    assert [chunk.choices[0].delta.role for chunk in chunks[1:-1]] == [None, None, None]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("call", ['{"name": "look", "arguments": {x}}', "[1]", '{"name": "look"}', '{"name": "lo'])
def test_a_call_that_cannot_be_read_is_text(call: str) -> None:
    """What the model has written, and no error: the client may ask again, or read it another way."""
    end = "" if call.endswith("lo") else "</tool_call> So."
    text = f"I look.\n<tool_call>{call}{end}"
    choice = reply(text, ChatReply, parser=qwens_parser("<|im_start|>assistant\n"))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    *events, _, _ = reply(text, ChatReply, streamed=True, parser=qwens_parser("<|im_start|>assistant\n"))
    deltas = [ChatCompletionChunk.model_validate_json(event).choices[0].delta for event in events]
    assert "".join(delta.content or "" for delta in deltas) == text


@pytest.mark.parametrize(("continued", "text"), [(True, " is a"), (False, "is a")])
def test_a_continuation_keeps_its_first_space(continued: bool, text: str) -> None:
    """Llama 2's tokenizer takes it from any text, as it has put it there."""
    rust = Tokenizer(models.BPE(vocab={"▁is": 0, "▁a": 1, "▁Here": 2}, merges=[]))
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    question = Question([2], GenerationConfig(), continued=continued)
    assert reply_of([0, 1], question, SimpleNamespace(_tokenizer=rust))["choices"][0]["text"] == text
