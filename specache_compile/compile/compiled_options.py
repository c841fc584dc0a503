"""The options that a model's calls are compiled with, read from Dynamo's objects."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from specache_compile.errors import SpecacheError
from specache_compile.methods import parse_options
from specache_compile.options import MethodOptions


def required_options(model: torch.nn.Module, what: str) -> MethodOptions:
    """The options of a compiled model. SpecacheError, naming the operation `what`, if this backend has not
    compiled it."""
    given = options_of(model)
    if given is None:
        raise SpecacheError(
            f"{what}: this model is not compiled with the backend 'specache'. Call model.compile(backend='specache', "
            "options=...) first"
        )
    return parse_options(given)


def options_of(model: torch.nn.Module) -> Mapping[str, Any] | None:
    """The options of a model compiled by `torch.compile(model)` or `model.compile()`; None for another
    backend or none."""
    if isinstance(model, OptimizedModule):
        return options_given(model.dynamo_ctx)
    called = compiled_options(model._compiled_call_impl)
    return compiled_options(model.__dict__.get("forward")) if called is None else called


def compiled_options(function: Any) -> Mapping[str, Any] | None:
    """The options of a compiled function; None if it is not compiled, or by another backend."""
    if not hasattr(function, "get_compiler_config"):
        return None
    context = inspect.getclosurevars(function.get_compiler_config).nonlocals.get("self")
    return options_given(context)


def options_given(context: Any) -> Mapping[str, Any] | None:
    """The options that one of Dynamo's contexts passes to the backend "specache"; None for another backend."""
    compiler = own_compiler(getattr(context, "callback", None))
    return None if compiler is None else getattr(compiler, "kwargs", {}).get("options", {})


def own_compiler(compiler: Any) -> Any:
    """The backend "specache" with its options, inside Dynamo's wrappers; None for another backend."""
    from .backend import specache

    while compiler is not None:
        if compiler is specache or getattr(compiler, "compiler_fn", None) is specache:
            return compiler
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    return None
