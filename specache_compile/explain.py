"""`explain(model, ...)`: what the backend does to a model, and where every byte would live, before running it.

The model is built again from its config out of fake tensors, which have shapes but no storage, and goes through the
real backend: one prefill and one decode step. So what is shown is what runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specache_compile.passes.context import LeftAlone
from specache_compile.passes.pipeline import Trace

from .errors import SpecacheError, SpecacheWarning
from .options import Options, parse_options
from .records import find_record
from .tiers import LayerShape, full_cache_bytes, predicted_bytes


@dataclass(frozen=True)
class SiteRow:
    """One rewritten attention, as every phase sees it."""

    layer: int
    query_heads: int
    heads: int
    head_dim: int
    mask: bool
    softcap: float | None
    sinks: bool


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; print it, or ask it. Bytes are for `prompt_length` tokens and `batch_size` rows."""

    options: Options
    prompt_length: int
    batch_size: int
    sites: tuple[SiteRow, ...]
    left_alone: tuple[LeftAlone, ...]
    traces: Mapping[str, Trace]
    graphs: Mapping[str, GraphModule]
    bytes_by_tier: Mapping[str, int]
    full_cache_bytes: int
    lanes: int

    @property
    def device_bytes(self) -> int:
        """KV bytes on the device: low-bit, recent and slots."""
        return sum(size for tier, size in self.bytes_by_tier.items() if tier != "host")

    @property
    def kv_ratio(self) -> float:
        """Device KV bytes / bytes of the same tokens in Hugging Face's cache."""
        return self.device_bytes / self.full_cache_bytes if self.full_cache_bytes else 1.0

    @property
    def bytes_fetched(self) -> int:
        """Bytes that a decode step fetches from the host tier at most, when no pair is in the slots already."""
        pair = sum(site.heads * site.head_dim for site in self.sites) * 2
        width = self.full_cache_bytes // max(1, self.prompt_length * self.batch_size * pair)
        return self.batch_size * self.options.top_k * pair * width

    def graph(self, phase: str, after: str | None = None) -> GraphModule | str:
        """The rewritten graph of a phase; with `after`, its text as it stood after that pass ("captured": before)."""
        if phase not in self.traces:
            raise SpecacheError(f"no phase {phase!r}: there are {', '.join(self.traces)}")
        if after is None:
            return self.graphs[phase]
        texts = self.traces[phase].graphs
        if after not in texts:
            raise SpecacheError(f"no pass {after!r}: there are {', '.join(texts)}")
        return texts[after]

    def __str__(self) -> str:
        parts = [
            f"specache: {len(self.sites)} attentions rewritten, {len(self.left_alone)} left exact, {self.lanes} "
            f"lane{'s' if self.lanes > 1 else ''} in decode; {self.prompt_length:,} tokens x batch {self.batch_size}",
            tabulate([(n, f"{b:,}", f"{b / max(1, self.full_cache_bytes):.3f}") for n, b in self.memory_rows()],
                     headers=("tier", "bytes", "of full cache"), colalign=("left", "right", "right")),
            tabulate([(phase, r.name, ", ".join(f"{k} {v}" for k, v in r.counts.items()), f"{r.seconds * 1e3:.0f}",
                       "; ".join(r.remarks)) for phase, trace in self.traces.items() for r in trace.reports],
                     headers=("phase", "pass", "what it did", "ms", ""), maxcolwidths=(None, None, 36, None, 26)),
            tabulate([vars(site) for site in self.sites], headers="keys"),
        ]  # fmt: skip
        if self.left_alone:
            parts.append(tabulate([vars(item) for item in self.left_alone], headers="keys", maxcolwidths=(None, 70)))
        return "\n\n".join(parts)

    def memory_rows(self) -> list[tuple[str, int]]:
        return [
            *self.bytes_by_tier.items(),
            ("device, in all", self.device_bytes),
            ("fetched a step, at most", self.bytes_fetched),
            ("full cache", self.full_cache_bytes),
        ]


def explain(
    model: Any, prompt_length: int = 4096, batch_size: int = 1, options: Mapping[str, Any] | None = None
) -> Explanation:
    """Explain what `torch.compile(model, backend="specache", options=options)` does to a Hugging Face decoder.

    model: a PreTrainedModel (its weights are not touched) or its config. Sizes are computed, not measured.
    """
    parsed = replace(parse_options(options), lowering="eager")
    config = getattr(model, "config", model)
    if prompt_length < 1 or batch_size < 1:
        raise SpecacheError(f"prompt_length={prompt_length}, batch_size={batch_size}: both must be at least 1")
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        twin = twin_of(model, config)
        run_two_steps(twin, prompt_length, batch_size, parsed)
    record = find_record(twin)
    graphs = record.graphs if record else []
    layers: list[LayerShape] = graphs[0].layer_shapes() if graphs else []
    return Explanation(
        options=parsed,
        prompt_length=prompt_length,
        batch_size=batch_size,
        sites=tuple(
            SiteRow(s.layer, s.query_heads, s.heads, s.head_dim, s.mask is not None, s.softcap, s.sinks is not None)
            for s in (graphs[-1].sites if graphs else ())
        ),
        left_alone=tuple(item for item in (graphs[-1].left_alone if graphs else ())),
        traces={trace.phase: trace for graph in graphs for trace in graph.traces},
        graphs={phase: module for graph in graphs for phase, module in graph.modules.items()},
        bytes_by_tier=predicted_bytes(parsed, layers, batch_size, prompt_length),
        full_cache_bytes=full_cache_bytes(layers, batch_size, prompt_length),
        lanes=max((context.lanes for graph in graphs for _, context in graph.lowered.values()), default=1),
    )


def twin_of(model: Any, config: Any) -> Any:
    """The same architecture, dtype and attention implementation, with fresh weights of the ambient tensor mode."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if hasattr(model, "config"):
        with torch.device(model.device):
            return type(getattr(model, "_orig_mod", model))._from_config(config, dtype=dtype).eval()
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def run_two_steps(model: Any, prompt_length: int, batch_size: int, options: Options) -> None:
    """One prefill and one decode step through the backend."""
    from .backend import compile_graph

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecacheWarning)  # what is left alone is a table here
        compiled = torch.compile(model, backend=functools.partial(compile_graph, options=options))
        prompt = torch.zeros(batch_size, prompt_length, dtype=torch.int64, device=model.device)
        cache = compiled(prompt, use_cache=True, logits_to_keep=1).past_key_values
        position = torch.full((batch_size, 1), prompt_length, dtype=torch.int64, device=model.device)
        compiled(prompt[:, :1], past_key_values=cache, position_ids=position, logits_to_keep=1)
