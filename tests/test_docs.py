"""The scripts and commands of README.md and docs/*.md: they parse, and (slow) run as pasted."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specache_compile as sc
from specache_compile import cli
from specache_compile.methods import parse_options

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# An environment with the package exists already, so a page's installation is not repeated.
INSTALLS = ("pip install", "make ")
BLOCKS = {page: BLOCK.findall(page.read_text()) for page in PAGES}
RUNNABLE = [page for page, blocks in BLOCKS.items() if any(language in ("python", "bash") for language, _ in blocks)]


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCKS[page] if name == language]


def lines(block: str) -> list[str]:
    """The command lines of a shell block: continued lines joined, comments and installations left out."""
    joined = block.replace("\\\n", " ").splitlines()
    return [line for line in joined if line.strip() and not line.startswith(("#", *INSTALLS))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_that_a_reader_would_run_is_marked_as_such(page: Path) -> None:
    unmarked = [text for text in blocks(page, "") if text.startswith(("specache ", "pip ", "python ", "import "))]
    assert not unmarked, "a block of ```bash or ```python runs in a test; ```text does not"


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_scripts_use_public_names_and_accepted_options(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sc":
                assert node.attr in sc.__all__
            if isinstance(node, ast.keyword) and node.arg == "options" and accepts(node.value):
                parse_options(value_of(node.value))


def accepts(options: ast.expr) -> bool:
    """Whether these options are a literal that the script does not expect to be refused."""
    named = any(isinstance(node, ast.Name) for node in ast.walk(options))
    return isinstance(options, ast.Dict) and not named and value_of(options) != {"bits": 3}


def value_of(expression: ast.expr) -> Any:
    """The value of an expression of constants, such as `8 << 30`."""
    return eval(compile(ast.Expression(expression), "page", "eval"), {})


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_commands_have_accepted_arguments(page: Path) -> None:
    for line in (line for text in blocks(page, "bash") for line in lines(text)):
        words = shlex.split(line.split(" & ")[0].split(" | ")[0].split(" > ")[0], comments=True)
        if words[0] == "specache" and "$" not in line:
            top, _ = cli.parser(words[1:])
            assert top.parse_args(words[1:]), line


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_a_page_runs_as_pasted(page: Path, tmp_path: Path) -> None:
    """Each shell block by itself, and the Python blocks of a page in one session, in a copy of the checkout."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0"):
        if name and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "\n".join(blocks(page, "python"))
    commands = [["bash", "-euc", "\n".join(lines(text))] for text in blocks(page, "bash")]
    for command in (*commands, *([[sys.executable, "-c", script]] if script else [])):
        run(command, tmp_path, {**os.environ, "PATH": paths})


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a command to its end, and stop what it leaves behind (a server)."""
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    try:
        assert process.wait() == 0, command[-1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
