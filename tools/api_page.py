"""The text of docs/api.md: every public name with its signature and its docstring, as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import specache_compile as sc

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):\n((?:    .*\n|\n)+)", re.MULTILINE)


def api() -> str:
    """The page's body: a section for each name of `specache_compile.__all__`."""
    return "\n\n".join(f"## {name}\n\n{described(getattr(sc, name))}" for name in sc.__all__)


def described(thing: Any) -> str:
    """The signature of a function or class, and its docstring."""
    docstring = SECTION.sub(section, (inspect.getdoc(thing) or "") + "\n")
    is_data = isinstance(thing, type) and (issubclass(thing, Exception) or hasattr(thing, "__dataclass_fields__"))
    return docstring.strip() if is_data else f"```text\n{signature(thing)}\n```\n\n{docstring.strip()}"


def signature(thing: Any) -> str:
    """A call of a function or class, with its defaults and without types."""
    parameters = inspect.signature(thing).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    names = [thing.__name__ if parameter.name == "self" else str(parameter) for parameter in bare]
    return f"sc.{thing.__name__}({', '.join(re.sub('=<function.*', '=...', name) for name in names)})"


def section(found: re.Match[str]) -> str:
    """A section of a docstring: a block of code for the example, a list for fields, else a paragraph."""
    title, text = found[1], textwrap.dedent(found[2]).strip()
    if title == "Example":
        return f"```python\n{text}\n```\n"
    if title == "Returns":
        return f"**Returns.** {' '.join(text.split())}\n\n"
    fields = [" ".join(field.split()) for field in re.split(r"\n(?=\S)", text)]
    lines = [re.sub(r"^([\w, ]+):", named, field) for field in fields]
    return f"**{title}**\n\n" + "".join(f"- {line}\n" for line in lines) + "\n"


def named(fields: re.Match[str]) -> str:
    """The names before a colon, as code."""
    return ", ".join(f"`{name}`" for name in fields[1].split(", ")) + ":"
