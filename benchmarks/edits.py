"""Prompts whose answers repeat them: a function to copy out of code of Python's library, or to rename what is in it."""

from __future__ import annotations

import argparse
import ast
import asyncio.base_events
import calendar
import configparser
import csv
import difflib
import email.message
import inspect
import mailbox
import random
import tarfile
import tokenize
from collections.abc import Iterator
from types import ModuleType

from specache_compile.evaluation.reader import Reader

MODULES: tuple[ModuleType, ...] = (
    argparse, asyncio.base_events, calendar, configparser, csv, difflib, email.message, mailbox, tarfile, tokenize,
)  # fmt: skip
# Lines of a function that is asked for.
LEAST, MOST = 10, 40
ASKED = {
    "copy": "Copy the function `{name}` from this code, word for word.",
    "rename": "Rewrite the function `{name}` from this code with its parameter `{parameter}` renamed to `{new}`.",
}
NEW = "target_value"


def functions(source: str) -> Iterator[ast.FunctionDef]:
    """Those of some lines that have a parameter beside self."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not parameters(node):
            continue
        if LEAST <= (node.end_lineno or 0) - node.lineno < MOST:
            yield node


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]


def around(reader: Reader, lines: list[str], function: ast.FunctionDef, tokens: int) -> str:
    """The function with lines on both sides of it: as many as fit, the function's own at least."""
    first, last = function.lineno - 1, function.end_lineno or function.lineno
    sizes = [len(reader.encode(f"{line}\n")) for line in lines]
    room = tokens - sum(sizes[first:last])
    while room > 0 and (first > 0 or last < len(lines)):
        if first > 0:
            first -= 1
            room -= sizes[first]
        if last < len(lines):
            last += 1
            room -= sizes[last - 1]
    return "\n".join(lines[first:last])


def prompts(reader: Reader, kind: str, context: int, samples: int, seed: int) -> list[list[int]]:
    """Token ids of as many prompts of one of `ASKED`, each of about `context` tokens; the answer's fence is open."""
    rng, made = random.Random(f"{seed}/{kind}"), []
    for number in range(samples):
        source = inspect.getsource(MODULES[number % len(MODULES)])
        function = rng.choice(list(functions(source)))
        code = around(reader, source.splitlines(), function, context)
        asked = ASKED[kind].format(name=function.name, parameter=parameters(function)[0], new=NEW)
        made.append([*reader.chat(f"{asked}\n\n```python\n{code}\n```"), *reader.encode("```python\n")])
    return made
