"""Facts about one captured graph: its sites, its phase, and where a call's arguments show its sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import tls
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._sympy.numbers import int_oo

from specache_compile.compat import model_of
from specache_compile.errors import OptionError, SpecacheError
from specache_compile.methods.field import LayerShape
from specache_compile.options import MethodOptions
from specache_compile.passes.absorb import absorb
from specache_compile.passes.phase import DECODE, EXTEND, PREFILL, Phase
from specache_compile.passes.reading.find_attention import find_attention
from specache_compile.passes.reading.joined_copies import joined_copies
from specache_compile.passes.reading.known_sizes import fill_in_sizes
from specache_compile.passes.reading.local_shards import local_shards
from specache_compile.passes.reading.nodes import ancestors_of, value_of
from specache_compile.passes.reading.plain_vmaps import plain_vmaps
from specache_compile.passes.reading.sites import Found, LeftAlone, Site
from specache_compile.rope_switch import RopeSwitch, rope_switch
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.ranks import ranks_of, splits_heads
from specache_compile.runtime.rewritten import selects
from specache_compile.runtime.symbols import SymbolReader


@dataclass(frozen=True)
class Captured:
    """A captured graph and its facts, before anything is rewritten.

    fakes: Dynamo's fake tensor of each argument; the inputs that Dynamo passes to a backend are real.
    held: positions of arguments that are held tensors.
    padding: position of the padding mask.
    pasts: positions of each site's cached keys and values.
    frequencies: position of the RoPE frequencies that turn each site's keys; None if there are none.
    absorbed: latent attentions over Hugging Face's cache of latents.
    ranks: the ranks that the model's KV heads are split over.
    """

    graph_module: GraphModule
    options: MethodOptions
    mode: str | None
    phase: Phase
    fakes: tuple[Any, ...]
    held: tuple[int, ...]
    found: Found
    padding: int | None
    pasts: tuple[tuple[int, int], ...]
    frequencies: tuple[int | None, ...]
    symbols: SymbolReader
    rope_switch: RopeSwitch
    absorbed: tuple[Node, ...]
    ranks: int
    # The graph's own size symbols, by name.
    sizes: dict[str, torch.SymInt] = field(default_factory=dict)

    @property
    def placeholders(self) -> list[Node]:
        return list(self.graph_module.graph.find_nodes(op="placeholder"))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(node.name for node in self.placeholders)

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.found.sites

    @property
    def left_alone(self) -> tuple[LeftAlone, ...]:
        return self.found.left_alone

    @property
    def is_recognised(self) -> bool:
        """Whether the graph contains an attention."""
        return bool(self.sites or self.left_alone or self.found.latents)

    @property
    def fake_mode(self) -> Any:
        return next((fake.fake_mode for fake in self.fakes if isinstance(fake, FakeTensor)), None)

    @functools.cached_property
    def layers(self) -> list[LayerShape]:
        """Shape of each site's KV heads."""
        keys = [value_of(site.k) for site in self.sites]
        return [
            LayerShape(site.heads, site.head_dim, k.dtype, k.device, site.number, site.biased_keys, self.ranks)
            for site, k in zip(self.sites, keys, strict=True)
        ]

    @property
    def batch(self) -> Any:
        """The batch size, a symbol of Dynamo or a number."""
        return value_of(self.sites[0].k).shape[0]

    @property
    def is_causal(self) -> bool:
        """Whether its masks hide only later tokens and padding."""
        return all(site.mask is None for site in self.sites)

    def free_size(self, name: str, hint: int, least: int = 2) -> torch.SymInt:
        """A symbol for a size that no argument shows, 2 or more: torch treats 0 and 1 as constants.

        It lets one rewrite serve every size, so nothing may be guarded on it.
        """
        if name not in self.sizes:
            shape_env, source = self.fake_mode.shape_env, ConstantSource(name)
            symbol = shape_env.create_symbol(max(hint, least), source, DimDynamic.DYNAMIC)
            if least > 2:
                shape_env.constrain_symbol_range(symbol, compiler_min=least, compiler_max=int_oo)
            self.sizes[name] = shape_env.create_symintnode(symbol, hint=max(hint, least), source=source)
        return self.sizes[name]

    @property
    def tokens(self) -> Any:
        """The number of new tokens, a symbol or a number."""
        return value_of(self.sites[0].k).shape[2]

    @property
    def past(self) -> Any:
        """The number of cached tokens, a symbol or a number."""
        return self.fakes[self.held[0]].shape[2] if self.held else 0


def capture(graph_module: GraphModule, options: MethodOptions, mode: str | None) -> Captured:
    """Read a graph. No past: prefill; a past and one token: decode; a past and several tokens: extend.

    SpecacheError if it takes a held cache that it could not read.
    """
    fill_in_sizes(graph_module)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values, model = [value_of(node) for node in placeholders], traced_model()
    ranks = ranks_of(values) if splits_heads(model) else None  # before `local_shards` replaces the DTensors
    reason = gradients(values) or local_shards(graph_module)
    fakes = tuple(value_of(node) for node in placeholders)
    held = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, HeldTensor))
    if reason is None:
        plain_vmaps(graph_module)
        joined_copies(graph_module)
        names = frozenset(placeholders[i].name for i in held)
        found = find_attention(graph_module, names, frozenset(options.exact_layers))
        found = without_misfits(found, options)
        absorbed = absorb(graph_module, found.latents)
    else:
        found, absorbed = Found(left_alone=(LeftAlone("every site", reason),)), ()
    sites = found.sites
    pasts = [node for site in sites for node in (site.past_k, site.past_v) if node is not None]
    if pasts and len(pasts) != 2 * len(sites):
        raise SpecacheError("some layers of this cache are filled and others are empty. Use one cache for one model")
    if sites and len(pasts) != len(held):
        raise unmatched_held(found.left_alone)
    named = {node.name: i for i, node in enumerate(placeholders)}
    check_numbers(options.exact_layers, found, model)
    return Captured(
        graph_module, options, mode or options.mode, phase_of(sites), fakes, held, found,
        padding=named.get(found.padding or ""),
        pasts=tuple((named[s.past_k.name], named[s.past_v.name]) for s in sites if s.past_k and s.past_v),
        frequencies=tuple(named.get(site.turned_by or "") for site in sites),
        symbols=SymbolReader(fakes), rope_switch=rope_switch(getattr(model, "config", None)), absorbed=absorbed,
        ranks=1 if ranks is None else ranks.size(),
    )  # fmt: skip


def traced_model() -> torch.nn.Module | None:
    """The model that Dynamo is tracing; None if there is none."""
    translator = getattr(tls, "current_tx", None)
    return None if translator is None else model_of(translator.output.root_tx.f_locals)


def check_numbers(exact: Sequence[int], found: Found, model: Any) -> None:
    """OptionError if exact_layers lists a number beyond this graph's attentions and the whole model's layers."""
    text = getattr(getattr(model, "config", None), "get_text_config", lambda: None)()
    layers = getattr(text, "num_hidden_layers", None)
    attentions = len(found.sites) + len(found.latents) + len(found.left_alone)
    if isinstance(layers, int) and max(exact, default=-1) >= max(layers, attentions):
        raise OptionError(f"option exact_layers={[*exact]}: the model has {layers} layers, from 0")


def without_misfits(found: Found, options: MethodOptions) -> Found:
    """Leave the sites alone that the method cannot serve."""
    layout = getattr(options, "layout", None)
    ahead = layout is not None and layout.is_quantised and selects(options)
    misfits = [site for site in found.sites if ahead and site.mask is not None and follows(site.mask)]
    why = (
        "its mask depends on the token (an indexer), so prefetched pairs would be those of the token before. Use the "
        "defaults of setting and speculate"
    )
    kept = [site for site in found.sites if site not in misfits]
    return Found(
        tuple(replace(site, number=number) for number, site in enumerate(kept)),
        (*found.left_alone, *(LeftAlone(site.attention.name, why, by_model=True) for site in misfits)),
        found.latents,
    )


def follows(mask: Node) -> bool:
    """Whether a mask depends on the tokens' contents, like an indexer's: it comes from a linear layer or, before a
    graph break, as a float mask or as two masks. A single Boolean mask from there is padding."""
    sources = [mask, *ancestors_of(mask)]
    of_one = isinstance(value_of(mask).shape[2], int)
    is_part = of_one and not any(node.target is F.embedding for node in mask.graph.nodes)
    inputs = [value_of(node) for node in sources if node.op == "placeholder"]
    masks = [x for x in inputs if isinstance(x, Tensor) and x.dim() == 4]
    made_before = len(masks) > 1 or any(x.is_floating_point() for x in masks)
    return (is_part and made_before) or any(node.target is F.linear for node in sources)


def phase_of(sites: Sequence[Site]) -> Phase:
    if not sites or sites[0].past_k is None:
        return PREFILL
    tokens = value_of(sites[0].q).shape[2]
    return DECODE if isinstance(tokens, int) and tokens == 1 else EXTEND


def gradients(inputs: Sequence[Any]) -> str | None:
    """Why no site of a graph with gradients may be rewritten; None if it has none."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return "gradients are enabled. Call the model under torch.no_grad() or torch.inference_mode()"
    return None


def unread_held(captured: Captured) -> set[int]:
    """The held inputs that a graph without sites reads only the length of.

    Graph breaks produce such graphs. If a held input is read, the cache becomes plain when no call of the model would
    be rewritten. Otherwise it is an error, which keeps the cache for a call that is.
    """
    graph, placeholders = captured.graph_module.graph, captured.placeholders
    unread = {i for i in captured.held if not any(u.users or u.op == "output" for u in placeholders[i].users)}
    lasting = bool(captured.left_alone) and all(item.by_model for item in captured.left_alone)
    if len(unread) < len(captured.held) and not lasting:
        raise unmatched_held(captured.left_alone)
    for dead in [user for i in unread for user in placeholders[i].users]:
        graph.erase_node(dead)
    captured.graph_module.recompile()
    return unread


def unmatched_held(left_alone: Sequence[Any]) -> SpecacheError:
    reasons = "; ".join(sorted({item.reason for item in left_alone})) or "no attention was found in this graph"
    return SpecacheError(
        f"this cache is held by the specache backend, but the graph that uses it could not be rewritten: {reasons}. "
        "Call the model as in the prefill, or pass a plain copy: specache_compile.materialize(cache)."
    )
