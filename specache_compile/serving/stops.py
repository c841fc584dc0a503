"""Ends an answer before its first stop string, however the tokens split that string."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Passes text through, but withholds what may begin a stop string until more text comes.

    found: whether there was a stop string; the text after it is dropped.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.withheld, self.found = strings, "", False

    def feed(self, text: str, heeded: bool = True) -> str:
        """The text that may be sent after `text`. heeded: whether a stop string that `text` completes counts."""
        text = self.withheld + text
        # The string that is complete first, independent of how the text is split.
        ends = [(at + len(string), at) for string in self.strings if (at := text.find(string)) >= 0]
        if ends and heeded:
            self.found, self.withheld = True, ""
            return text[: min(ends)[1]]
        at = len(text) - max((overlap(text, string) for string in self.strings), default=0)
        self.withheld = text[at:]
        return text[:at]


def overlap(text: str, string: str) -> int:
    """Number of characters at the end of `text` that `string` begins with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
