"""A method and its options as one word on the command line: `specache:bits=1,top_k=64`, `kivi:bits=2`, `uncompiled`.

`uncompiled` is the plain model, the reference for every method. The other names are the backend's methods.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specache_compile.errors import OptionError
from specache_compile.evaluation.baselines.eviction import PROMPT
from specache_compile.methods import METHODS, parse_options
from specache_compile.runtime.records import forget

UNCOMPILED = "uncompiled"
# Graphs of one function, as Dynamo counts them. Beyond Dynamo's own limit of 8 a call would run uncompiled, and its row
# would be the full cache's. Beyond this limit Dynamo raises an error.
GRAPHS = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Setting:
    """A method's name and its given options. `options` are those of the backend; None for uncompiled."""

    name: str
    given: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return self.name + (":" + ",".join(f"{key}={value}" for key, value in self.given) if self.given else "")

    @property
    def options(self) -> dict[str, Any] | None:
        if self.name == UNCOMPILED:
            return None
        return {"method": self.name, **dict(self.given)}

    @property
    def measured(self) -> dict[str, Any]:
        """The options to measure with: without a given min_context, the tiers are used from the first token on."""
        at_once = {"min_context": 0} if "min_context" in METHODS[self.name].accepted else {}
        return {**at_once, **(self.options or {})}

    @property
    def effective(self) -> dict[str, Any]:
        """The given options and the other options' defaults, without options that are off."""
        if self.options is None:
            return {}
        return {name: value for name, value in vars(parse_options(self.measured)).items() if value}


def parse_setting(text: str) -> Setting:
    """The setting of this text; OptionError if the backend does not accept it."""
    name, _, rest = text.partition(":")
    given = [parse_pair(text, pair) for pair in rest.split(",")] if rest else []
    if len(dict(given)) < len(given):
        raise OptionError(f"method {text!r}: an option is given twice")
    setting = Setting(name, tuple(sorted(given)))
    if name == UNCOMPILED and given:
        raise OptionError(f"method {text!r}: the uncompiled model takes no options")
    try:
        parse_options(setting.options)
    except OptionError as error:
        raise OptionError(f"method {text!r}: {error}") from None
    return setting


def parse_pair(text: str, pair: str) -> tuple[str, Any]:
    """`key=value`; a value is a Python literal, true, false, none, or a word."""
    key, equals, value = pair.partition("=")
    if not (equals and key and value):
        raise OptionError(f"method {text!r}: {pair!r} is not option=value")
    if value.lower() in WORDS:
        return key, WORDS[value.lower()]
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value
    return key, tuple(literal) if isinstance(literal, list) else literal


def evicting_once(setting: Setting) -> Setting:
    """The setting for an exact prefill with one eviction: adds `eviction_block=prompt` if the method evicts by blocks
    and no block is given."""
    takes = setting.name != UNCOMPILED and "eviction_block" in METHODS[setting.name].accepted
    if not takes or "eviction_block" in dict(setting.given):
        return setting
    return Setting(setting.name, tuple(sorted([*setting.given, ("eviction_block", PROMPT)])))


@contextlib.contextmanager
def running(model: Any, setting: Setting, lowering: str) -> Iterator[Any]:
    """A context in which `model` runs under the setting. No weights are copied."""
    before = model._compiled_call_impl
    torch._dynamo.reset()
    forget(model)
    try:
        model._compiled_call_impl = None
        if setting.options is not None:
            model.compile(backend="specache", options={"lowering": lowering, **setting.measured})
        with torch._dynamo.config.patch(GRAPHS):
            yield model
    finally:
        model._compiled_call_impl = before
        forget(model)
        torch._dynamo.reset()
