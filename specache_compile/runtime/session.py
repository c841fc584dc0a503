"""The session of one Hugging Face cache: its tiers, its progress, the views that represent it, and its copies."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from specache_compile.errors import RECOMPILE_LIMIT, HeldTensorError, SpecacheError
from specache_compile.kernels.state.cursor import CURSOR_SIZE, HostRecord, attach, new_cursor
from specache_compile.lowering.cuda_graphs import RecordedSteps
from specache_compile.methods.field import LayerShape, LayerState
from specache_compile.model_key import PrefillKey
from specache_compile.options import MethodOptions
from specache_compile.passes.reading.sites import PARTS, Part
from specache_compile.rope_switch import RopeSwitch

from .held import Crop, Edit, Handle, HeldTensor
from .records import Statistics, record_of
from .state import full_cache_bytes
from .tiers import Tiers

# A version of a session, and edits since then.
View = tuple[int, tuple[Edit, ...]]


@dataclass
class Progress:
    """The progress of a session: the state that its next step starts from, apart from the tiers.

    lengths: cached tokens of each row; they are the last columns.
    keys: for each row, the key of the model that filled it, at that time.
    length: columns that Hugging Face counts, padding in front of rows included.
    speculative: the speculative token [B, 1]; None if there is none.
    ready: for each row, whether its slots were selected for the next decode step.
    padding: bool [B, 1, 1, C], True for tokens; None unless a step had a mask that lengths cannot express.
    padded: whether the last step had such a mask.
    joined: rows were prefilled separately, so each has its own positions.
    """

    lengths: tuple[int, ...]
    ready: tuple[bool, ...]
    keys: tuple[PrefillKey, ...]
    length: int = 0
    speculative: Tensor | None = None
    padding: Tensor | None = None
    padded: bool = False
    joined: bool = False

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def mask(self) -> Tensor | None:
        """`padding`, if the last step had such a mask."""
        return self.padding if self.padded else None

    @property
    def differ(self) -> bool:
        """Whether a row has fewer tokens than columns."""
        return any(length != self.length for length in self.lengths)


def session_of(cache: Any) -> Session | None:
    """The session of a held cache; None if it is plain. Of several sessions, that of the first layers."""
    return next(iter(sessions_of(cache)), None)


def held_layers(cache: Any) -> list[Any]:
    """The layers of a cache that are held."""
    return [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), HeldTensor)]


def sessions_of(cache: Any) -> list[Session]:
    """The sessions of a held cache, in the order of its layers: several after a graph break, none for a plain cache."""
    handles = (layer.keys.handle for layer in held_layers(cache))
    return list(dict.fromkeys(handle.session for handle in handles if handle is not None))


def agreed_session(handles: Sequence[tuple[int, Handle | None]]) -> Session:
    """The session that all these keys and values, by layer, belong to, brought to their view; SpecacheError if they
    differ in session, version or edits."""
    first: Any = handles[0][1]
    for site, handle in handles:
        if handle is None or handle.session is not first.session or handle.site != site:
            raise mixed_caches()
        if (handle.version, handle.edits) != (first.version, first.edits):
            raise mixed_caches()
    session: Session = first.session
    session.replay(first.version, first.edits)
    return session


def required_session(cache: Any) -> Session:
    """The session of a held cache, brought to the cache's view; SpecacheError if the cache is plain."""
    held = enumerate(held_layers(cache))
    handles = [(site, part.handle) for site, layer in held for part in (layer.keys, layer.values)]
    if not handles:
        raise plain_already()
    return agreed_session(handles)


class Session:
    """The state of one cache.

    State is never created in the caller's inference mode, since later steps write to it outside of that mode.

    requested: the options that the cache was made with; the effective ones are in `tiers`.
    weights: of the model.
    version: counts the changes that make earlier views stale.
    view: the edited view that the tiers were brought to, until the next step; it may be used again.
    rope_switch: of the model that prefilled.
    one_length: why the model's graphs require rows of one length; None if they do not.
    half_evicted: a step that drops pairs has started and not finished.
    cursors: one buffer for each page-table width, sized for all rows. Rows after the batch are zero (inactive).
    host_record: the host's record of its steps.
    """

    cursor: Tensor

    @torch.inference_mode(False)
    def __init__(
        self,
        options: MethodOptions,
        layers: list[LayerShape],
        batch: int,
        prompt: int,
        ranks: ProcessGroup | None = None,
    ) -> None:
        self.requested = options
        self.tiers = Tiers(options, layers, batch, prompt, ranks)
        self.progress = Progress((0,) * batch, (False,) * batch, (PrefillKey(),) * batch)
        self.weights: list[weakref.ref[Tensor]] = []
        self.version = 0
        self.view: View | None = None
        self.drafting = False
        self.half_evicted = False
        self.rope_switch = RopeSwitch()
        self.one_length: str | None = None
        self.anchors = [torch.empty(1, dtype=layer.dtype, device=layer.device) for layer in layers]
        self.reset_runtime()

    def reset_runtime(self) -> None:
        """Create the host's record, the recorded steps and the counts of a new or copied session."""
        self.host_record = HostRecord()
        self.recorded = RecordedSteps()
        self.cursors: dict[int, Tensor] = {}
        self.statistics = Statistics(self.layers[0].device)
        self.recorded_at = self.tiers.moved
        self.refresh()

    def refresh(self) -> None:
        """Update cursor and statistics after a change of the tiers' rows."""
        self.update_cursor(rows_changed=True)
        self.update_memory()

    def update_cursor(self, rows_changed: bool = False) -> None:
        """Write the page table into the cursor of the current rows and pages."""
        tiers, table = self.tiers, self.tiers.table
        width, most = table.shape[1], tiers.most_rows
        if table is self.host_record.table and not rows_changed:
            return
        if rows_changed or self.cursor.shape != (tiers.batch, CURSOR_SIZE + width):
            if self.cursors:
                tiers.drain()  # copies read the old cursor, and recorded steps contain its address
            if any(cursor.shape[0] != most for cursor in self.cursors.values()):
                self.recorded.clear()
                self.cursors.clear()
            if width not in self.cursors:
                self.cursors[width] = new_cursor(self.layers[0].device, most, width)
                if self.cursors[width].is_cuda:
                    attach(self.cursors[width], self.host_record)
            every = self.cursors[width]
            every[tiers.batch :].zero_()
            tiers.clear_inactive()
            self.cursor, self.host_record.table = every[: tiers.batch], None
        self.cursor[:, CURSOR_SIZE:].copy_(staged(table, self.cursor), non_blocking=True)
        self.host_record.table = table
        self.statistics.bytes_by_tier = tiers.bytes_by_tier()

    def padded_to(self, rows: int) -> tuple[list[LayerState], Tensor]:
        """State and cursor of so many rows; those after the batch are inactive."""
        if rows == self.tiers.batch:
            return self.state, self.cursor
        pages = self.cursor.shape[1] - CURSOR_SIZE
        return self.tiers.padded_to(rows), self.cursors[pages][:rows]

    @property
    def options(self) -> MethodOptions:
        """The effective options."""
        return self.tiers.options

    @property
    def final_options(self) -> MethodOptions:
        """The options once the session is long enough to be compressed (`min_context`)."""
        return self.tiers.pending or self.options

    @property
    def layers(self) -> list[LayerShape]:
        return self.tiers.layers

    @property
    def state(self) -> list[LayerState]:
        """The state tensors of each layer, by field name."""
        return self.tiers.state

    @property
    def length(self) -> int:
        """Tokens that Hugging Face counts as cached."""
        return self.progress.length

    @contextlib.contextmanager
    def drafting_steps(self) -> Iterator[None]:
        """The steps inside are drafts, which may approximate although the option verify is set."""
        self.drafting = True
        try:
            yield
        finally:
            self.drafting = False

    @torch.inference_mode(False)
    def reserve(self, tokens: int, masked: bool = True) -> None:
        """Grow the tiers as `tokens` new tokens require. masked: whether the step hides some tokens."""
        self.tiers.reserve(self.progress.lengths, tokens, masked)
        if self.tiers.moved != self.recorded_at:
            self.update_memory()
        self.update_cursor()

    def forget_selection(self) -> None:
        """Forget the selected slots and the speculative token of the next step."""
        self.progress.ready, self.progress.speculative = (False,) * self.tiers.batch, None

    def update_memory(self) -> None:
        """Update the statistics after state tensors have changed, and drop recorded steps if a tensor has moved.

        The statistics keep the tiers' sizes for the time after the session.
        """
        if self.tiers.moved != self.recorded_at:
            self.recorded.clear()
            self.recorded_at = self.tiers.moved
        fields, statistics = self.tiers.fields, self.statistics
        statistics.fetched, statistics.corrected = fields("fetched"), fields("corrected")
        stored = [state.get("host", state["slots"]) for state in self.state if "fetched" in state]
        statistics.pair_bytes = [2 * x.shape[-1] * x.dtype.itemsize for x in stored]
        statistics.ranks = 1 if self.tiers.ranks is None else self.tiers.ranks.size()
        statistics.bytes_by_tier = self.tiers.bytes_by_tier()

    @torch.inference_mode(False)
    def replay(self, version: int, edits: tuple[Edit, ...]) -> None:
        """Apply the edits of the view (`version`, `edits`) that is now used to the tiers."""
        if self.half_evicted:
            raise SpecacheError(
                f"a step of this cache failed or was interrupted after method {self.options.method!r} had started to "
                "drop pairs for it, so the cache is no longer valid. Generate again with a new cache, or call "
                "copy.deepcopy(cache) before a step that may fail."
            )
        done = self.edits_done(version, edits)
        if not edits:
            self.view = None
        for number, edit in enumerate(edits[done:], done + 1):
            self.tiers.drain()
            view = (version, edits[:number])
            if isinstance(edit, Crop):
                self.crop(edit.length)  # if it is interrupted, it is applied again
                self.version, self.view = self.version + 1, view
            else:
                self.select(edit.indices.tolist(), view)

    def edits_done(self, version: int, edits: tuple[Edit, ...]) -> int:
        """Number of a view's edits that the tiers already have; HeldTensorError if the cache has been continued
        since."""
        if self.view is not None and self.view == (version, edits[: len(self.view[1])]):
            return len(self.view[1])
        if version != self.version:
            raise HeldTensorError(
                "these keys and values are stale: their cache has been continued or edited since they were read from "
                "it. To continue one prefix in two ways, call copy.deepcopy(cache) before the first continuation."
            )
        return 0

    def crop(self, length: int) -> None:
        """Keep the first `length` columns: each row loses as many of its newest tokens."""
        gone = self.length - length
        kept = tuple(max(0, tokens - gone) for tokens in self.progress.lengths)
        self.tiers.crop(kept, self.progress.lengths)
        ready = (False,) * self.tiers.batch
        self.progress = replace(self.progress, length=length, lengths=kept, ready=ready, speculative=None)

    def select(self, rows: list[int], view: View) -> None:
        """Keep the batch rows `rows`, in that order, for reorder, repeat and select: the edit that leads to `view`."""
        if rows == list(range(self.tiers.batch)):
            self.version, self.view = self.version + 1, view
            return
        before, tiers, padding = self.progress, self.tiers, self.progress.padding
        progress = replace(
            progress_of([(self, row) for row in rows]),
            length=before.length, padded=before.padded, joined=before.joined,
            padding=None if padding is None else padding[rows],
        )  # fmt: skip
        made = tiers.selected(rows)
        # In one statement: an interrupted selection has happened or not, and is not applied twice.
        self.tiers, self.progress, self.version, self.view = made, progress, self.version + 1, view
        tiers.reset(tiers.batch)
        self.refresh()

    @torch.inference_mode(False)
    def fork(self, handle: Handle) -> Session:
        """A second session for the view of `handle`, which shares the pages and has copies of all other state."""
        self.edits_done(handle.version, handle.edits)
        self.tiers.drain()
        padding = self.progress.padding
        return self.derived(
            self.tiers.copy(), replace(self.progress, padding=None if padding is None else padding.clone())
        )

    @torch.inference_mode(False)
    def derived(self, tiers: Tiers, progress: Progress) -> Session:
        """A session like this one with other tiers and progress. Its counts start at zero."""
        made = copy.copy(self)
        made.tiers, made.progress = tiers, progress
        made.reset_runtime()
        made.statistics.full_cache_bytes = full_cache_bytes(made.layers, tiers.batch, progress.length, itemsize=2)
        return made

    def held(self, site: int, part: Part) -> HeldTensor:
        """The held tensor of one site's keys or values for Hugging Face's cache: shape [B, H, n, d], without
        storage."""
        shape = self.layers[site]
        return HeldTensor(
            self.anchors[site],
            (self.tiers.batch, shape.heads, self.length, shape.head_dim),
            Handle(self, self.version, site, part),
        )

    def plain(self, site: int, part: Part) -> Tensor:
        """A plain copy of one site's keys or values [B, H, n, d]. Shorter rows have zeros in front."""
        self.tiers.drain()
        with self.tiers.lock:
            found = self.tiers.all_pairs(site, self.progress.lengths, self.length)
            return found[:, :, :, PARTS.index(part)].to(self.layers[site].device, copy=True)

    def to_plain(self, handle: Handle, why: str | None = None) -> Tensor:
        """A plain copy of the view of `handle`, for an uncompiled call or a graph that could not be rewritten; warns.

        why: the reason why it could not be rewritten; None for an uncompiled call.
        """
        self.replay(handle.version, handle.edits)
        plain = self.plain(handle.site, handle.part)
        size = full_cache_bytes(self.layers, self.tiers.batch, self.length)
        self.warn_once(became_plain(why, size, self.length, self.tiers.batch), "cache became plain")
        return plain

    def warn_once(self, message: str, key: str = "") -> None:
        """Warn at the user's line, once for the model of this cache."""
        record_of([weight for ref in self.weights if (weight := ref()) is not None]).warn_once(message, key)


def staged(values: Tensor, cursor: Tensor) -> Tensor:
    """Values for a cursor, in memory from which a copy does not block the host; a fake tensor has none."""
    return values.pin_memory() if cursor.is_cuda and not isinstance(values, FakeTensor) else values


# A session and the number of one of its rows.
SessionRow = tuple[Session, int]


def progress_of(rows: Sequence[SessionRow]) -> Progress:
    """The progress of these rows. A row without a speculative token is not ready."""
    lengths = tuple(session.progress.lengths[row] for session, row in rows)
    tokens = [None if s.progress.speculative is None else s.progress.speculative[row : row + 1] for s, row in rows]
    known = next((one for one in tokens if one is not None), None)
    speculative = None
    if known is not None:
        speculative = torch.cat([torch.zeros_like(known) if one is None else one for one in tokens])
    ready = tuple(
        session.progress.ready[row] and (known is None or one is not None)
        for (session, row), one in zip(rows, tokens, strict=True)
    )
    keys = tuple(session.progress.keys[row] for session, row in rows)
    return Progress(lengths, ready, keys, max(lengths, default=0), speculative, joined=True)


def became_plain(why: str | None, size: int, tokens: int, batch: int) -> str:
    cause, advice = (
        "no compiled graph ran this call",
        f"Pass the cache to the compiled model only. If you did: {RECOMPILE_LIMIT}",
    )
    if why is not None:
        cause = f"a graph that uses this cache could not be rewritten ({why})"
        advice = "Call the model as in the prefill, or continue uncompiled from specache_compile.materialize(cache)"
    return (
        f"{cause}, so the cache became plain keys and values, {size / 2**20:,.2f} MiB on the device for {tokens:,} "
        f"tokens x batch {batch}. No pair is lost, but the cache is no longer compressed. {advice}"
    )


def plain_already() -> SpecacheError:
    return SpecacheError(
        "this cache has no tokens, or plain tensors already, which the specache backend does not hold. Prefill it, or "
        "call hold(cache, model) first"
    )


def mixed_caches() -> SpecacheError:
    return SpecacheError(
        "the keys and values in this cache come from different caches, from different states of one, or from a model "
        "that a graph break splits. Edit a cache only by its methods crop, reorder_cache, batch_repeat_interleave and "
        "batch_select_indices. Remove graph breaks (TORCH_LOGS=graph_breaks prints them)"
    )
