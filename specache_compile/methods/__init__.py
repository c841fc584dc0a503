"""Methods by name (`options={"method": ...}`), each in one file.

The evaluation's baselines, and the methods of other packages (entry point `specache_compile.methods`), load on request.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from specache_compile.errors import OptionError, warn
from specache_compile.options import MethodOptions, own_options

from . import full, kivi, offload, specache
from .method import Method

METHODS: dict[str, Method] = {one.name: one for one in (full.METHOD, offload.METHOD, kivi.METHOD, specache.METHOD)}


@functools.cache
def load_others() -> None:
    """Load the methods of all installed packages by their entry points; warn of those that cannot be imported."""
    for point in entry_points(group="specache_compile.methods"):
        try:
            point.load()
        except ImportError as error:
            warn(f"the methods of {point.value} cannot be loaded ({error}). Repair that package, or uninstall it")


def every_method() -> dict[str, Method]:
    """All methods, those of installed packages included."""
    load_others()
    return METHODS


# Removed options, and their replacements.
GONE = {
    "key_bits": "bits sets both; bits=1.5 stores keys in 2 bits and values in 1",
    "value_bits": "bits sets both; bits=1.5 stores keys in 2 bits and values in 1",
    "selector": "method='pages' fetches whole pages",
    "page_size": "it is an option of method='pages'",
    "lookup": "pass prompt_lookup_num_tokens to generate",
    "memory": "pass bits; `specache explain` prints the bytes of a cache",
    "pooling": "snapkv takes the maximum of neighbouring scores",
    "hit_rate": "stats(model).bytes_to_device has the bytes that were fetched",
    "correct": "method='specache' corrects, except with setting='paper'",
    "rotate": "method='specache' rotates, except with setting='paper'",
    "param_bits": "method='specache' stores scales of 1- and 2-bit numbers in 8 bits, except with setting='paper'",
    "disable_passes": "lowering='eager' runs the rewritten graph op by op; method='full' keeps the cache in 16 bits",
    "inductor": "set torch._inductor.config, or pass mode",
}


def parse_options(given: Mapping[str, Any] | None) -> MethodOptions:
    """The options that a user passed. OptionError for an unknown name or value, with the accepted ones."""
    if not isinstance(given or {}, Mapping):
        raise OptionError(f"options={given!r}: pass a dict, such as {{'bits': 2}}")
    given = dict(given or {})
    name = given.setdefault("method", "specache")
    if name not in tuple(METHODS) and name not in tuple(every_method()):
        raise OptionError(f"option method={name!r}: accepted are {', '.join(map(repr, METHODS))}")
    method = METHODS[name]
    for option in given:
        if option in GONE and option not in method.accepted:
            raise OptionError(f"option {option} was removed: {GONE[option]}")
        if option not in method.accepted:
            raise not_accepted(option, method)
    return method.options(**{**method.defaults(given), **given})


def not_accepted(option: str, method: Method) -> OptionError:
    """The error for an option that the method lacks; it names methods or options that exist."""
    known = dict.fromkeys(each for other in (method, *every_method().values()) for each in other.accepted)
    if option not in known:
        return OptionError(f"unknown option {option!r}: accepted are {', '.join(known)}")
    if option == "verify":
        is_exact = any(field.is_the_cache for field in method.fields)
        why = "is exact" if is_exact else "keeps no exact copy of all pairs to verify with"
        return OptionError(
            f"option verify: method {method.name!r} {why}. Leave verify out, or use specache, kivi or kcache"
        )
    return OptionError(f"option {option}: method {method.name!r} accepts only {', '.join(method.accepted)}")


def declared_options() -> dict[str, dict[str, Any]]:
    """All options: name → method → declaration (a dataclass field)."""
    found: dict[str, dict[str, Any]] = {}
    for method in every_method().values():
        for name, declared in own_options(method.options).items():
            found.setdefault(name, {})[method.name] = declared
    return found


def defaults_of(takers: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An option's usual default, and the methods with another one, from its declarations by method.

    The usual default is specache's, if it has the option.
    """
    own = {
        method: declared.default_factory() if callable(declared.default_factory) else declared.default
        for method, declared in takers.items()
    }
    usual = own.get("specache", next(iter(own.values())))
    return usual, {method: value for method, value in own.items() if value != usual}
