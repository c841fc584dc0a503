"""Tool calls in the formats of several families: how they are parsed, and how a required one is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from llguidance.hf import from_tokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import GenerationConfig

from conftest import byte_tokenizer, tiny_llama
from served import reply
from specache_compile.serving.answer import Parts
from specache_compile.serving.calls import format_of
from specache_compile.serving.questions import chat
from specache_compile.serving.replies import ChatReply
from specache_compile.serving.requests import ChatBody

END = "<|end_of_answer|>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", 'O"slo']}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "go_to")]
LOOK, GO = ("look", {"city": "Rome", "days": 3}), ("go_to", {"city": 'O"slo', "days": 5})


@dataclass
class Family:
    """A family's format. template: of chats. specials: its special tokens. answers: texts, and what is in them:
    reasoning, content and calls. added: tokens that are added and not special."""

    template: str
    specials: list[str]
    answers: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]]
    added: tuple[str, ...] = ()


def arguments(call: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(call[1])


CHATML = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Return <tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {
    "hermes": Family(
        CHATML,
        ["<|im_start|>", "<|im_end|>"],
        {
            f'I look.\n<tool_call>\n{{"name": "look", "arguments": {arguments(LOOK)}}}\n</tool_call>'
            f'\n<tool_call>\n{{"name": "go_to", "arguments": {arguments(GO)}}}\n</tool_call>': (
                "", "I look.", [LOOK, GO],
            ),
            f'<tool_call>{{"name": "look", "parameters": {arguments(LOOK)}}}</tool_call>': ("", "", [LOOK]),
            "Hello <b>": ("", "Hello <b>", []),
        },
        added=("<tool_call>", "</tool_call>"),
    ),
    "llama": Family(
        '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
        "value}.{{ tools | tojson }}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
        "\n\n{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        {
            f'{{"name": "look", "parameters": {arguments(LOOK)}}}': ("", "", [LOOK]),
            f'<|python_tag|>{{"name": "look", "parameters": {arguments(LOOK)}}}<|eom_id|>': ("", "", [LOOK]),
            f'{{"name": "look", "parameters": {arguments(LOOK)}}}; '
            f'{{"name": "go_to", "parameters": {arguments(GO)}}}': ("", "", [LOOK, GO]),
            f'{{"type": "function", "name": "look", "arguments": {arguments(LOOK)}}}': ("", "", [LOOK]),
            'I write {"name": "look"}; {x}': ("", 'I write {"name": "look"}; {x}', []),
            '{"name": "Rome", "age": 3}': ("", '{"name": "Rome", "age": 3}', []),
        },
    ),
    "mistral_list": Family(
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}[TOOL_CALLS]{{ m.tool_calls | tojson }}"
        "{% endif %}{% endfor %}",
        ["[INST]", "[/INST]", "[TOOL_CALLS]"],
        {
            f'[TOOL_CALLS] [{{"name": "look", "arguments": {arguments(LOOK)}, "id": "a1"}}, '
            f'{{"name": "go_to", "arguments": {arguments(GO)}}}]': ("", "", [LOOK, GO]),
            "Hello [x]": ("", "Hello [x]", []),
        },
    ),
    "mistral": Family(
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "[TOOL_CALLS]{{ m.tool_calls[0].function.name }}[ARGS]{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% endif %}{% endfor %}",
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
        {
            f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]look[ARGS]{arguments(LOOK)}"
            f"[TOOL_CALLS]go_to[CALL_ID]a1[ARGS]{arguments(GO)}": ("Hm.", "I look.", [LOOK, GO]),
            "Hello [x]": ("", "Hello [x]", []),
        },
    ),
    "harmony": Family(
        "{% if tools %}namespace functions {{ tools | tojson }}{% endif %}{% for m in messages %}"
        "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"],
        {
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
            f"<|constrain|>json<|message|>{arguments(LOOK)}<|call|>": ("Hm.", "", [LOOK]),
            f" to=functions.look<|channel|>commentary json<|message|>{arguments(LOOK)}<|call|>": ("", "", [LOOK]),
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.go_to<|channel|>commentary"
            f"<|message|>{arguments(GO)}<|call|>": ("", "I look.", [GO]),
            "<|channel|>analysis<|message|>Hm.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hello <b><|return|>": ("Hm.", "Hello <b>", []),
        },
    ),
}  # fmt: skip
ANSWERS = [(name, text) for name, family in FAMILIES.items() for text in family.answers]


def served_of(family: Family, template: str | None = None) -> Any:
    """A tokenizer of bytes and of the family's special tokens, and a model that is never run."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": family.specials})
    tokenizer.add_tokens(list(family.added))
    tokenizer.chat_template = template or family.template
    model = tiny_llama(vocab_size=len(tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, max_new_tokens=400)
    grammars = from_tokenizer(tokenizer, len(tokenizer), tokenizer.eos_token_id)
    return SimpleNamespace(
        name="tiny", tokenizer=tokenizer, model=model, vocabulary=len(tokenizer), grammar_tokenizer=grammars
    )


def question_of(served: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": "Where?"}]
    question = chat(served, ChatBody(**{"messages": messages, "tools": TOOLS, **more}))
    question.config.max_new_tokens = 400
    return question


def parsed(served: Any, question: Any, tokens: list[int]) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """The reasoning, content and calls of an answer, which are the same whole and streamed."""
    choice = ChatCompletion.model_validate(reply(tokens, question(), served.tokenizer, ChatReply)).choices[0]
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    *events, _, _ = reply(tokens, question(), served.tokenizer, ChatReply, streamed=True)
    deltas = [ChatCompletionChunk.model_validate_json(event).choices[0].delta for event in events]
    whole = (getattr(choice.message, "reasoning_content", ""), choice.message.content)
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == whole[0]
    assert "".join(delta.content or "" for delta in deltas).strip() == whole[1]
    streamed = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in streamed] == list(range(len(calls)))
    assert [call.function.model_dump() for call in streamed] == [call.function.model_dump() for call in calls]
    return *whole, [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize(("name", "text"), ANSWERS, ids=[f"{name}{i}" for i, (name, _) in enumerate(ANSWERS)])
def test_an_answer_is_parsed_in_its_familys_format(name: str, text: str) -> None:
    family = FAMILIES[name]
    served = served_of(family)
    tokens = served.tokenizer(text + END, add_special_tokens=False).input_ids
    assert parsed(served, lambda: question_of(served), tokens) == family.answers[text]


@pytest.mark.parametrize("cut", ['{"name": "go_to", "argum', "{broken}</tool_call>"])
def test_a_call_before_a_broken_one_is_returned_once_when_both_come_at_once(cut: str) -> None:
    parts = Parts(question_of(served_of(FAMILIES["hermes"])).parser)
    first = f'{{"name": "look", "arguments": {arguments(LOOK)}}}'
    call, *text = parts.feed(f"<tool_call>{first}</tool_call>\n<tool_call>{cut}", last=True)
    assert (call.name, json.loads(call.arguments)) == LOOK
    assert "".join(text).strip() == f"<tool_call>{cut}"


def test_ids_of_calls_have_the_nine_letters_and_digits_that_mistrals_templates_require() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }},{% endfor %}"
        "{% if m.tool_call_id %}{{ m.tool_call_id }},{% endif %}{% endfor %}{% if tools %}[TOOL_CALLS]{% endif %}"
    )
    call = {"id": "call_" + 32 * "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Where?"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Rome"},
    ]  # fmt: skip
    served = served_of(FAMILIES["mistral_list"], template)
    question = question_of(served, messages=messages)
    ids = served.tokenizer.decode(question.ids).split(",")[:2]
    assert ids[0] == ids[1]
    assert re.fullmatch("[A-Za-z0-9]{9}", ids[0])
    tokens = served.tokenizer(f'[TOOL_CALLS][{{"name": "look", "arguments": {arguments(LOOK)}}}]{END}').input_ids
    message = reply(tokens, question, served.tokenizer, ChatReply)["choices"][0]["message"]
    assert re.fullmatch("[A-Za-z0-9]{9}", message["tool_calls"][0]["id"])


def generated(question: Any, end: int, seed: int, begun: Sequence[int] = ()) -> list[int]:
    """The tokens of a model that begins so, draws each further token at random, and ends as soon as it may."""
    (constraint,) = question.processors
    draw = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[*question.ids, *begun]])
    while ids[0, -1] != end:
        scores = torch.zeros(1, end + 64)
        scores[0, end] = 100.0
        scores = constraint(ids, scores)
        ids = torch.cat([ids, torch.multinomial(scores.softmax(-1), 1, generator=draw)], 1)
    return ids[0, len(question.ids) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_follows_its_schema(name: str) -> None:
    served = served_of(FAMILIES[name])
    end = served.tokenizer.eos_token_id
    names = set()
    for seed in range(8):
        tokens = generated(question_of(served, tool_choice="required"), end, seed)
        reasoning, content, ((called, given),) = parsed(
            served, lambda: question_of(served, tool_choice="required"), tokens
        )
        jsonschema.validate(given, SCHEMA)
        assert (reasoning, content) == ("", "")
        names.add(called)
    assert names == {"look", "go_to"}
    only = {"type": "function", "function": {"name": "go_to"}}
    tokens = generated(question_of(served, tool_choice=only), end, 0)
    ((called, given),) = parsed(served, lambda: question_of(served, tool_choice=only), tokens)[2]
    jsonschema.validate(given, SCHEMA)
    assert called == "go_to"


@pytest.mark.parametrize("name", ["hermes", "mistral_list", "mistral", "harmony"])
def test_a_begun_call_of_a_strict_tool_follows_its_schema(name: str) -> None:
    """Where the model writes text, it may write any."""
    family = FAMILIES[name]
    served = served_of(family)
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    marker = {"hermes": "<tool_call>", "harmony": "<|channel|>commentary to="}.get(name, "[TOOL_CALLS]")

    def ask() -> Any:
        return question_of(served, tools=strict)

    encoded = served.tokenizer("" if name == "harmony" else "Hm. {", add_special_tokens=False).input_ids
    begun = encoded + served.tokenizer(marker, add_special_tokens=False).input_ids
    tokens = generated(ask(), served.tokenizer.eos_token_id, 0, begun)
    ((_, given),) = parsed(served, ask, tokens)[2]
    jsonschema.validate(given, SCHEMA)
    texts = [text for text in family.answers if marker not in text]
    for text in texts:
        tokens = served.tokenizer(text + END, add_special_tokens=False).input_ids
        assert ask().processors[0].matcher.try_consume_tokens(tokens) == len(tokens)
    assert texts


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_a_schema_beside_tools_is_a_call_or_follows_the_schema(name: str) -> None:
    served = served_of(FAMILIES[name])
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": {"enum": [7]}}}

    def ask() -> Any:
        return question_of(served, response_format=form)

    ends = [generated(ask(), served.tokenizer.eos_token_id, seed) for seed in range(12)]
    answers = [parsed(served, ask, tokens) for tokens in ends]
    assert {content for _, content, calls in answers if not calls} == {"7"}
    for _, _, calls in answers:
        for _, given in calls:
            jsonschema.validate(given, SCHEMA)
    assert any(calls for _, _, calls in answers)


def test_a_required_call_closes_the_reasoning_that_the_template_opens() -> None:
    served = served_of(FAMILIES["hermes"], CHATML.replace("assistant\n", "assistant\n<think>\n"))
    served.model.config.model_type = "qwen3"
    tokens = generated(question_of(served, tool_choice="required"), served.tokenizer.eos_token_id, 0)
    reasoning, content, calls = parsed(served, lambda: question_of(served, tool_choice="required"), tokens)
    assert (reasoning, content, len(calls)) == ("", "", 1)
    text = f'Hm.</think>\n\nI look.\n<tool_call>{{"name": "look", "arguments": {arguments(LOOK)}}}</tool_call>{END}'
    tokens = served.tokenizer(text, add_special_tokens=False).input_ids
    assert parsed(served, lambda: question_of(served), tokens) == ("Hm.", "I look.", [LOOK])


def test_a_call_without_tools_is_text() -> None:
    served = served_of(FAMILIES["llama"])
    question = chat(served, ChatBody(messages=[{"role": "user", "content": "Where?"}]))
    assert question.parser is None


@pytest.mark.parametrize(
    "template", ["{{ messages }}", "<tool_call><function=f><parameter=x>", "<tool_call>f<arg_key>"]
)
def test_a_template_with_another_format_is_not_taken_for_a_known_one(template: str) -> None:
    assert format_of(SimpleNamespace(chat_template=template)) is None
