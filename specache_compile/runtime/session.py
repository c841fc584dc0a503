"""The state behind one Hugging Face cache: its tiers, its length, its copies in flight, its next guess."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from specache_compile.errors import (
    SpecacheError,
    SpecacheWarning,
    copy_failed,
    evicted,
    evicted_half_way,
    no_host_memory,
    no_host_tier,
    stale_cache,
    went_exact,
    went_uncompiled,
)
from specache_compile.kernels.memory.host_memory import allowance, grow_ahead
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.movement.copy_queue import CopyQueue
from specache_compile.kernels.movement.deferred import Deferred, Fetch, deferrable
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT, QUEUE, new_cursor, publish
from specache_compile.kernels.state.segments import SEGMENT, tokens_of
from specache_compile.kernels.state.stored_pairs import decoded
from specache_compile.lowering.cuda_graphs import RecordedSteps
from specache_compile.methods.field import Cropped, LayerShape, LayerState
from specache_compile.methods.low_bit import LowBitOptions, window_from_host
from specache_compile.options import MethodOptions
from specache_compile.passes.phase import EXTEND, WIDENED, Phase
from specache_compile.passes.plan import Input
from specache_compile.passes.reading.local_shards import local
from specache_compile.passes.reading.sites import Part
from specache_compile.runtime.draft_length import DraftLength

from .break_even import stays_in_16_bits
from .held import Crop, Edit, Handle, HeldTensor
from .memory import check_memory, within_memory
from .ranks import everyones, ranks_here
from .records import Statistics
from .state import (
    MEASURE,
    allocate,
    bucket,
    bytes_by_tier,
    copied,
    fields_of,
    full_cache_bytes,
    host_bytes,
    moved_over,
    room,
)
from .variant import Variant, phases, selects, variant_of


def options_at(
    options: MethodOptions, layers: Sequence[LayerShape], batch: int, prompt: int, tokens: int
) -> MethodOptions:
    """The options in force for a cache of `tokens` tokens that began with a prompt of `prompt`: with the budget that it
    gives, and the bits that fit; the 16-bit ones, where the tokens are too few to gain."""
    return in_force(fixed_options(options, layers, batch, prompt), layers, batch, tokens)


def fixed_options(options: MethodOptions, layers: Sequence[LayerShape], batch: int, prompt: int) -> MethodOptions:
    """The options as a prompt and its rows fix them."""
    return within_memory(options.for_prompt(prompt), layers, batch, prompt)


def in_force(
    fixed: MethodOptions, layers: Sequence[LayerShape], batch: int, tokens: int, ranks: ProcessGroup | None = None
) -> MethodOptions:
    """Of options that a prompt has fixed those that hold for so many tokens. Ranks decide alike, by lengths alone."""
    return fixed.in_16_bits if stays_in_16_bits(fixed, layers, batch, tokens, room=ranks is None) else fixed


def session_of(cache: Any) -> Session | None:
    """The session behind a held cache of Hugging Face's; None where it is plain. Of several, the first layers'."""
    return next(iter(sessions_of(cache)), None)


def sessions_of(cache: Any) -> list[Session]:
    """The sessions behind a held cache of Hugging Face's, in its layers' order: several where a graph break cuts the
    model, none where the cache is plain."""
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    handles = (tensor.handle for tensor in keys if isinstance(tensor, HeldTensor))
    return list(dict.fromkeys(handle.now.session for handle in handles if handle is not None))


class Session:
    """All tiers of one cache. `length` tokens are cached; `version` counts the changes that no old view survives.

    `guess` [B, 1] is the speculative token; `slots_ready`: the slots were chosen for the next decode step. `asked` are
    the options that the cache was made under, `options` those in force (`options_at`), `pending_options` those that it
    has yet to move over to. `padding` bool [B, 1, 1, C], where a step brought one. `ranks`: the process group that its
    model is split over, of whose KV heads these are this rank's. State is never made under the caller's inference mode:
    the copy queue's worker writes to it outside of that.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        options: MethodOptions,
        layers: list[LayerShape],
        batch: int,
        prompt: int,
        ranks: ProcessGroup | None = None,
    ) -> None:
        self.asked = options
        self.ranks = ranks
        fixed = fixed_options(options, layers, batch, prompt)
        check_memory(fixed, layers, batch, prompt)
        self.options = in_force(fixed, layers, batch, prompt, ranks)
        self.pending_options: MethodOptions | None = fixed if fixed != self.options else None
        self.layers = layers
        # The model's, by which a saved session knows it again.
        self.weights: list[weakref.ref[Tensor]] = []
        # It was filled by no graph (`hold`, `load`).
        self.from_elsewhere = False
        # Layers that another session has taken over, and their numbers there.
        self.moved: dict[int, tuple[Session, int]] = {}
        self.batch = batch
        self.length = 0
        self.version = 0
        # The edited view that the tiers were last brought to, while no step has followed: it may be used again.
        self.view: tuple[int, tuple[Edit, ...]] | None = None
        self.guess: Tensor | None = None
        self.padding: Tensor | None = None
        # Whether the last step had a padding mask; whether a person has been told that other options are in force.
        self.padded = False
        self.told_of_options = False
        self.slots_ready = False
        # With the option verify: whether steps may approximate, whether a step verifies a draft, and how many tokens
        # the next one has.
        self.drafting = self.verifying = False
        self.draft_length: DraftLength | None = None
        # A step has started that evicts pairs, and has not finished.
        self.half_evicted = False
        # A person was told that this cache goes on uncompiled.
        self.told_uncompiled = False
        # And that its steps are not captured.
        self.told_uncaptured = False
        # Tokens that there are places for, and of those the ones that the host tier has memory for; and what of both
        # the state's tensors have.
        self.capacity = self.room = 0
        self.allocated = (0, 0)
        self.state: list[LayerState] = []
        self.queue = self.new_queue()
        self.recorded = RecordedSteps()
        self.deferred = self.new_deferred()
        self.capturable = True
        self.statistics = Statistics(self.queue)
        self.anchors = [torch.empty(1, dtype=layer.dtype, device=layer.device) for layer in layers]
        self.cursor = new_cursor(layers[0].device)
        self.cursor[QUEUE] = self.queue.number

    def new_queue(self) -> CopyQueue | copy_stream.StreamCopies:
        device = self.layers[0].device
        return copy_stream.StreamCopies(device) if device.type == "cuda" else CopyQueue()

    def new_deferred(self) -> Deferred:
        """What its replays leave undone; it holds the session weakly, which must die with its cache."""
        own = weakref.ref(self)

        def fetches() -> list[Fetch]:
            session = own()
            if session is None or not selects(session.options):
                return []
            return deferrable(session.state, session.cursor)

        return Deferred(fetches)

    def begin(self, tokens: int, padding: Tensor | None) -> None:
        """Before a graph runs that adds `tokens` to the cache: room for them, the cursor and the padding."""
        after = self.length + tokens
        self.move_over(after)
        self.capacity_for(after)
        self.reserve()
        self.point(tokens)
        self.see(padding, after)

    def start_evicting(self) -> None:
        """From here until `finish` a policy drops pairs, layer by layer; without a host tier rounding does."""
        self.half_evicted = bool(self.fields("kept")) or self.has_no_host

    @property
    def has_no_host(self) -> bool:
        """Whether its low-bit tier is all that it has of the tokens behind its window."""
        return isinstance(self.options, LowBitOptions) and not self.options.host_tier

    def finish(self, tokens: int, phase: Phase) -> None:
        """After it: `tokens` more are cached, and views of the cache taken before are stale."""
        self.slots_ready = phase.speculates and selects(self.options)
        self.advance(tokens)
        self.half_evicted = False

    def phases(self, captured: Phase, causal: bool) -> tuple[Phase, ...]:
        """The phases that a graph captured in this one runs now; `causal`: its masks hide nothing but padding besides.
        With the option verify nothing but a draft approximates: any other step of one token is an extend. Under
        lookup a draft's verification is no extend but a widened decode."""
        if self.options.lookup:
            widened = captured is EXTEND and causal and self.verifying
            return (WIDENED,) if widened else phases(captured, self.options)
        if captured is EXTEND and self.has_no_host:
            raise no_host_tier("a call of several tokens behind cached ones")
        exact = captured.one_token and self.options.verify is not None and not self.drafting
        return (EXTEND,) if exact else phases(captured, self.options)

    def variant(self, phase: Phase, unpadded: bool) -> Variant:
        """What a graph of this phase must be rewritten for, to run on this session; `unpadded` as `Variant` has it."""
        return variant_of(phase, self.options, unpadded, self.capacity)

    @torch.inference_mode(False)
    def move_over(self, tokens: int) -> None:
        """From 16 bits to the tiers that were asked for, where `tokens` are enough to gain; layer by layer.

        Stopped half way, it goes on from there with the next step.
        """
        pending = self.pending_options
        if pending is None or not self.state:
            return
        grows = tokens > self.capacity and self.ranks is None  # ranks decide alike, by lengths alone
        if stays_in_16_bits(pending, self.layers, self.batch, tokens, room=grows):
            return
        assert isinstance(pending, LowBitOptions)
        self.drain()
        for number, layer in enumerate(self.layers):
            size = (self.batch, self.length, self.padding, self.allocated[1])
            self.state[number] = moved_over(self.state[number], pending, layer, *size)
        self.options, self.pending_options = pending, None
        self.slots_ready, self.guess = False, None
        self.note_memory()

    def capacity_for(self, tokens: int) -> None:
        """Raise the capacity to the bucket of `tokens`, and the room to theirs; `reserve` makes the tensors follow."""
        self.capacity = max(self.capacity, bucket(tokens))
        self.room = max(self.room, room(tokens))

    @torch.inference_mode(False)
    def reserve(self) -> None:
        """Make the growing tensors as large as capacity and room say; what they hold stays.

        Layer by layer, so that one layer's tiers at most are there twice. SpecacheError, before anything has changed,
        where the host tier would outgrow its budget.
        """
        if self.allocated == (self.capacity, self.room):
            return
        try:
            self.check_host_memory(self.room)
        except SpecacheError:
            self.capacity, self.room = self.allocated
            raise
        self.drain()
        size, moved = (self.batch, self.capacity, self.room), False
        for number, layer in enumerate(self.layers):
            old = self.state[number] if self.allocated[0] else None
            new = allocate(self.options, layer, *size, old)
            if old is None:
                self.state.append(new)
            else:
                self.state[number] = new
                moved = moved or any(new[name] is not old[name] for name in new)
        grows, self.allocated = self.allocated[0] > 0, (self.capacity, self.room)
        self.note_memory(moved)
        if grows and self.cursor.is_cuda:
            self.reserve_ahead(room(self.room + 1))

    def reserve_ahead(self, tokens: int) -> None:
        """Have the host tier's memory for so many tokens pinned on a thread; not where it would outgrow its budget, nor
        where other ranks share that."""
        held, needed = (host_bytes(self.options, self.layers, self.batch, size) for size in (self.room, tokens))
        if self.ranks is None and needed <= allowance(held, self.options.host_memory):
            for host in self.fields("host"):
                grow_ahead(host, tokens // SEGMENT)

    def check_host_memory(self, tokens: int) -> None:
        """SpecacheError, which names so many tokens, where the host tier would outgrow its budget at this room, here or
        on another rank."""
        held = sum(host[: self.allocated[1] // SEGMENT].nbytes for host in self.fields("host"))
        needed = host_bytes(self.options, self.layers, self.batch, self.room)
        asked = self.options.host_memory
        here = ranks_here(self.ranks)
        every = everyones(self.ranks, (needed, allowance(held, asked, here), here))
        needed, allowed, here = max(every, key=lambda rank: rank[0] - rank[1])
        if needed > allowed:
            raise no_host_memory(needed, allowed, tokens, self.batch, asked, here)

    def fields(self, name: str) -> list[Tensor]:
        """One state tensor of each layer that has it."""
        return [layer[name] for layer in self.state if name in layer]

    def note_memory(self, moved: bool = True) -> None:
        """After the state's tensors have changed: let the statistics know the tiers' sizes, which may be asked for when
        the session is gone; and where tensors have `moved`, drop what was recorded over the old ones."""
        if moved:
            self.recorded.clear()
        # Copies from and to memory that could not be pinned are the host's work, of which a graph holds nothing.
        self.capturable = not self.cursor.is_cuda or all(host.is_pinned() for host in self.fields("host"))
        self.statistics.tallies = self.fields("tally")
        self.statistics.fetched = self.fields("fetched")
        self.statistics.corrected = self.fields("corrected")
        stored = [state.get("host", state["slots"]) for state in self.state if "slots" in state]
        self.statistics.pair_bytes = [2 * x.shape[-1] * x.dtype.itemsize for x in stored]
        self.statistics.ranks = 1 if self.ranks is None else self.ranks.size()
        self.statistics.bytes_by_tier = bytes_by_tier(self.options, self.layers, self.state, self.room)

    def drain(self) -> None:
        """Wait for all copies, those that a recorded step has left to the next one among them; SpecacheError where one
        has failed."""
        self.deferred.make()
        self.queue.settle()
        self.check_copies()

    def check_copies(self) -> None:
        """SpecacheError where a copy of this session is known to have failed."""
        if self.queue.error is not None:
            raise copy_failed(self.queue.error) from self.queue.error

    def point(self, tokens: int) -> None:
        """Write the cursor for a graph that adds `tokens` to the cache."""
        low_bit, next_low_bit = (self.options.low_bit_length(n) for n in (self.length, self.length + tokens))
        for place, value in ((LENGTH, self.length), (LOW_BIT, low_bit), (NEXT_LOW_BIT, next_low_bit)):
            self.cursor[place].fill_(value)  # an assignment would copy it from host memory, and stop the host
        if self.cursor.is_cuda:
            publish(self.cursor, self.length)

    @torch.inference_mode(False)
    def see(self, padding: Tensor | None, tokens: int) -> None:
        """Take over which of the first `tokens` tokens are there, from an attention mask [B, ≥ tokens]; outside of the
        graph, so that a recorded step finds it where it was. None: all are, those too that were no candidates when the
        slots were chosen."""
        if padding is None:
            self.slots_ready = self.slots_ready and not self.padded
            self.padded = False
            return
        self.padded = True
        shape = (self.batch, 1, 1, self.capacity)
        if self.padding is None or self.padding.shape != shape:
            self.padding = torch.zeros(shape, dtype=torch.bool, device=self.layers[0].device)
        self.padding[:, 0, 0, :tokens].copy_(padding[:, :tokens])

    def advance(self, tokens: int) -> None:
        """`tokens` more are cached; views of the cache taken before are stale from here on."""
        self.length += tokens
        self.version += 1
        self.view = None
        self.statistics.bytes_to_host += self.host_bytes(tokens)
        self.statistics.full_cache_bytes = full_cache_bytes(self.layers, self.batch, self.length)
        if self.cursor.is_cuda and tokens > copy_stream.WRITE_THROUGH:
            copy_stream.release_staging()

    def host_bytes(self, tokens: int) -> int:
        """Bytes of so many tokens' pairs in the host tier."""
        return sum(host[0].nbytes // SEGMENT * tokens for host in self.fields("host"))

    def bind(self, inputs: Sequence[Input], arguments: Sequence[Any]) -> list[Any]:
        """The values of a rewritten graph's inputs: the caller's arguments, and this session's state."""
        values: list[Any] = []
        for source in inputs:
            if source.source == "argument":
                values.append(local(arguments[source.argument]))
            elif source.source == "state":
                values.append(self.state[source.site][source.field])
            else:
                values.append(getattr(self, source.source))  # the cursor, the padding, the guess
        return values

    @torch.inference_mode(False)
    def replay(self, version: int, edits: tuple[Edit, ...]) -> None:
        """Bring the tiers to the view (`version`, `edits`) of the cache that is now being used."""
        self.check_copies()
        if self.half_evicted:
            raise evicted_half_way(self.options.method)
        if self.view is not None and self.view == (version, edits):
            return
        if version != self.version:
            raise stale_cache()
        for edit in edits:
            self.drain()
            if isinstance(edit, Crop):
                self.crop(edit.length)
            else:
                self.select(edit.indices)
            self.version += 1
        self.view = (version, edits) if edits else None

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, each field as it says."""
        low_bit, low_bit_before = (self.options.low_bit_length(n) for n in (length, self.length))
        for layer, state in zip(self.layers, self.state, strict=True):
            for field in fields_of(self.options, layer):
                if field.on_crop is not None:
                    field.on_crop(state, Cropped(length, low_bit, low_bit_before))
        self.length = length
        self.slots_ready, self.guess = False, None

    def select(self, indices: Tensor) -> None:
        """Keep the batch rows `indices`, in that order: reorder, repeat and select are all this."""
        if indices.numel() == self.batch and torch.equal(indices.cpu(), torch.arange(self.batch, device="cpu")):
            return
        for number, layer in enumerate(self.layers):
            self.state[number] = copied(self.state[number], self.options, layer, self.room, indices)
        for name in ("guess", "padding"):
            rows = getattr(self, name)
            if rows is not None:
                setattr(self, name, rows.index_select(0, indices.to(rows.device)))
        self.batch = indices.numel()
        self.note_memory()

    @torch.inference_mode(False)
    def fork(self, handle: Handle) -> Session:
        """A second session with copies of all tiers, for the view of the cache that `handle` has."""
        if handle.version != self.version:
            raise stale_cache()
        self.drain()
        other = copy.copy(self)
        other.moved = {}
        pairs = zip(self.state, self.layers, strict=True)
        other.state = [copied(state, self.options, layer, self.room) for state, layer in pairs]
        for layer, state in zip(other.layers, other.state, strict=True):
            for field in fields_of(other.options, layer):
                if field.tier == MEASURE:
                    state[field.name].zero_()
        other.queue = self.new_queue()
        other.recorded, other.deferred, other.told_uncompiled = RecordedSteps(), other.new_deferred(), False
        other.drafting, other.verifying, other.draft_length = False, False, None
        other.padding = None if self.padding is None else self.padding.clone()
        other.statistics = Statistics(other.queue)
        other.note_memory()
        other.cursor = self.cursor.clone()
        other.cursor[QUEUE] = other.queue.number
        return other

    def held(self, site: int, part: Part) -> HeldTensor:
        """What goes into HF's cache for one site's keys or values: shape [B, H, n, d], no storage."""
        shape = self.layers[site]
        held = HeldTensor(
            self.anchors[site],
            (self.batch, shape.heads, self.length, shape.head_dim),
            Handle(self, self.version, site, part),
        )
        torch._dynamo.maybe_mark_dynamic(held, (0, 2))
        return held

    def plain(self, site: int, part: Part) -> Tensor:
        """A plain copy of one site's keys or values [B, H, n, d], as they are held where all pairs are."""
        self.drain()
        layer = self.layers[site]
        whole = next((field.name for field in fields_of(self.options, layer) if field.has_all_pairs), None)
        if whole is None and self.has_no_host:
            raise no_host_tier("a copy of its keys and values")
        if whole is None:
            raise evicted(self.options.method)
        pairs = tokens_of(self.state[site][whole], 0, self.length)
        found = decoded(pairs[:, :, :, int(part == "values")], layer.dtype, layer.head_dim)
        return found.to(layer.device, copy=True)

    def give_up(self, handle: Handle, why: str | None = None) -> Tensor:
        """The plain copy that a call goes on with whose graph could not be rewritten, and `why` (None: that no compiled
        graph runs), of the view that `handle` has; the first one warns."""
        self.replay(handle.version, handle.edits)
        plain = self.plain(handle.site, handle.part)
        if not self.told_uncompiled:
            self.told_uncompiled = True
            size = full_cache_bytes(self.layers, self.batch, self.length)
            message = went_uncompiled if why is None else functools.partial(went_exact, why)
            warnings.warn(message(size, self.length, self.batch), SpecacheWarning, stacklevel=2)
        return plain

    def abandon_step(self) -> None:
        """After a step that raised: wait out its copies, empty the slots, and bring back what it pushed out of the
        window, so that it can be taken again. Under eviction it cannot, once it has started: some layers have dropped
        pairs for it, and counted its attention. Nor can it without a host tier."""
        self.queue.settle()
        copy_stream.release_staging()
        self.deferred.drop()
        for slot_index in self.fields("slot_index"):
            slot_index.fill_(-1)
        self.slots_ready, self.guess = False, None
        if isinstance(self.options, LowBitOptions) and not self.has_no_host:
            for state in self.state:
                window_from_host(state, self.options.low_bit_length(self.length), self.length)
