"""Write examples/quickstart.ipynb from docs/quickstart.md: a cell for each block of code, and for the text between.

python tools/notebook.py            write it
python tools/notebook.py --check    exit status 1 if it is out of date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, NOTEBOOK = ROOT / "docs" / "quickstart.md", ROOT / "examples" / "quickstart.ipynb"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!http)")


def notebook(page: str) -> str:
    """A Markdown page as a notebook. Shell blocks become cells of `%%bash`; links lead from examples/ to docs/."""
    first, *rest = BLOCK.split(page)
    cells = [text_cell(first)]
    for language, code, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        cells += [code_cell(code if language == "python" else f"%%bash\n{code}"), text_cell(text)]
    content = {
        "cells": [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells)],
        "metadata": {"language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def code_cell(code: str) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines(code)}


def text_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": lines(LINK.sub("](../docs/", text))}


def lines(text: str) -> list[str]:
    return text.strip().splitlines(keepends=True)


def main(arguments: list[str]) -> int:
    made = notebook(PAGE.read_text())
    if "--check" not in arguments:
        NOTEBOOK.write_text(made)
    elif not NOTEBOOK.exists() or NOTEBOOK.read_text() != made:
        print(f"{NOTEBOOK.name} is out of date: python tools/notebook.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
