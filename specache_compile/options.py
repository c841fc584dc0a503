"""Declarations of options, each with its default, check and help; the methods' files declare their own.

The checks, the command line's flags and the table in docs/options.md follow from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch

from .errors import OptionError

LOWERINGS = ("inductor", "eager")


def option(default: Any, fits: Callable[[Any], object], accepted: str, help: str, **flag: Any) -> Any:
    """A field of an options class.

    fits: whether a value is accepted. accepted: the error's text if it is not.
    help: one line for the command line and the docs.
    flag: arguments for argparse; `flag=False`: not on the command line.
    """

    def check(name: str, value: Any) -> None:
        if not fits(value):
            raise OptionError(f"option {name}={value!r}: {accepted}")

    return field(default=default, metadata={"check": check, "help": help, "flag": flag})


def choice(default: Any, accepted: Collection[Any], help: str, **flag: Any) -> Any:
    """An option with a few accepted values, each with its type: True is not 1."""

    def fits(value: Any) -> bool:
        return any(value is each or (type(value) is type(each) and value == each) for each in accepted)

    flag = {"choices": tuple(accepted), "type": type(default), **flag} if not isinstance(default, bool) else flag
    return option(default, fits, f"accepted are {', '.join(map(repr, accepted))}", help, **flag)


def whole(
    default: Any, least: int, help: str, most: int | None = None, words: tuple[Any, ...] = (),
    unit: str = "an integer", **flag: Any,
) -> Any:  # fmt: skip
    """An option that is an integer from `least` to `most`, or one of `words`. unit: its name in errors."""
    bounds = f"{least} or more" if most is None else f"{least} to {most}"

    def fits(value: Any) -> bool:
        return value in words or (type(value) is int and least <= value and (most is None or value <= most))

    accepted = ", or ".join((f"accepted is {unit}, {bounds}", *map(repr, words)))
    return option(default, fits, accepted, help, **{"type": number_or_word if words else int, **flag})


def inherited(options: type[MethodOptions], name: str, default: Any) -> Any:
    """The option `name` of the class `options`, with another default."""
    return field(default=default, metadata=own_options(options)[name].metadata)


def number_or_word(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdigit() else text


@dataclass(frozen=True)
class MethodOptions:
    """The options of every method; a method's own are in a subclass. They are frozen and hashable, as keys of rewritten
    graphs."""

    method: str
    lowering: str = choice("inductor", LOWERINGS, "inductor, or eager to run the rewritten graph op by op")
    exact_layers: tuple[int, ...] = option(
        (), lambda given: not isinstance(given, (str, int)) and all(type(n) is int and n >= 0 for n in given),
        "accepted is a list of layer numbers, counted from 0",
        "numbers of attentions, from 0, that are not rewritten", type=int, nargs="+",
    )  # fmt: skip
    mode: str | None = choice(
        None, (None, *torch._inductor.list_mode_options()),
        "a mode of torch.compile, which does not accept mode= with options=",
        type=str, choices=tuple(torch._inductor.list_mode_options()),
    )  # fmt: skip

    # Values for methods without an option of that name: nothing is selected or verified, from the first
    # token.
    top_k = cast("int | str", 0)
    corrects = False
    min_context = cast("int | str", 0)
    verify = cast("int | str | None", None)
    has_low_bit_tier = False
    host_tier = True
    host_memory = cast("int | None", None)

    def __post_init__(self) -> None:
        for declared in fields(self):
            if "check" in declared.metadata:
                declared.metadata["check"](declared.name, getattr(self, declared.name))
        object.__setattr__(self, "exact_layers", tuple(self.exact_layers))
        for reason in self.conflicts():
            raise OptionError(f"option {reason}")

    def conflicts(self) -> Iterator[str]:
        """Yield why options may not be passed together, as errors."""
        yield from ()

    @property
    def two_lanes(self) -> bool:
        """Whether a speculative token runs beside the output token."""
        return False

    @property
    def drafts(self) -> bool:
        """Whether the decode phase drafts tokens."""
        return self.verify is not None

    @property
    def capacity_is_free(self) -> bool:
        """Whether one graph serves every capacity, because no shape depends on it but the table's."""
        return True

    @property
    def bits_on_host(self) -> int:
        """Bits of a number in the host tier."""
        return 16

    @property
    def in_16_bits(self) -> MethodOptions:
        """The options below `min_context` tokens."""
        return self

    def for_prompt(self, tokens: int) -> MethodOptions:
        """The options that a prompt of `tokens` tokens determines."""
        return self

    def low_bit_length(self, length: int) -> int:
        """Tokens of `length` cached ones in the low-bit tier."""
        return 0


def own_options(options: type[MethodOptions]) -> dict[str, Any]:
    """The declarations of an options class by name, without those that a user cannot set."""
    return {declared.name: declared for declared in fields(options) if declared.metadata}


def differences(made_under: MethodOptions, compiled_with: MethodOptions) -> str:
    """The options of a cache that differ from a model's; empty if none do. How graphs are lowered is not compared."""
    special = (name for name in own_options(type(made_under)) if name not in own_options(MethodOptions))
    names = ["method", "exact_layers", *special]
    return ", ".join(
        f"{name} {getattr(made_under, name)!r} (the model's: {getattr(compiled_with, name)!r})"
        for name in names
        if hasattr(compiled_with, name) and getattr(made_under, name) != getattr(compiled_with, name)
    )
