"""One graph that Dynamo captured, read: its sites, its phase, and where its sizes stand when it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.symbolic_convert import tls
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from specache_compile.errors import SpecacheError
from specache_compile.kernels.state.cursor import CURSOR_SIZE
from specache_compile.kernels.state.segments import SEGMENT
from specache_compile.methods.field import Field, LayerShape
from specache_compile.options import MethodOptions
from specache_compile.passes.absorb import absorb
from specache_compile.passes.phase import DECODE, EXTEND, PREFILL, Phase
from specache_compile.passes.pipeline import ESSENTIAL
from specache_compile.passes.reading.find_attention import find_attention
from specache_compile.passes.reading.joined_copies import joined_copies
from specache_compile.passes.reading.known_sizes import fill_in_sizes
from specache_compile.passes.reading.local_shards import local_shards
from specache_compile.passes.reading.nodes import ancestors_of, value_of
from specache_compile.passes.reading.plain_vmaps import plain_vmaps
from specache_compile.passes.reading.sites import Found, LeftAlone, Site
from specache_compile.rope_switch import RopeSwitch, rope_switch
from specache_compile.runtime.held import HeldTensor
from specache_compile.runtime.state import bucket
from specache_compile.runtime.symbols import SymbolReader, new_size
from specache_compile.runtime.variant import selects


@dataclass(frozen=True)
class Captured:
    """A graph of Dynamo's, and what is known of it before anything is rewritten.

    fakes: Dynamo's own, of each argument; the inputs that it passes to a backend are real.
    held: positions of the arguments that are held tensors.
    padding: position of the argument that says which tokens are there.
    pasts: positions of each site's cached keys and values.
    frequencies: position of the argument that each site's keys are `turned_by`; None where there is none.
    rope_switch: of the model's RoPE; None where its frequencies are constant.
    absorbed: latent attentions that read Hugging Face's cache of latents as it is.
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
    rope_switch: RopeSwitch | None = None
    absorbed: tuple[Node, ...] = ()
    # The graph's own sizes, by what they count.
    sizes: dict[str, torch.SymInt] = field(default_factory=dict)

    @property
    def placeholders(self) -> list[Node]:
        return list(self.graph_module.graph.find_nodes(op="placeholder"))

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments'."""
        return tuple(node.name for node in self.placeholders)

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.found.sites

    @property
    def left_alone(self) -> tuple[LeftAlone, ...]:
        return self.found.left_alone

    @property
    def is_recognised(self) -> bool:
        """Whether an attention was found in it."""
        return bool(self.sites or self.left_alone or self.found.latents)

    @property
    def fake_mode(self) -> Any:
        return next((fake.fake_mode for fake in self.fakes if isinstance(fake, FakeTensor)), None)

    @property
    def layers(self) -> list[LayerShape]:
        """The KV heads of each site."""
        keys = [value_of(site.k) for site in self.sites]
        return [
            LayerShape(site.heads, site.head_dim, k.dtype, k.device, site.number, site.biased_keys)
            for site, k in zip(self.sites, keys, strict=True)
        ]

    @property
    def batch(self) -> Any:
        """The batch size, a symbol of Dynamo's or a number."""
        return value_of(self.sites[0].k).shape[0]

    @property
    def is_causal(self) -> bool:
        """Whether its masks hide nothing from a token but later ones, and padding."""
        return all(site.mask is None for site in self.sites)

    def free_size(self, name: str, hint: int, least: int = 2) -> torch.SymInt:
        """A symbol of the graph's own."""
        if name not in self.sizes:
            self.sizes[name] = new_size(self.fake_mode.shape_env, name, hint, least)
        return self.sizes[name]

    def free_capacity(self, fields: Sequence[Field]) -> torch.SymInt:
        """Tokens that the state of any session of these fields has room for: a symbol of the graph's own.

        With the symbol one rewrite serves every capacity. No argument of a call shows the symbol, so nothing may be
        guarded on it (`capacity_is_free`); a lowered graph reads the symbol off a tensor that has it as a size.
        """
        unit = SEGMENT if any(field.on_host for field in fields) else 1
        return unit * self.free_size(f"capacity in {unit}", self.bucket // unit)

    @property
    def bucket(self) -> int:
        """Tokens that the first call's state has room for."""
        return bucket(self.symbols.hint(self.past) + self.symbols.hint(self.tokens))

    def free_columns(self) -> torch.SymInt:
        """Columns of a cursor with a table of any number of pages, likewise: it is the cursor's own size."""
        return self.free_size("columns", CURSOR_SIZE + self.bucket // SEGMENT, CURSOR_SIZE + 1)

    def free_pages(self) -> torch.SymInt:
        """Pages that there are of any session's pool, likewise."""
        return self.free_size("pages", 32)

    def unpadded(self, arguments: Sequence[Any]) -> bool:
        """Whether a prefill has a padding mask that is all ones, as transformers before 5.18 gives every prefill.

        The host waits for the answer, once a generation. A fake mask, as `explain` has it, counts as all ones.
        """
        if self.phase.has_past or self.padding is None:
            return False
        padding = arguments[self.padding]
        return isinstance(padding, FakeTensor) or bool(padding.all())

    @property
    def tokens(self) -> Any:
        """The number of new tokens, likewise."""
        return value_of(self.sites[0].k).shape[2]

    @property
    def past(self) -> Any:
        """The number of cached tokens, likewise."""
        return self.fakes[self.held[0]].shape[2] if self.held else 0


def capture(graph_module: GraphModule, options: MethodOptions, mode: str | None) -> Captured:
    """Read a graph: no past is a prefill, past and one token a decode, past and several an extend.

    SpecacheError where it takes a held cache that nothing here could read.
    """
    fill_in_sizes(graph_module)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    reason = reason_to_leave_alone([value_of(node) for node in placeholders], options) or local_shards(graph_module)
    fakes = tuple(value_of(node) for node in placeholders)
    held = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, HeldTensor))
    if reason is None:
        plain_vmaps(graph_module)
        joined_copies(graph_module)
        names = frozenset(placeholders[i].name for i in held)
        found = find_attention(graph_module, names, frozenset(options.exact_layers))
        found = without(found, functools.partial(misfit, options))
        absorbed = absorb(graph_module, found.latents)
    else:
        found, absorbed = Found(left_alone=(LeftAlone("every site", reason),)), ()
    sites = found.sites
    pasts = [node for site in sites for node in (site.past_k, site.past_v) if node is not None]
    if pasts and len(pasts) != 2 * len(sites):
        raise SpecacheError("some layers of this cache are filled and others empty: use one cache for one model")
    if sites and len(pasts) != len(held):
        raise unmatched_held(found.left_alone)
    index = {node: i for i, node in enumerate(placeholders)}
    named = {node.name: i for node, i in index.items()}
    return Captured(
        graph_module, options, mode or options.mode, phase_of(sites), fakes, held, found,
        padding=named.get(found.padding or ""),
        pasts=tuple((index[s.past_k], index[s.past_v]) for s in sites if s.past_k is not None and s.past_v is not None),
        frequencies=tuple(named.get(site.turned_by or "") for site in sites),
        symbols=SymbolReader(fakes), rope_switch=switch_of_traced(), absorbed=absorbed,
    )  # fmt: skip


def switch_of_traced() -> RopeSwitch | None:
    """That of the model whose call Dynamo traces now; None where it traces none."""
    translator = getattr(tls, "current_tx", None)
    model = None if translator is None else translator.output.root_tx.f_locals.get("self")
    config = getattr(model, "config", None)
    return None if config is None else rope_switch(config)


def without(found: Found, misfit: Callable[[Site], str | None]) -> Found:
    """Of the sites those for which there is no reason to leave them alone."""
    told = [(site, misfit(site)) for site in found.sites]
    kept = (site for site, reason in told if reason is None)
    left_alone = (LeftAlone(site.attention.name, reason, by_model=True) for site, reason in told if reason is not None)
    return Found(
        tuple(replace(site, number=number) for number, site in enumerate(kept)),
        (*found.left_alone, *left_alone),
        found.latents,
    )


def misfit(options: MethodOptions, site: Site) -> str | None:
    """Why a method cannot keep what a site needs."""
    layout = getattr(options, "layout", None)
    ahead = layout is not None and layout.is_quantised and selects(options)
    if ahead and site.mask is not None and follows(site.mask):
        return (
            "its mask shows each token other tokens, by what the token is (an indexer), and pairs chosen ahead would "
            "be those of the token before: take the defaults of correct and speculate"
        )
    return None


def follows(mask: Node) -> bool:
    """Whether a mask depends on what the tokens are, and not only on where they stand: a linear layer is behind it, or,
    of one new token, it comes as numbers from before a graph break, where there may have been one. Truth values from
    there are padding: indexers add theirs to the scores."""
    behind = [mask, *ancestors_of(mask)]
    of_one = isinstance(value_of(mask).shape[2], int)
    is_part = of_one and not any(node.target is F.embedding for node in mask.graph.nodes)
    made_before = any(node.op == "placeholder" and is_float_mask(value_of(node)) for node in behind)
    return (is_part and made_before) or any(node.target is F.linear for node in behind)


def is_float_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()


def phase_of(sites: Sequence[Site]) -> Phase:
    if not sites or sites[0].past_k is None:
        return PREFILL
    tokens = value_of(sites[0].q).shape[2]
    return DECODE if isinstance(tokens, int) and tokens == 1 else EXTEND


def reason_to_leave_alone(inputs: Sequence[Any], options: MethodOptions) -> str | None:
    """Why no site of a graph may be rewritten, whatever it holds."""
    disabled = [name for name in ESSENTIAL if name in options.disable_passes]
    if disabled:
        return f"pass {disabled[0]} is disabled"
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return "gradients are enabled: call the model under torch.no_grad() or torch.inference_mode()"
    return None


def drop_unread_held(captured: Captured) -> list[int]:
    """Drop held inputs that a graph without sites takes only for their length; returns the inputs that remain.

    A graph break makes such graphs. A held input that is read is an error where another call would have been rewritten:
    the cache stays as it is for that call. Where none would, the cache is to become plain.
    """
    graph, placeholders = captured.graph_module.graph, captured.placeholders
    dropped = [i for i in captured.held if not any(u.users or u.op == "output" for u in placeholders[i].users)]
    lasting = bool(captured.left_alone) and all(item.by_model for item in captured.left_alone)
    if len(dropped) < len(captured.held) and not lasting:
        raise unmatched_held(captured.left_alone)
    for node in (placeholders[i] for i in dropped):
        for dead in (*node.users, node):
            graph.erase_node(dead)
    captured.graph_module.recompile()
    return [i for i in range(len(placeholders)) if i not in dropped]


def unmatched_held(left_alone: Sequence[Any]) -> SpecacheError:
    reasons = "; ".join(sorted({item.reason for item in left_alone})) or "no attention was found in this graph"
    return SpecacheError(
        f"this cache is held by the specache backend, but the graph that now uses it could not be rewritten: "
        f"{reasons}. Go on the way the cache was filled, or give a plain copy: "
        "specache_compile.materialize(cache)."
    )
