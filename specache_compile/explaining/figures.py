"""What `explain` found about a model, as figures to query and compare; `tables.py` prints them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from specache_compile.errors import SpecacheError
from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions
from specache_compile.passes.reading.sites import LeftAlone
from specache_compile.runtime.state import device_total, full_cache_bytes, predicted_bytes

from .one_layer import layer_text
from .times.devices import Device
from .times.step_kernels import Traced, is_captured, kernels_of, over_tiers
from .times.step_time import (
    ComputedStep,
    Span,
    share_ahead,
    simulated,
    step_of,
)
from .times.workload import CORRECTED, Workload

# The most lines of a layer's text.
SCREEN = 60


@dataclass(frozen=True)
class SiteRow:
    """One rewritten attention.

    layer: its number among the rewritten attentions.
    model_layer: its layer's number in the model.
    """

    layer: int
    model_layer: str
    query_heads: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class Figures:
    """What the backend does to a model, with `prompt_length` tokens and `batch_size` rows.

    Every figure is computed, not measured: bytes from shapes, times from the event simulation (`times/step_time.py`) of
    `device`.

    reuse, corrected: see `explain`; None: the defaults of `load`.
    absorbed: the layers with absorbed latent attention, which use Hugging Face's cache.
    """

    options: MethodOptions
    prompt_length: int
    batch_size: int
    sites: tuple[SiteRow, ...]
    left_alone: tuple[LeftAlone, ...]
    texts: Mapping[str, Mapping[str, str]]
    graphs: Mapping[str, GraphModule]
    layers: tuple[LayerShape, ...]
    lanes: int
    device: Device
    weight_bytes: int
    reuse: float | None = None
    corrected: float | None = None
    host_gib: float = 128.0
    name: str = ""
    absorbed: tuple[str, ...] = ()

    @functools.cached_property
    def bytes_by_tier(self) -> dict[str, int]:
        return predicted_bytes(self.options, list(self.layers), self.batch_size, self.prompt_length)

    @property
    def full_cache_bytes(self) -> int:
        """Bytes of the same tokens in a 16-bit cache, whatever the model's dtype is."""
        return full_cache_bytes(self.layers, self.batch_size, self.prompt_length, itemsize=2)

    @property
    def device_bytes(self) -> int:
        """KV bytes on the device: low-bit, recent and slots."""
        return device_total(self.bytes_by_tier)

    @property
    def kv_ratio(self) -> float:
        """Device KV bytes / bytes of the same tokens in a 16-bit cache."""
        return self.device_bytes / self.full_cache_bytes if self.full_cache_bytes else 1.0

    def texts_of(self, phase: str) -> Mapping[str, str]:
        if phase not in self.texts:
            raise SpecacheError(f"no phase {phase!r}: there are {', '.join(self.texts) or 'none'}")
        return self.texts[phase]

    def graph(self, phase: str, after: str | None = None, layer: int | None = None) -> GraphModule | str:
        """The rewritten graph of a phase.

        Args:
            phase: "prefill", "decode", or another phase of `graphs`.
            after: the name of a pass, or "captured": return the graph's text as it was after that pass.
            layer: return only this layer of the model, as short Python (`one_layer.py`).
        """
        texts = self.texts_of(phase)
        if after is not None and after not in texts:
            raise SpecacheError(f"no pass {after!r}: there are {', '.join(texts)}")
        if layer is not None:
            return layer_text(texts[after or list(texts)[-1]], layer)
        return self.graphs[phase] if after is None else texts[after]

    def diff(self, phase: str, pass_name: str | None = None, layer: int | None = None) -> str:
        """A unified diff of a phase's graph before and after one pass; empty where the pass changed nothing.

        Args:
            phase: as for `graph`.
            pass_name: the pass; None: all passes together.
            layer: compare only this layer of the model, as short Python.
        """
        names = list(self.texts_of(phase))
        if pass_name is not None and pass_name not in names[1:]:
            raise SpecacheError(f"no pass {pass_name!r}: there are {', '.join(names[1:])}")
        new = pass_name or names[-1]
        return self.compared(phase, names[names.index(new) - 1] if pass_name else names[0], new, layer)

    def layer(self, number: int, phase: str = "decode") -> str:
        """One layer of the model before and after all passes, as a diff of short Python in at most `SCREEN` lines."""
        first, *_, last = self.texts_of(phase)
        lines = self.compared(phase, first, last, number, context=SCREEN).splitlines()
        if len(lines) > SCREEN:
            lines = self.compared(phase, first, last, number).splitlines()
        if len(lines) > SCREEN:
            lines[SCREEN - 1 :] = [f"# {len(lines) - SCREEN + 1} more lines: --graph {phase} --layer {number}"]
        return "\n".join([*lines, ""]) if lines else f"# left as it is\n{self.graph(phase, last, number)}"

    def compared(self, phase: str, old: str, new: str, layer: int | None, context: int | None = None) -> str:
        """A unified diff of a phase's graph after two passes. context: unchanged lines around a change."""
        before, after = (str(self.graph(phase, name, layer)).splitlines(keepends=True) for name in (old, new))
        lines = context or (1 if layer is None else 3)
        return "".join(difflib.unified_diff(before, after, f"{phase}/{old}", f"{phase}/{new}", n=lines))

    def load(self) -> Workload:
        """The workload of the explained decode step, with the assumed shares of the selected pairs that travel where
        none were given."""
        heads = tuple(site.query_heads for site in self.sites)
        reuse = 1 - share_ahead(self.options, self.lanes) if self.reuse is None else self.reuse
        corrected = CORRECTED[min(self.lanes, 2)] if self.corrected is None else self.corrected
        return Workload(self.options, self.layers, heads, self.batch_size, self.prompt_length, reuse, corrected)

    def traced(self, phase: str = "decode") -> Traced:
        """A phase's graph with its workload, for `times/step_time.py`."""
        self.texts_of(phase)
        return Traced(self.graphs[phase], self.load(), self.weight_bytes)

    @property
    def traced_one_lane(self) -> Traced:
        """The one-lane graph, whose products are also those of a full cache's step."""
        return self.traced("pre-decode" if "pre-decode" in self.graphs else "decode")

    @functools.cached_property
    def is_timed(self) -> bool:
        """Whether the decode step's time can be computed: a CUDA graph must be able to hold the step."""
        return bool(self.sites) and "decode" in self.graphs and is_captured(self.graphs["decode"])

    @functools.cached_property
    def spans(self) -> list[Span]:
        """Each launch of a decode step with its start and end; none where the step is not timed."""
        if not self.is_timed:
            return []
        kernels = kernels_of(self.traced(), self.device, self.prompt_length, self.batch_size, over_tiers)
        return simulated(kernels, self.device)[0]

    def check_timed(self) -> None:
        """Raise SpecacheError where the step is not timed."""
        if not self.is_timed:
            raise SpecacheError(
                f"method {self.options.method!r}: no time is computed for its decode step, because a CUDA graph cannot "
                "hold it"
            )

    def step(self, batch: int | None = None) -> ComputedStep:
        """The decode step. batch: rows, if not `batch_size`."""
        self.check_timed()
        return step_of(self.traced(), self.device, self.prompt_length, batch or self.batch_size)
