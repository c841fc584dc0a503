"""Arguments that commands share: one-line errors, a short help, and the backend's options as flags."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from specache_compile.checkpoints.loaded import DTYPES

LOWERINGS = ("inductor", "eager")


class Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, and whose options are not abbreviated."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def check_flags(self, words: Iterable[str]) -> None:
        """End with an error that names the first unknown flag, before argparse reports what is missing."""
        from specache_compile.methods import GONE

        for word in words:
            if word == "--":
                return
            flag = word.partition("=")[0]
            if flag.startswith("--") and " " not in word and flag not in self._option_string_actions:
                option = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
                if option in GONE:
                    self.error(f"{flag} was removed: {GONE[option]}")
                self.error(f"unknown option {flag}{suggestion(flag, self._option_string_actions)}")

    def shorten(self, shown: Collection[str]) -> None:
        """Remove all flags but these and --help-all from the help."""
        for action in self._actions:
            if action.option_strings and not {"--help", "--help-all", *shown} & set(action.option_strings):
                action.help = argparse.SUPPRESS


def suggestion(name: str, known: Iterable[str]) -> str:
    """ " (did you mean NAME?)" for the closest known name; "" if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def flag_of(option: str) -> str:
    return "--" + option.replace("_", "-")


def whole(text: str) -> int:
    """A whole number from 1 on, as argparse's type of an argument."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def number(fits: Callable[[float], bool], accepted: str) -> Callable[[str], float]:
    """The type, for argparse, of an argument whose number must fit. accepted: the error's text."""

    def number(text: str) -> float:  # argparse prints this name if the text is no number
        if not fits(float(text)):
            raise argparse.ArgumentTypeError(f"{text!r}: give {accepted}")
        return float(text)

    return number


gib = number(lambda given: 0 < given < math.inf, "a number of GiB above 0")


def add_dtype(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--dtype", choices=DTYPES, default=default, help="dtype of weights and cache; auto is the file's (%(default)s)"
    )


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if available, else cpu)")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The backend's options that were given."""
    from specache_compile.methods import declared_options

    names = ["method", *declared_options()]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def add_options(command: Parser, shown: bool = True) -> None:
    """Add the backend's options, as the methods declare them. An omitted option keeps the method's default.

    Args:
        shown: whether the help of the command lists them.
    """
    from specache_compile.methods import declared_options, every_method

    group = command.add_argument_group("backend options") if shown else command
    group.add_argument("--method", choices=every_method(), help="default: specache" if shown else argparse.SUPPRESS)
    for name, declarations in declared_options().items():
        declared = next(iter(declarations.values()))
        flag = dict(declared.metadata["flag"])
        if not flag.pop("flag", True):
            continue
        text = f"{declared.metadata['help']} ({defaults(declarations)})".replace("%", "%%")
        text = text if shown else argparse.SUPPRESS
        if isinstance(declared.default, bool):
            group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(flag_of(name), default=None, help=text, **flag)


def defaults(declarations: Mapping[str, Any]) -> str:
    """The methods that accept an option, and its default: "default: 64; kivi: 128"."""
    from specache_compile.methods import defaults_of, every_method

    default, others = defaults_of(declarations)
    methods = "" if len(declarations) == len(every_method()) else f"{', '.join(declarations)}; "
    return methods + "; ".join([f"default: {default}", *(f"{method}: {value}" for method, value in others.items())])
