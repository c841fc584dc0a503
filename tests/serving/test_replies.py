"""Answers in OpenAI's format: which events are sent for which text, and when."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig

from conftest import byte_tokenizer
from served import qwens_parser
from served import reply as reply_of
from specache_compile.serving.answer import Answer, Likely, Question, Ticket
from specache_compile.serving.interface.replies import ChatReply, Reply, by_text
from specache_compile.serving.interface.requests import StreamOptions, Usage
from specache_compile.serving.metrics import Metrics
from specache_compile.serving.stops import Stops
from specache_compile.serving.token_bytes import TABLE, bytes_of

pytestmark = pytest.mark.one_process

TOKENIZER = byte_tokenizer()
PROMPT = torch.tensor([list(b"<user>Hi")])
CALLING = 'Hm.</think>\n\nI look.\n<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>'


def reply(
    text: str, kind: type[Reply] = Reply, streamed: bool = False, at_once: int = 1, usage: Usage = "last", **given: Any
) -> Any:
    """What a client receives where a model generates this text."""
    config = GenerationConfig(max_new_tokens=200, min_new_tokens=given.pop("min_tokens", None), eos_token_id=[7, 8])
    question = Question({"input_ids": PROMPT}, config, **given)
    return reply_of(list(text.encode()), question, TOKENIZER, kind, streamed, at_once, usage)


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [(["lo"], "Hel", 5), (["o, w", "or"], "Hell", 8), (["x", "llo, worms"], "Hello, world", 12), (["H"], "", 1)],
)
def test_an_answer_ends_before_its_stop_string(stop: list[str], text: str, tokens: int, at_once: int) -> None:
    """However its tokens come, whole or streamed."""
    whole = reply("Hello, world", stop=stop, at_once=at_once)
    choice = Completion.model_validate(whole).choices[0]
    assert choice.text == text
    assert choice.finish_reason == "stop"
    assert whole["usage"]["completion_tokens"] == tokens
    events = reply("Hello, world", streamed=True, stop=stop, at_once=at_once)
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
    """The role is not a separate event: it would come before the first token, and be counted as one."""
    *events, done = reply("Yes", ChatReply, streamed=True)
    chunks = [ChatCompletionChunk.model_validate_json(event) for event in events]
    assert done == "[DONE]"
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "Y")
    assert [chunk.choices[0].delta.role for chunk in chunks[1:-1]] == [None, None, None]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("kind", [Reply, ChatReply])
def test_every_event_of_a_stream_has_its_usage_if_requested(kind: type[Reply]) -> None:
    """As load tools request it, and as vLLM responds."""
    usage = StreamOptions(include_usage=True, continuous_usage_stats=True).usage
    *events, _ = reply("Yes", kind, streamed=True, usage=usage)
    usages = [json.loads(event)["usage"] for event in events]
    assert {one["prompt_tokens"] for one in usages} == {PROMPT.numel()}
    assert all(one["completion_tokens"] >= said for said, one in enumerate(usages[:-2], 1))
    assert usages[-1]["completion_tokens"] == 3
    assert StreamOptions(continuous_usage_stats=True).usage == "none"


def test_an_answer_of_nothing_has_a_role_too() -> None:
    events = reply("x", ChatReply, streamed=True, stop=["x"])
    assert ChatCompletionChunk.model_validate_json(events[0]).choices[0].delta.role == "assistant"


def test_reasoning_and_calls_of_tools_are_no_text() -> None:
    choice = ChatCompletion.model_validate(reply(CALLING, ChatReply, parser=qwens_parser())).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "I look.")
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"x": 1}']
    *events, _, _ = reply(CALLING, ChatReply, streamed=True, parser=qwens_parser())
    deltas = [ChatCompletionChunk.model_validate_json(event).choices[0].delta for event in events]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == "Hm."
    assert "".join(delta.content or "" for delta in deltas).strip() == "I look."
    assert [call.function.name for delta in deltas for call in delta.tool_calls or []] == ["look"]


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
    question = Question({"input_ids": torch.tensor([[2]])}, GenerationConfig(), continued=continued)

    async def said() -> Any:
        answer = Answer(Ticket(), question, SimpleNamespace(_tokenizer=rust), Metrics())
        for token in (2, 0, 1):
            answer.put(torch.tensor([[token]]))
        answer.close()
        return "".join([piece async for piece in answer.pieces()])

    assert asyncio.run(said()) == text


def test_the_bytes_of_a_part_of_a_character_are_its_own() -> None:
    """Joined, they are the text."""
    text = "naïve 😀"
    table = {byte: letter for letter, byte in TABLE.items()}
    letters = [table[byte] for byte in text.encode()]
    rust = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(dict.fromkeys(letters))}, "?"))
    rust.decoder = decoders.ByteLevel()
    assert b"".join(bytes_of(rust, rust.token_to_id(letter), "\ufffd") for letter in letters) == text.encode()


def test_the_bytes_of_byte_tokens_joined_are_the_text() -> None:
    """Tokenizers of SentencePiece write a byte that no other token has as <0xNN>."""
    pieces = ["▁na", "<0xC3>", "<0xAF>", "ve", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁Here"]
    rust = Tokenizer(models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[]))
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    question = Question({"input_ids": torch.tensor([[9]])}, GenerationConfig(), logprobs=0)

    async def joined() -> bytes:
        answer, written = Answer(Ticket(), question, SimpleNamespace(_tokenizer=rust), Metrics()), b""
        answer.put(torch.tensor([[9]]))
        for token in range(9):
            written += answer.likely(token, 0.0).bytes
            answer.put(torch.tensor([[token]]))
        return written

    assert asyncio.run(joined()) == " naïve 😀".encode()


def test_likeliest_tokens_of_one_text_are_all_reported() -> None:
    likeliest = [Likely(5, "\ufffd", -0.1, b"\xc3"), Likely(7, "\ufffd", -2.0, b"\xc4"), Likely(9, "a", -3.0, b"a")]
    assert by_text(likeliest) == {"\ufffd": -0.1, "token_id:7": -2.0, "a": -3.0}
