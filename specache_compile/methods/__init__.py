"""Methods by name (`options={"method": ...}`): each one file here, an eviction policy one in kernels/policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specache_compile.errors import OptionError, nothing_to_verify
from specache_compile.kernels.policies import POLICIES
from specache_compile.options import MethodOptions, one_of, own_options

from . import fp8, full, kcache, kivi, offload, snapkv, specache
from .eviction import eviction
from .field import Field
from .method import Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        full.METHOD,
        fp8.METHOD,
        offload.METHOD,
        kivi.METHOD,
        specache.METHOD,
        kcache.METHOD,
        snapkv.METHOD,
        *(eviction(policy) for policy in POLICIES),
    )
}


# Options that earlier versions took, and what to take in their place.
GONE = {"unbiased": "correct='always', the default, does more for the low-bit tier's weights"}


def parse_options(given: Mapping[str, Any] | None) -> MethodOptions:
    """The options that a user passed, with the bad name or value and the accepted ones in the error."""
    given = dict(given or {})
    name = given.setdefault("method", "specache")
    one_of("method", name, tuple(METHODS))
    method = METHODS[name]
    known = dict.fromkeys(option for other in (method, *METHODS.values()) for option in other.accepted)
    for option in given:
        if option in GONE:
            raise OptionError(f"option {option} is gone: {GONE[option]}")
        if option not in known:
            raise OptionError(f"unknown option {option!r}: accepted are {', '.join(known)}")
        if option == "verify" and option not in method.accepted:
            raise nothing_to_verify(name, exact=any(field.is_the_cache for field in method.fields))
        if option not in method.accepted:
            raise OptionError(f"option {option}: method {name!r} has none; it takes {', '.join(method.accepted)}")
    return method.options(**{**method.defaults(given), **given})


def declared_options() -> dict[str, dict[str, Any]]:
    """Every option, by name: its declaration (a dataclass field) in each method that takes it."""
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS.values():
        for name, declared in own_options(method.options).items():
            found.setdefault(name, {})[method.name] = declared
    return found


def defaults_of(takers: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An option's default, specache's where it takes the option, and those of the methods that have another; from its
    declarations by method."""
    own = {
        method: declared.default_factory() if callable(declared.default_factory) else declared.default
        for method, declared in takers.items()
    }
    usual = own.get("specache", next(iter(own.values())))
    return usual, {method: value for method, value in own.items() if value != usual}


def declared_fields() -> dict[str, Field]:
    """Every state tensor that a method declares, by its name, which stands for one of them alone."""
    found: dict[str, Field] = {}
    for method in METHODS.values():
        for field in method.fields:
            if found.setdefault(field.name, field) is not field:
                raise ValueError(f"method {method.name}: another field is called {field.name!r} already")
    return found


__all__ = ["METHODS", "Method", "declared_fields", "declared_options", "defaults_of", "parse_options"]
