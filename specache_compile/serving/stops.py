"""Where an answer stops: before the first of its stop strings, however its tokens cut that string."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Text passes through; what may be the beginning of a stop string is withheld until more is known. `found`: whether
    one was there; what follows it is dropped."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.withheld, self.found = strings, "", False

    def feed(self, text: str, heeded: bool = True) -> str:
        """What may be said, now that `text` follows. heeded: whether a stop string that is complete with it is one."""
        text = self.withheld + text
        # The one that is complete first, so that it is the same one however the text comes.
        ends = [(at + len(string), at) for string in self.strings if (at := text.find(string)) >= 0]
        if ends and heeded:
            self.found, self.withheld = True, ""
            return text[: min(ends)[1]]
        at = len(text) - max((overlap(text, string) for string in self.strings), default=0)
        self.withheld = text[at:]
        return text[:at]


def overlap(text: str, string: str) -> int:
    """Characters at the end of `text` that `string` begins with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
