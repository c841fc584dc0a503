"""Check the prose of Markdown pages and docstrings: sentence length, and words that do not fit software.

python tools/prose.py [FILES OR FOLDERS]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEFAULT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples", "specache_compile", "passes", "lowering")
DEFAULT += ("kernels", "benchmarks", "tools")
LONGEST = 30  # words in a sentence

# A person may do these; software generates, stores, prints, requires.
PERSON = r"(?:you|we|I|users?|people|person|readers?|authors?|developers?|clients?|callers?|newcomers?|papers?)"
HELPING = r"(?:also|do|have|don't|may|can|could|should|must|will|would|not|that|who|only|really|to)"
VERBS = r"says?|said|saying|tells?|told|telling|asks?|asked|asking|wants?|wanted|knows|knew"
SPOKEN = re.compile(rf"(?P<person>\b{PERSON}\s+(?:{HELPING}\s+)*)?\b(?P<word>{VERBS})\b", re.IGNORECASE)
PHRASES = re.compile(r"\b(?:anew|in\s+force|of\s+(?:its|their)\s+own|nobody['’]s|whoever)\b", re.IGNORECASE)

FENCE = re.compile(r"\s*(?:>\s*)*(`{3,}|~{3,})")
SECTION = re.compile(r"\s*(?:Args|Returns|Raises|Yields|Attributes|Examples?|Notes?|Shapes?):\s*$")
ENTRY = re.compile(r"\s*(?:[-*+]\s|\d+[.)]\s|#+\s|\*{0,2}\w+(?:\s\(.*?\))?:\s)")
MARKER = re.compile(r"^(?:(?:[-*+]|#+|\d+[.)])\s+|\w+(?:\s\(.*?\))?:\s)")  # of a list item, a heading, a field
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
ADDRESS = re.compile(r"<[^>]*>|https?://\S+")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|al|vs|cf|no|Fig|Eq|Sec)\.$", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?][\"')*_]*(?=\s+[\"'(*_\[]*[A-Z0-9])")

Lines = list[tuple[int, str]]


def blocks(lines: Lines) -> Iterator[Lines]:
    """Paragraphs, headings, list items and field entries; without code blocks, tables and doctests."""
    block: Lines = []
    fence = ""
    after_blank, in_code = True, False
    for number, line in lines:
        marker = FENCE.match(line)
        if fence or marker:
            if marker and marker[1].startswith(fence):
                fence = "" if fence else marker[1]
            text, new = "", True
        else:
            indented = line.startswith("    ") and (in_code or (after_blank and not ENTRY.match(line)))
            in_code = indented or (in_code and not line.strip())
            skipped = in_code or line.lstrip().startswith(("|", ">>>", "...")) or SECTION.match(line)
            text = "" if skipped else line.strip().removeprefix(">").strip()
            new = not text or bool(ENTRY.match(line))
        if new and block:
            yield block
            block = []
        if text:
            block.append((number, MARKER.sub("", text)))
        if block and line.lstrip().startswith("#"):
            yield block
            block = []
        after_blank = not line.strip()
    if block:
        yield block


def plain(text: str) -> str:
    """The text with each inline code as one word and without link targets, at unchanged line breaks."""
    text = INLINE_CODE.sub(lambda match: "Code" + "\n" * match[0].count("\n"), text)
    text = LINK.sub(lambda match: match[1] + "\n" * (match[0].count("\n") - match[1].count("\n")), text)
    return ADDRESS.sub(lambda match: "\n" * match[0].count("\n"), text)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Each sentence and the offset at which it begins."""
    start = 0
    for end in SENTENCE_END.finditer(text):
        if not ABBREVIATION.search(text[: end.start() + 1]):
            yield start, text[start : end.end()]
            start = end.end()
    yield start, text[start:]


def findings(lines: Lines) -> Iterator[tuple[int, str]]:
    """(line number, what) for each long sentence and each word that does not fit."""
    for block in blocks(lines):
        text = plain("\n".join(line for _, line in block))
        first = block[0][0]
        for offset, sentence in sentences(text):
            count = len(re.findall(r"\S*\w\S*", sentence))
            if count > LONGEST:
                begins = offset + len(sentence) - len(sentence.lstrip())
                opening = " ".join(sentence.split()[:6])
                yield first + text.count("\n", 0, begins), f"{count} words in a sentence: {opening} ..."
        for match in SPOKEN.finditer(text):
            if not match["person"]:
                yield first + text.count("\n", 0, match.start("word")), f'"{match["word"]}"'
        for match in PHRASES.finditer(text):
            yield first + text.count("\n", 0, match.start()), f'"{" ".join(match[0].split())}"'


def page(text: str) -> Iterator[Lines]:
    """A Markdown page without its HTML comments."""
    text = re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    yield list(enumerate(text.split("\n"), 1))


def docstrings(source: str) -> Iterator[Lines]:
    """The lines of each docstring of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                margin = " " * node.body[0].col_offset
                yield list(enumerate((line.removeprefix(margin) for line in text.split("\n")), node.body[0].lineno))


def check(path: Path) -> list[str]:
    """Every finding of one file, in the order of its lines."""
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    parts = (docstrings if path.suffix == ".py" else page)(path.read_text())
    found = sorted(finding for lines in parts for finding in findings(lines))
    return [f"{shown}:{number}: {what}" for number, what in found]


def files(names: list[str]) -> Iterator[Path]:
    for name in names:
        path = Path(name)
        if not path.exists():
            sys.exit(f"tools/prose.py: {name} does not exist; name Markdown pages, Python files or folders")
        yield from [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])


def main(names: list[str]) -> int:
    found = [line for path in files(names or [str(ROOT / name) for name in DEFAULT]) for line in check(path)]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
