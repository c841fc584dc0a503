"""The parts of an answer: text, reasoning and tool calls, by the model's response template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

# transformers' names of the field, by version.
REASONING = ("reasoning_content", "thinking", "reasoning")


class Parts:
    """Splits an answer's text into parts.

    unread: text that is in no part yet.
    plain: all further text is one part: without a parser, or after text that the parser cannot read (for example a tool
        call that is not JSON or is cut short).
    """

    def __init__(self, parser: Any) -> None:
        self.parser, self.unread = parser, ""

    @property
    def plain(self) -> bool:
        return self.parser is None

    def opened(self) -> list[Any]:
        """The parts of the answer that the prompt began."""
        return [] if self.plain else list(pieces_of(self.parser.initial_events))

    def feed(self, text: str, last: bool = False) -> list[Any]:
        """The parts that are known after `text`. last: no more text follows."""
        pieces: list[Any] = []
        # Letter by letter, so that `unread` begins where a region ends.
        for letter in [*text, *[""] * last]:
            self.unread += letter
            if self.plain:
                continue
            try:
                events = self.parser.feed(letter) if letter else self.parser.finalize()[1]
                pieces += pieces_of(events)
            except (ValueError, KeyError, TypeError):  # a model has written the text, so it may be anything
                self.parser = None
            else:
                self.note(events)
        if self.plain and self.unread:
            pieces, self.unread = [*pieces, self.unread], ""
        return pieces

    def note(self, events: list[dict[str, Any]]) -> None:
        kinds = [event["type"] for event in events]
        for event, following in zip(events, [*kinds[1:], None], strict=False):
            if event["type"] == "region_chunk" and not event.get("dirty"):
                self.unread = self.unread.partition(event["text"])[2]
            elif event["type"] == "region_close" and following != "region_open":  # by its own end
                self.unread = ""


def pieces_of(events: list[dict[str, Any]]) -> Iterator[Any]:
    """Text, `ReasoningText` and `ToolCall`s of a parser's events. Raises for a call without a name or arguments."""
    for event in events:
        field = event["field"]
        if event["type"] == "region_close" and field == "tool_calls":
            calls = event["value"] if isinstance(event["value"], list) else [event["value"]]
            yield from [called(**call["function"]) for call in calls]
        elif event["type"] == "region_chunk" and not event["dirty"] and event["text"]:
            if field == "content":
                yield event["text"]
            elif field in REASONING:
                yield ReasoningText(event["text"])


def called(name: str, arguments: Any = None, parameters: Any = None, **more: Any) -> ToolCall:
    given = parameters if arguments is None else arguments
    if given is None:
        raise TypeError("a call without arguments")
    return ToolCall(name, given if isinstance(given, str) else json.dumps(given))
