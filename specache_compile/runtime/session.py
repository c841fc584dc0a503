"""The session behind one Hugging Face cache: tiers, how far it has come, the views that stand for it, its copies."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from specache_compile.errors import RECOMPILE_LIMIT, HeldTensorError, SpecacheError, copy_failed, no_host_tier, warn
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.movement.copy_queue import CopyQueue
from specache_compile.kernels.movement.deferred import Deferred, Fetch, deferrable
from specache_compile.kernels.state.cursor import CURSOR_SIZE, QUEUE, new_cursor
from specache_compile.kernels.state.page_table import Pages, publish_table
from specache_compile.kernels.state.segments import of_rows, tokens_of
from specache_compile.kernels.state.stored_pairs import decoded
from specache_compile.lowering.cuda_graphs import RecordedSteps
from specache_compile.methods.field import LayerShape, LayerState
from specache_compile.model_key import PrefillKey
from specache_compile.options import MethodOptions
from specache_compile.passes.reading.sites import PARTS, Part
from specache_compile.rope_switch import RopeSwitch

from .draft_length import DraftLength
from .held import Crop, Edit, Handle, HeldTensor
from .records import Statistics
from .state import bytes_in_16_bits, fields_of, full_cache_bytes
from .tiers import Tiers
from .variant import selects


class Mode(Enum):
    """What the steps of a session are for, where its options draft."""

    PLAIN = "what the caller asks for"
    DRAFT = "drafting, which may approximate"
    VERIFY = "verifying a draft"


UNKNOWN = sys.maxsize


@dataclass
class Progress:
    """How far a session has come: what its next step starts from, beside the tiers.

    lengths: tokens that are cached of each row; they are the last of the columns.
    keys: of each row, the key of the model that filled it, as it was then.
    longest_calls: of each row, the most tokens that it had after a call, a crop later or not. Models whose RoPE follows
        the length of a call choose frequencies by it. UNKNOWN: a cache that this backend has not filled.
    length: columns that Hugging Face counts, those of the padding in front of a row too.
    guess: the speculative token [B, 1]; None where there is none.
    ready: of each row, whether its slots were chosen for the next decode step.
    padding: bool [B, 1, 1, C], which tokens are there; None where no step brought a mask that lengths cannot say.
    padded: whether the last step had one.
    joined: the rows were read apart, so that each has positions of its own.
    """

    lengths: tuple[int, ...]
    ready: tuple[bool, ...]
    keys: tuple[PrefillKey, ...]
    longest_calls: tuple[int, ...]
    length: int = 0
    guess: Tensor | None = None
    padding: Tensor | None = None
    padded: bool = False
    joined: bool = False

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def differ(self) -> bool:
        """Whether a row has fewer tokens than columns."""
        return any(length != self.length for length in self.lengths)


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
    """What one cache stands for.

    State is never made under the caller's inference mode: the copy queue's worker writes to the state outside of that
    mode.

    asked: the options that the cache was made under; those in force are the tiers'.
    weights: the model's.
    from_elsewhere: the session was filled by no graph (`hold`, `load`).
    version: counts the changes that no old view survives.
    view: the edited view that the tiers were last brought to, while no step has followed; it may be used again.
    moved: layers that another session has taken over, and their numbers there (`regroup.py`).
    rope_switch: of the model whose prefill it is; None where its frequencies are constant.
    one_length: why the model's graphs take rows of one length only; None where they take others.
    half_evicted: a step that drops pairs has started, and has not finished.
    capturable: a CUDA graph may hold a step; not where the host makes the copies.
    cursors: by the pages of a row's table, each with the cursors of all rows that there are places for. Behind those
        that there are it says that a row is dead: it has no tokens, and no pages.
    shown: the table of pages that the cursor has.
    told: what a person has been told of this cache.
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
        self.tiers = Tiers(options, layers, batch, prompt, ranks)
        self.progress = Progress((0,) * batch, (False,) * batch, (PrefillKey(),) * batch, (0,) * batch)
        self.weights: list[weakref.ref[Tensor]] = []
        self.from_elsewhere = False
        self.version = 0
        self.view: tuple[int, tuple[Edit, ...]] | None = None
        self.moved: dict[int, tuple[Any, int]] = {}
        self.mode = Mode.PLAIN
        self.drafted: Sequence[int] | None = None
        self.draft_length: DraftLength | None = None
        self.half_evicted = False
        self.rope_switch: RopeSwitch | None = None
        self.one_length: str | None = None
        self.capturable = True
        self.told: set[str] = set()
        self.anchors = [torch.empty(1, dtype=layer.dtype, device=layer.device) for layer in layers]
        self.start_anew()

    def start_anew(self) -> None:
        """A queue, recorded steps and counts of the session's own, as a new or a copied one needs."""
        device = self.layers[0].device
        self.queue = copy_stream.StreamCopies(device) if device.type == "cuda" else CopyQueue()
        self.recorded = RecordedSteps()
        self.cursors: dict[int, Tensor] = {}
        self.shown: Tensor | None = None
        self.statistics = Statistics(self.queue)
        self.new_cursor()
        self.deferred = self.new_deferred()
        self.recorded_at = self.tiers.places()
        self.tiers.belong_to(self)

    def new_cursor(self) -> None:
        """A cursor for the rows that there are, which names the queue, and their pages."""
        table, most = self.tiers.table, self.tiers.most_cursors
        pages = 0 if table is None else table.shape[1]
        if any(cursor.shape[0] != most for cursor in self.cursors.values()):
            self.queue.settle()  # recorded steps have their addresses, and copies read them
            self.recorded.clear()
            self.cursors.clear()
        if pages not in self.cursors:
            self.cursors[pages] = new_cursor(self.layers[0].device, most, pages)
        every = self.cursors[pages]
        every[self.tiers.batch :].zero_()
        every[:, QUEUE].fill_(self.queue.number)
        self.cursor, self.shown = every[: self.tiers.batch], None
        self.show_pages()

    def filled_up(self, rows: int) -> tuple[list[LayerState], Tensor]:
        """The state and the cursor of so many rows, of which those behind the ones that there are are dead."""
        if rows == self.tiers.batch:
            return self.state, self.cursor
        pages = self.cursor.shape[1] - CURSOR_SIZE
        return self.tiers.filled_up(rows), self.cursors[pages][:rows]

    def show_pages(self) -> None:
        """Bring the cursor's table up to date."""
        table = self.tiers.table
        if table is None or table is self.shown:
            return
        if self.cursor.shape != (self.tiers.batch, CURSOR_SIZE + table.shape[1]):
            self.queue.settle()  # copies read the one that was
            self.new_cursor()
            return
        self.cursor[:, CURSOR_SIZE:].copy_(table.pin_memory() if self.cursor.is_cuda else table, non_blocking=True)
        publish_table(self.cursor, table)
        self.shown = table
        self.statistics.bytes_by_tier = self.tiers.bytes_by_tier()

    def new_deferred(self) -> Deferred:
        """What its replays leave undone; it holds the session weakly, which must die with its cache."""
        own = weakref.ref(self)

        def fetches(rows: int | None) -> list[Fetch]:
            session = own()
            if session is None or not selects(session.options):
                return []
            return deferrable(*session.filled_up(session.tiers.batch if rows is None else rows))

        return Deferred(fetches)

    @property
    def options(self) -> MethodOptions:
        """Those in force."""
        return self.tiers.options

    @property
    def layers(self) -> list[LayerShape]:
        return self.tiers.layers

    @property
    def state(self) -> list[LayerState]:
        """The state tensors of each layer, by their fields' names."""
        return self.tiers.state

    @property
    def length(self) -> int:
        """Tokens that Hugging Face counts as cached."""
        return self.progress.length

    @contextlib.contextmanager
    def steps_for(self, mode: Mode, drafted: Sequence[int] | None = None) -> Iterator[None]:
        """The steps inside are for this. drafted: of each row, the tokens of a draft that is verified; behind them the
        row is only filled up. None: all."""
        before, self.mode, self.drafted = self.mode, mode, drafted
        try:
            yield
        finally:
            self.mode, self.drafted = before, None

    @torch.inference_mode(False)
    def make_room(self, tokens: int) -> None:
        """Bring the tiers to the options, and to the capacity, that `tokens` behind the cached ones need."""
        after = self.progress.longest + tokens
        if self.tiers.move_over(after, self.progress.lengths, self.progress.padding, self.drain):
            self.choose_again()
            self.note_memory()
        if self.tiers.reserve(self.progress.lengths, tokens, self.drain):
            self.note_memory()
        self.show_pages()

    def choose_again(self) -> None:
        """What was guessed and chosen for the next step is void."""
        self.progress.ready, self.progress.guess = (False,) * self.tiers.batch, None

    def note_memory(self) -> None:
        """After the state's tensors have changed: tell the statistics, and drop recorded steps that are now wrong.

        The statistics keep the tiers' sizes, which may be asked for when the session is gone. Where a tensor has moved,
        what was recorded over the old one is wrong.
        """
        places = self.tiers.places()
        if places != self.recorded_at:
            self.recorded.clear()
            self.recorded_at = places
        fields, statistics = self.tiers.fields, self.statistics
        # Copies from and to memory that could not be pinned are the host's work, of which a graph holds nothing.
        self.capturable = not self.cursor.is_cuda or all(host.is_pinned() for host in fields("host"))
        statistics.tallies = fields("tally")
        statistics.fetched, statistics.corrected = fields("fetched"), fields("corrected")
        stored = [state.get("host", state["slots"]) for state in self.state if "slots" in state]
        statistics.pair_bytes = [2 * x.shape[-1] * x.dtype.itemsize for x in stored]
        statistics.ranks = 1 if self.tiers.ranks is None else self.tiers.ranks.size()
        statistics.bytes_by_tier = self.tiers.bytes_by_tier()

    def drain(self) -> None:
        """Wait for all copies, also those that a recorded step has left to the next one; SpecacheError where one has
        failed."""
        self.settle()
        self.check_copies()

    def settle(self) -> None:
        """Wait for all copies, whatever has become of them."""
        self.deferred.make()
        self.queue.settle()

    def check_copies(self) -> None:
        """SpecacheError where a copy of this session is known to have failed."""
        if self.queue.error is not None:
            raise copy_failed(self.queue.error) from self.queue.error

    def advance(self, columns: int, tokens: Sequence[int]) -> None:
        """So many more columns are cached, and `tokens` of each row; views of the cache taken before are stale from
        here on."""
        progress = self.progress
        progress.length += columns
        progress.lengths = tuple(length + new for length, new in zip(progress.lengths, tokens, strict=True))
        progress.longest_calls = tuple(map(max, progress.longest_calls, progress.lengths))
        self.version += 1
        self.view = None
        self.statistics.bytes_to_host += self.tiers.host_bytes(sum(tokens)) // self.tiers.batch
        self.statistics.full_cache_bytes = bytes_in_16_bits(self.layers, self.tiers.batch, self.length)

    @torch.inference_mode(False)
    def replay(self, version: int, edits: tuple[Edit, ...]) -> None:
        """Bring the tiers to the view (`version`, `edits`) of the cache that is now being used."""
        self.check_copies()
        if self.half_evicted:
            raise evicted_half_way(self.options.method)
        done = self.edits_done(version, edits)
        if not edits:
            self.view = None
        for number, edit in enumerate(edits[done:], done + 1):
            self.drain()
            if isinstance(edit, Crop):
                self.crop(edit.length)
            else:
                self.select(edit.indices)
            self.version += 1
            self.view = (version, edits[:number])

    def edits_done(self, version: int, edits: tuple[Edit, ...]) -> int:
        """How many of a view's edits the tiers have had; HeldTensorError where the cache has gone on since."""
        if self.view is not None and self.view == (version, edits[: len(self.view[1])]):
            return len(self.view[1])
        if version != self.version:
            raise stale_cache()
        return 0

    def crop(self, length: int) -> None:
        """Keep the first `length` columns: each row loses as many of its newest tokens."""
        gone = self.length - length
        self.crop_to(length, [max(0, tokens - gone) for tokens in self.progress.lengths])

    @torch.inference_mode(False)
    def crop_rows(self, lengths: Sequence[int]) -> None:
        """Keep the first tokens of each row, so many; views of the cache taken before are stale from here on."""
        self.drain()
        self.crop_to(max(lengths), lengths)
        self.version += 1
        self.view = None

    def crop_to(self, columns: int, lengths: Sequence[int]) -> None:
        self.tiers.crop(lengths, self.progress.lengths)
        self.progress.length, self.progress.lengths = columns, tuple(lengths)
        self.choose_again()

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows`, in that order: reorder, repeat and select are all this."""
        if rows.numel() == self.tiers.batch and torch.equal(rows.cpu(), torch.arange(self.tiers.batch, device="cpu")):
            return
        self.tiers.select(rows)
        progress, kept = self.progress, rows.tolist()
        progress.lengths = tuple(progress.lengths[row] for row in kept)
        progress.ready = tuple(progress.ready[row] for row in kept)
        progress.keys = tuple(progress.keys[row] for row in kept)
        progress.longest_calls = tuple(progress.longest_calls[row] for row in kept)
        progress.guess, progress.padding = (
            None if tensor is None else tensor.index_select(0, rows.to(tensor.device))
            for tensor in (progress.guess, progress.padding)
        )
        self.new_cursor()
        self.note_memory()

    @torch.inference_mode(False)
    def leave_pages(self) -> None:
        """Have the tiers in one piece; no copy is under way."""
        self.tiers = self.tiers.in_one_piece(self.progress.lengths)
        self.new_cursor()
        self.note_memory()

    @torch.inference_mode(False)
    def fork(self, handle: Handle) -> Session:
        """A second session with copies of all tiers, for the view of the cache that `handle` has."""
        self.edits_done(handle.version, handle.edits)
        self.drain()
        other = copy.copy(self)
        other.tiers = self.tiers.copy()
        padding = self.progress.padding
        other.progress = replace(self.progress, padding=None if padding is None else padding.clone())
        other.moved, other.told = {}, set(self.told) - {UNCOMPILED}
        other.mode, other.draft_length = Mode.PLAIN, None
        other.start_anew()
        other.note_memory()
        return other

    def held(self, site: int, part: Part) -> HeldTensor:
        """What goes into HF's cache for one site's keys or values: shape [B, H, n, d], no storage."""
        shape = self.layers[site]
        held = HeldTensor(
            self.anchors[site],
            (self.tiers.batch, shape.heads, self.length, shape.head_dim),
            Handle(self, self.version, site, part),
        )
        torch._dynamo.maybe_mark_dynamic(held, (0, 2))
        return held

    def plain(self, site: int, part: Part) -> Tensor:
        """A plain copy of one site's keys or values [B, H, n, d], as they are held where all pairs are, zeros in front
        of shorter rows."""
        self.drain()
        layer = self.layers[site]
        whole = next((field.name for field in fields_of(self.options, layer) if field.has_all_pairs), None)
        if whole is None and self.tiers.has_no_host:
            raise no_host_tier("a copy of its keys and values")
        if whole is None:
            raise evicted(self.options.method)
        found = decoded(self.columns(self.tiers.pairs(site, whole)), layer.dtype, layer.head_dim)
        return found[:, :, :, PARTS.index(part)].to(layer.device, copy=True)

    def columns(self, pairs: Tensor | Pages) -> Tensor:
        """A tier's pairs [B, H, n, 2, d] as Hugging Face counts them."""
        if not self.progress.differ:
            return tokens_of(pairs, 0, self.length)
        rows = [
            torch.nn.functional.pad(tokens_of(of_rows(pairs, rows), 0, length), (0, 0, 0, 0, self.length - length, 0))
            for rows, length in self.tiers.runs(self.progress.lengths)
        ]
        return torch.cat(rows)

    def give_up(self, handle: Handle, why: str | None = None) -> Tensor:
        """A plain copy of the view that `handle` has, for a call whose graph could not be rewritten; the first warns.

        why: the reason; None: no compiled graph runs.
        """
        self.replay(handle.version, handle.edits)
        plain = self.plain(handle.site, handle.part)
        size = full_cache_bytes(self.layers, self.tiers.batch, self.length)
        message = went_uncompiled if why is None else functools.partial(went_exact, why)
        self.tell(UNCOMPILED, message(size, self.length, self.tiers.batch))
        return plain

    def tell(self, what: str, message: str) -> None:
        """Warn at the user's line, once of `what`."""
        if what not in self.told:
            self.told.add(what)
            warn(message)


# What a person is told once of a cache.
UNCOMPILED = "goes on uncompiled"
UNCAPTURED = "steps are not captured"
OTHER_OPTIONS = "made under other options"


def went_uncompiled(size: int, tokens: int, batch: int) -> str:
    return (
        f"no compiled graph ran this call, so the cache became plain keys and values, {size / 2**20:,.2f} MiB on the "
        f"device for {tokens:,} tokens x batch {batch}: no pair is lost, and none compressed any more. Either "
        f"{RECOMPILE_LIMIT}, or the cache went to an uncompiled model"
    )


def went_exact(why: str, size: int, tokens: int, batch: int) -> str:
    return (
        f"a graph that uses this cache could not be rewritten ({why}), so the cache became plain keys and values, "
        f"{size / 2**20:,.2f} MiB on the device for {tokens:,} tokens x batch {batch}: no pair is lost, and none "
        "compressed any more"
    )


def stale_cache() -> HeldTensorError:
    return HeldTensorError(
        "this cache has gone on since these keys and values were taken from it, and its tiers changed in place. "
        "To continue one prefix in two ways, copy.deepcopy(cache) before the first continuation."
    )


def evicted(method: str) -> SpecacheError:
    return SpecacheError(
        f"method {method!r} keeps only the pairs that its policy chose, each head its own: there are no keys and "
        "values of all tokens to copy, or to go on with uncompiled. Use a method that keeps them: specache, kivi, "
        f"kcache, offload or full. In the middle of a generation, {RECOMPILE_LIMIT}."
    )


def evicted_half_way(method: str) -> SpecacheError:
    return SpecacheError(
        f"a step of this cache was interrupted or failed, and method {method!r} had begun to drop pairs for it: what "
        "is kept is no longer what it would keep. Generate again with a new cache, or copy.deepcopy it before a step "
        "that may fail."
    )
