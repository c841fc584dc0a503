"""`explain(model, ...)`: what the backend does to a model, and where every byte would live, before running it.

The model is built again from its config with fake tensors, which have shapes but no storage. One prefill and one decode
step go through the real backend, so what is shown is what runs.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from specache_compile.checkpoints.names import config_of
from specache_compile.compat import GENERATE_MASKS_ALL, cache_of, with_cache
from specache_compile.compile.backend import compile_graph
from specache_compile.compile.captured import Captured, capture
from specache_compile.compile.compiled_graph import CompiledGraph
from specache_compile.compile.rewrites import Rewrites
from specache_compile.errors import SpecacheError, SpecacheWarning, first_line
from specache_compile.generate.checks import reason
from specache_compile.methods import parse_options
from specache_compile.methods.host_tier import HostOptions
from specache_compile.options import MethodOptions
from specache_compile.passes.phase import EXTEND
from specache_compile.passes.pipeline import keeping_stages
from specache_compile.passes.reading.sites import LeftAlone
from specache_compile.runtime.break_even import min_context
from specache_compile.runtime.session import session_of

from .explanation import Explanation, SiteRow
from .times.devices import Device, find_device
from .times.step_nodes import layers_of

# Nothing is allocated, so no budget applies.
NO_LIMIT = sys.maxsize
# Tokens of the verification that is traced (option verify).
VERIFIED = 11


def explain(
    model: Any,
    prompt_length: int = 4096,
    batch_size: int = 1,
    options: Mapping[str, Any] | None = None,
    *,
    device: str | Device | None = None,
    host_gib: float = 128.0,
    reuse: float | None = None,
    corrected: float | None = None,
) -> Explanation:
    """Compute what the backend does to a model, and the bytes and times of a step, without running it.

    The model is traced with fake tensors; nothing is measured and no weights are read.

    Args:
        model: a PreTrainedModel, its config, or a known name, a folder, a config.json or a hub name.
        prompt_length: tokens of context.
        batch_size: rows.
        options: as for `torch.compile(model, backend="specache", options=...)`.
        device: a name of `devices.DEVICES` ("H100", "RTX 4090"), or a `Device`; None is an A100.
        host_gib: GiB of host memory for the host tier.
        reuse: share (0 to 1) of the selected pairs that the slots have already; None is the measured share.
        corrected: share of the selected pairs that a correction fetches; None is the measured share.

    Returns:
        An `Explanation`.

    Raises:
        SpecacheError: the model cannot be traced, or an argument is out of range.

    Example:
        import specache_compile as sc

        print(sc.explain("examples/needle-llama", prompt_length=8192, device="H100"))
    """
    parsed = replace(parse_options(options), lowering="eager")
    if prompt_length < min_context(parsed, torch.device("meta")):
        parsed = parsed.in_16_bits
    if prompt_length < 1 or batch_size < 1:
        raise SpecacheError(f"prompt_length={prompt_length}, batch_size={batch_size}: both must be at least 1")
    for name, share in (("reuse", reuse), ("corrected", corrected)):
        if share is not None and not 0 <= share <= 1:
            raise SpecacheError(f"{name}={share}: give a share between 0 and 1")
    chosen = device if isinstance(device, Device) else find_device(device)
    model = load_config(model) if isinstance(model, (str, Path)) else model
    parsed = parsed.for_prompt(prompt_length)
    config = getattr(model, "config", model)
    unlimited = replace(parsed, host_memory=NO_LIMIT) if isinstance(parsed, HostOptions) else parsed
    # A process may explain many models, each by compiling the same code of Hugging Face. The explanation must not
    # depend on the lengths of earlier calls.
    with (
        torch._dynamo.config.patch(
            recompile_limit=1024, accumulated_recompile_limit=4096, automatic_dynamic_shapes=False
        ),
        FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True),
        keeping_stages(),
    ):
        twin = twin_of(model, config)
        try:
            captured, rewrites = run_steps(twin, prompt_length, batch_size, unlimited)
        except GuardOnDataDependentSymNode as error:
            raise SpecacheError(
                "this model's own Python code decides by the values of a tensor (a rotary table that changes with the "
                "length, say). explain has only shapes and cannot follow it; SPECACHE_DUMP shows the graphs as they run"
            ) from error
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, SpecacheError):
                raise error.inner_exception from None
            raise
        weights = sum(parameter.nbytes for parameter in twin.parameters())
    if not captured:
        raise SpecacheError(f"explain captured no graph of {type(twin).__name__}: {reason(twin)}")
    captured = [graph for graph in captured if graph.is_recognised]
    name = getattr(config, "_name_or_path", "") or type(config).__name__
    graphs = [graph for graph in captured if graph.sites and graph.phase != EXTEND]
    newest = graphs[-1] if graphs else (captured[-1] if captured else None)
    modules: dict[str, GraphModule] = {phase: module for made in rewrites for phase, module in made.modules.items()}
    return Explanation(
        options=parsed,
        prompt_length=prompt_length,
        batch_size=batch_size,
        **attentions_of(newest),
        stages={variant.phase.name: each.stages for made in rewrites for variant, each in made.made.items()},
        graphs=modules,
        layers=tuple(graphs[0].layers) if graphs else (),
        lanes=max((form.lanes for made in rewrites for form in made.made.values()), default=1),
        device=chosen, weight_bytes=weights, host_gib=host_gib, reuse=reuse, corrected=corrected,
        name=name,
    )  # fmt: skip


def attentions_of(graph: Captured | None) -> dict[str, Any]:
    """The rewritten, left and absorbed attentions of a graph, each with the number of its layer in the model."""
    if graph is None:
        return {"sites": (), "left_alone": (), "absorbed": ()}
    layers, left = layers_of(graph.graph_module), graph.left_alone
    names = {node.name: f"layer {layer}: {node.name}" for node, layer in layers.items()}
    sites = [(s.number, layers[s.attention], s.query_heads, s.heads, s.head_dim) for s in graph.sites]
    return {
        "sites": tuple(SiteRow(*site) for site in sites),
        "left_alone": tuple(LeftAlone(names.get(row.node, row.node), row.reason) for row in left),
        "absorbed": tuple(layers[node] for node in graph.absorbed),
    }


def load_config(path: str | Path) -> Any:
    """The config of a checkpoint folder, a config.json, a hub name or a known name."""
    config = config_of(str(path))
    config.name_or_path = str(path)
    return config


def twin_of(model: Any, config: Any) -> Any:
    """The same architecture, dtype and attention implementation, with fresh weights of the ambient tensor mode."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if hasattr(model, "config"):
        # Fake tensors have no storage on any device; Dynamo traces a cache on the meta device wrongly.
        with torch.device("cpu" if model.device.type == "meta" else model.device):
            return type(getattr(model, "_orig_mod", model))._from_config(config, dtype=dtype).eval()
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except Exception as error:  # likewise
        raise SpecacheError(f"no decoder can be built from this config: {first_line(error)}") from error


def run_steps(
    model: Any, prompt_length: int, batch_size: int, options: MethodOptions
) -> tuple[list[Captured], list[Rewrites]]:
    """Run one prefill and one decode step through the backend, as `generate` does; with the option verify also a
    verification. Returns the captured graphs, and the variants of those that are rewritten."""
    captured: list[Captured] = []
    rewrites: list[Rewrites] = []

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        graph = capture(graph_module, options, None)
        compiled = compile_graph(graph, example_inputs)
        captured.append(graph)
        if isinstance(compiled, CompiledGraph):
            rewrites.append(compiled.rewrites)
        return compiled

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecacheWarning)  # the tables list what is left alone
        compiled = torch.compile(model, backend=backend)
        prompt = torch.zeros(batch_size, prompt_length, dtype=torch.int64, device=model.device)
        positions = torch.zeros(batch_size, prompt_length + 1, dtype=torch.int64, device=model.device)
        before: dict[str, Any] = {"position_ids": positions[:, :prompt_length].clone(), "logits_to_keep": 1}
        after: dict[str, Any] = {"position_ids": positions[:, prompt_length:].clone(), "logits_to_keep": 1}
        if GENERATE_MASKS_ALL:
            after["attention_mask"] = torch.ones_like(positions)
            before["attention_mask"] = after["attention_mask"][:, :prompt_length].clone()
        cache = cache_of(compiled(prompt, use_cache=True, **before))
        session = session_of(cache)
        with session.drafting_steps() if session is not None else contextlib.nullcontext():
            compiled(prompt[:, :1].clone(), **with_cache(cache), **after)
        if session is not None and session.options.drafts:
            ids, places = (torch.zeros(batch_size, VERIFIED, dtype=torch.int64, device=model.device) for _ in range(2))
            compiled(ids, **with_cache(cache), position_ids=places, logits_to_keep=0)
    return captured, rewrites
