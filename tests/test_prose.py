"""tools/prose.py: what it reports in a page and in docstrings, and what it skips."""

from __future__ import annotations

from pathlib import Path

import pytest

import prose

SHORT = "The cache stores keys in groups of sixty-four."
LONG = " ".join(["word"] * 31) + "."


def found(tmp_path: Path, text: str, name: str = "page.md") -> list[str]:
    """The findings of a file with this text, without its path."""
    path = tmp_path / name
    path.write_text(text)
    return [line.removeprefix(f"{path}:") for line in prose.check(path)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"# Title\n\n{LONG}", ["3: 31 words in a sentence: word word word word word word ..."]),
        ("Short one.\n" + LONG.capitalize().replace(" ", "\n", 2), ["2: 31 words in a sentence: Word"]),
        ("- " + " ".join(["word"] * 20) + "\n  " + " ".join(["`x`"] * 11) + ".", ["1: 31 words"]),
        (" ".join(["word"] * 20) + ", e.g. " + " ".join(["Word"] * 11), ["1: 32 words"]),
        ("The server\nsays so.", ['2: "says"']),
        ("The model is told the length,\nand made\nanew.", ['1: "told"', '3: "anew"']),
        ("One `a\nb` and\nthe option in\nforce.", ['3: "in force"']),
        ("A stream of its own is nobody's.", ['1: "nobody\'s"', '1: "of its own"']),
        (f"```\n{SHORT}\n```\n\n> The page\n> knows this.", ['6: "knows"']),
        ("<!-- one\ntwo -->\nWhoever reads.", ['3: "Whoever"']),
        ("The [page that\nasks](x.md) wants more.", ['2: "asks"', '2: "wants"']),
    ],
)
def test_each_finding_has_its_line(tmp_path: Path, text: str, expected: list[str]) -> None:
    lines = found(tmp_path, text)
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


SOURCE = '''"""A module that says nothing."""

told = "asked"  # wanted


class Cache:
    """Hold keys.

        before = told(x)       says = after(x)

    >>> asked
    """

    def read(self) -> None:
        """Return rows.

        Args:
            length: the length that the caller wants to use.
            told: a name.
            mask: the mask that the model wants.
        """
        return "anew"
'''


def test_of_a_module_only_its_docstrings_are_prose(tmp_path: Path) -> None:
    assert found(tmp_path, SOURCE, "module.py") == ['1: "says"', '20: "wants"']
