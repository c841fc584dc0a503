"""One Dynamo trace for all options, on which Dynamo's graph does not depend: tracing takes most of a test's time.

Equal backends compile all copies of a model. One keeps the graph that Dynamo captured, and rewrites it for each copy's
options at that copy's first call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from specache_compile.compile.backend import specache

# Parameter of a copy → the copy's options.
_options: Any = WeakIdKeyDictionary()


def compile_by_options(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile in place, and reuse the graphs that were traced for other copies of the model."""
    for parameter in model.parameters():
        _options[parameter] = options
    backend = _Backend(options)
    model.compile(backend=backend)
    found: Any = inspect.getclosurevars(model._compiled_call_impl.get_compiler_config).nonlocals["self"].callback
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    found._torchdynamo_orig_backend = backend


class _Backend:
    """The backend, with a copy's options for `compiled_options`, in the form in which Dynamo shares its graphs."""

    compiler_fn = staticmethod(specache)

    def __init__(self, options: dict[str, Any]) -> None:
        self.kwargs = {"options": options}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        forms: dict[str, Callable[..., Any]] = {}

        def form(arguments: Sequence[Any]) -> Callable[..., Any]:
            options = next(_options[x] for x in arguments if isinstance(x, nn.Parameter) and x in _options)
            how = repr(sorted(options.items()))
            if how not in forms:
                forms[how] = specache(
                    GraphModule(graph_module, copy.deepcopy(graph_module.graph)), example_inputs, options=options
                )
            return forms[how]

        form(example_inputs)  # within Dynamo's compilation, as usual

        def call(*arguments: Any) -> Any:
            return form(arguments)(*arguments)

        return call
