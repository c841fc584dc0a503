"""Tool-call formats: how a chat template shows one, how an answer is parsed, and how a required call is written."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser

# JSON without optional spaces, which a model could generate without end.
COMPACT = {"whitespace_flexible": False}
# The spaces in the calls that models are trained on: those of json.dumps.
SPACED = {**COMPACT, "item_separator": ", ", "key_separator": ": "}
REASONING = {"<think>": "</think>\n\n", "[THINK]": "[/THINK]"}
# A template's text before an answer is not part of the answer, except the marker that opens its reasoning.
ANCHOR = {"start_anchor_pattern": r"\A(?:(?!<think>|\[THINK\]).)*"}
TEXT = {"content": "text"}
CALLS: dict[str, Any] = {"content": "json", "repeats": True}


def function(name: str = "{name}", arguments: str = "{content}") -> dict[str, Any]:
    """The field's value, in which {...} stands for a part of the text."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# A call whose JSON has its name, and its arguments or parameters (`parts.called`).
WHOLE = {"type": "function", "function": "{content}"}


@dataclass(frozen=True)
class CallFormat:
    """The format in which a family of models writes tool calls.

    template: a pattern of the chat templates that use it.
    marker: a token that begins a call; "": none.
    before, after: the text around a call's arguments, after the marker. NAME stands for the function's name.
    fields: the parts of an answer, as in transformers' response templates.
    others: other texts that may follow the marker.
    """

    template: str
    marker: str
    before: str
    after: str
    fields: dict[str, Any]
    others: tuple[str, ...] = ()


HARMONY = CallFormat(
    template=r"<\|channel\|>",
    marker="<|channel|>",
    before="commentary to=functions.NAME <|constrain|>json<|message|>",
    after="",  # <|call|> ends the answer
    # The last format names its function before the marker, in free text.
    others=tuple(f"{header}<|message|>" for header in ("analysis", "final", "commentary", "commentary json")),
    fields={
        "reasoning_content": {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis\s*<\|message\|>",
            "close": "<|end|>",
            **TEXT,
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|start\|>assistant)?"
            r"(?:\s*to=functions\.(?P<name>[\w.-]+)\s*<\|channel\|>(?:commentary|analysis)"
            r"|<\|channel\|>(?:commentary|analysis)\s+to=functions\.(?P<name>[\w.-]+))"
            r"\s*(?:(?:<\|constrain\|>)?\w+)?\s*<\|message\|>",
            "close_pattern": r"<\|(?:call|end)\|>",
            "transform": function(),
            **CALLS,
        },
        # Headers of text for the user are dropped, as are ends. Preambles, in the channel commentary, are text.
        "content": {
            "close_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)"
            r"\s*(?:<\|constrain\|>\w+\s*)?<\|message\|>|<\|(?:end|return)\|>",
            **TEXT,
        },
    },
)
MISTRAL = CallFormat(
    template=r"\[ARGS\]",
    marker="[TOOL_CALLS]",
    before="NAME[ARGS]",
    after="",
    fields={
        "reasoning_content": {"open": "[THINK]", "close": "[/THINK]", **TEXT},
        "tool_calls": {
            "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "transform": function(),
            **CALLS,
        },
        "content": TEXT,
    },
)
MISTRAL_LIST = CallFormat(
    template=r"\[TOOL_CALLS\]",
    marker="[TOOL_CALLS]",
    before='[{"name": "NAME", "arguments": ',
    after="}]",
    fields={
        "tool_calls": {
            "open_pattern": r"\s*\[TOOL_CALLS\]",
            "transform": function(arguments="{arguments}"),
            "transform_each": True,
            **CALLS,
        },
        "content": TEXT,
    },
)
LLAMA_CALL = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:'
LLAMA = CallFormat(
    template=r'"name": function name, "parameters":',
    marker="",
    before='{"name": "NAME", "parameters": ',
    after="}",
    fields={
        "tool_calls": {
            # At the start of the answer, after the marker of code, or after another call.
            "open_pattern": r"(?:\A\s*(?:<\|python_tag\|>)?|<\|python_tag\|>|(?<=\}\s*;))\s*(?=" + LLAMA_CALL + ")",
            "close_pattern": r";(?=\s*" + LLAMA_CALL + r")|<\|e[om][mt]_id\|>",
            "transform": WHOLE,
            **CALLS,
        },
        "content": TEXT,
    },
)
HERMES = CallFormat(
    template=r"\A(?!.*(?:<function=|<arg_key>)).*<tool_call>",  # Qwen 3.5 and GLM write XML there
    marker="<tool_call>",
    before='\n{"name": "NAME", "arguments": ',
    after="}\n</tool_call>",
    fields={
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "transform": WHOLE,
            **CALLS,
        },
        "content": TEXT,
    },
)
FORMATS = (HARMONY, MISTRAL, MISTRAL_LIST, LLAMA, HERMES)


def format_of(tokenizer: Any) -> CallFormat | None:
    """The call format that the tokenizer's chat template uses; None if it is unknown."""
    template = str(getattr(tokenizer, "chat_template", None))
    return next((form for form in FORMATS if re.search(form.template, template, re.DOTALL)), None)


def parser_of(tokenizer: Any, model: Any, prompt: str, opening: str, tools: Any) -> ResponseParser | None:
    """The parser of an answer; None if the answer is text.

    Args:
        prompt: the whole prompt.
        opening: the end of the prompt that the template writes before an answer.
        tools: tools that the model may call; None: none.
    """
    known = get_response_template(tokenizer, model)
    if known is not None:
        return ResponseParser(known, prefix=prompt, tools=tools)
    form = format_of(tokenizer)
    if form is None or (tools is None and "reasoning_content" not in form.fields):
        return None
    return ResponseParser({**ANCHOR, "fields": form.fields}, prefix=opening, tools=tools)


def grammar_of_call(
    tokenizer: Any, form: CallFormat, opening: str, functions: list[dict[str, Any]], schema: dict[str, Any] | None
) -> str:
    """The grammar of an answer that calls one of these functions.

    functions: as in a request.
    opening: the end of the prompt that the template writes before an answer. Reasoning that it opens is closed.
    schema: of JSON that the answer may be instead of a call; None: it must be a call.
    """
    closed = "".join(end for begin, end in REASONING.items() if opening.rstrip().endswith(begin))
    start = f"start: {terminals(tokenizer, closed)} ({terminals(tokenizer, form.marker)} call"
    other = ")\n" if schema is None else f" | answer)\nanswer: %json {json.dumps({'x-guidance': COMPACT, **schema})}\n"
    return start + other + call_rules(tokenizer, form, functions)


def grammar_of_text(tokenizer: Any, form: CallFormat, functions: list[dict[str, Any]]) -> str | None:
    """The grammar of any text in which each call is one of these functions; None if no token begins calls."""
    known = tokenizer.get_added_vocab()
    if form.marker not in known:
        return None
    others = "".join(f" | {terminals(tokenizer, text)}" for text in form.others)
    start = f"start: (text <[{known[form.marker]}]> (call{others}))* text\ntext: <[^{known[form.marker]}]>*\n"
    return start + call_rules(tokenizer, form, functions)


def call_rules(tokenizer: Any, form: CallFormat, functions: list[dict[str, Any]]) -> str:
    """The rules of `call`, which follows the format's marker."""
    rules = ["call: " + " | ".join(f"call{index}" for index in range(len(functions)))]
    for index, called in enumerate(functions):
        schema = json.dumps({"x-guidance": SPACED, **(called.get("parameters") or {"type": "object"})})
        before = terminals(tokenizer, form.before.replace("NAME", json.dumps(called["name"])[1:-1]))
        rules.append(f"call{index}: {before} arguments{index} {terminals(tokenizer, form.after)}")
        rules.append(f"arguments{index}: %json {schema}")
    return "\n".join(rules)


def terminals(tokenizer: Any, text: str) -> str:
    """A text as terminals of a grammar: added tokens by their ids, since no string matches a special token."""
    known = tokenizer.get_added_vocab()
    parts = re.split(f"({'|'.join(map(re.escape, known)) or '$^'})", text)
    return " ".join(f"<[{known[part]}]>" if part in known else json.dumps(part) for part in parts if part)
