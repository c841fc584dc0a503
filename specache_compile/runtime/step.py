"""One step of a session: opened, run, and finished or undone.

`with opened(session, tokens, padding) as step` reserves memory and writes cursor and padding.
`step.run(graph, arguments)` runs a captured graph's variants on the session's state.
`step.fill(pairs)` stores pairs that were computed elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from specache_compile.errors import SpecacheError, no_host_tier
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state.cursor import CURSOR_SIZE, LENGTH
from specache_compile.lowering.row_buckets import filled_up, first_rows, row_bucket
from specache_compile.methods import METHODS
from specache_compile.methods.field import LayerState
from specache_compile.passes.phase import EXTEND, PREFILL, Phase
from specache_compile.passes.reading.local_shards import local
from specache_compile.passes.recipe import operands

from .rewritten import Rewritten, phases, selects, variant_of
from .session import Progress, Session, staged
from .state import full_cache_bytes

# What a pre-decode writes in a layer, and its fetch starts from.
CHOSEN = ("slots", "slot_index", "selected")


@contextlib.contextmanager
def opened(session: Session, tokens: int, padding: Tensor | None, causal: bool = False) -> Iterator[Step]:
    """A step that adds `tokens` to a session's cache.

    padding: [B, ≥ n + tokens], True for tokens; None if there is no padding.
    causal: the graph's masks hide only later tokens and padding.

    If the body raises, the session is as before the step, which can be repeated. Under eviction, and without a host
    tier, it cannot be repeated once it has started.
    """
    step = Step(session, tokens)
    with session.tiers.lock:
        try:
            step.begin(padding, causal)
            yield step
        except BaseException:
            step.abandon()
            raise


class Step:
    """A step under way.

    front: for each row, the new tokens that are padding in front of its first token.
    by_lengths: the padding mask equals the rows' lengths.
    ran: the phases that have run.
    inside: seconds spent in lowered graphs so far.
    """

    def __init__(self, session: Session, tokens: int) -> None:
        self.session, self.tokens = session, tokens
        self.front = (0,) * session.tiers.batch
        self.by_lengths = False
        self.ran: list[Phase] = []
        self.inside = 0.0

    @torch.inference_mode(False)
    def begin(self, padding: Tensor | None, causal: bool) -> None:
        if self.session.tiers.compresses_at(self.session.progress.longest + self.tokens):
            compress(self.session)
        self.session.reserve(self.tokens, masked=padding is not None)
        self.update_padding(padding, causal)
        self.write_cursor()
        progress = self.session.progress
        self.session.tiers.find_sinks(progress.mask, progress.lengths, self.stops)

    @property
    def new_tokens(self) -> list[int]:
        """New tokens of each row, without padding."""
        return [self.tokens - absent for absent in self.front]

    @property
    def stops(self) -> list[int]:
        """Tokens of each row after the step."""
        return [length + new for length, new in zip(self.session.progress.lengths, self.new_tokens, strict=True)]

    def write_cursor(self) -> None:
        """Write the cursor."""
        session, lengths = self.session, self.session.progress.lengths
        rows = [
            (length - absent, *map(session.options.low_bit_length, (length, stop)))
            for length, absent, stop in zip(lengths, self.front, self.stops, strict=True)
        ]
        if len(set(rows)) > 1:
            values = staged(torch.tensor(rows), session.cursor)
            session.cursor[:, :CURSOR_SIZE].copy_(values, non_blocking=True)
        else:
            for place, value in enumerate(rows[0]):
                session.cursor[:, place].fill_(value)  # an assignment would copy from host memory, and block the host
        if session.cursor.is_cuda:
            session.host_record.lengths = tuple(row[LENGTH] for row in rows)

    def update_padding(self, padding: Tensor | None, causal: bool) -> None:
        """Write the padding mask into the session's buffer, at the address that recorded steps read.

        None means no padding, so tokens that the previous step hid become visible again. If a mask only has padding in
        front of rows, and the method allows rows of different lengths, it becomes these lengths.
        """
        progress, tiers = self.session.progress, self.session.tiers
        if progress.differ and not causal:
            raise other_mask()
        front = None
        if padding is not None and causal and METHODS[tiers.options.method].rows_differ:
            front = padding_in_front(padding, progress.lengths, progress.length, self.tokens)
        if padding is None or front is not None:
            self.front, self.by_lengths = front or self.front, padding is not None
            if progress.padded:
                self.session.forget_selection()
            progress.padded = False
            return
        if progress.differ:
            raise other_mask()
        before = progress.mask if any(progress.ready) else None  # under which slots were selected
        known = padding[:, None, None, : progress.length]
        if before is not None and not torch.equal(before[..., : progress.length], known.to(before)):
            self.session.forget_selection()
        progress.padded = True
        shape = (tiers.batch, 1, 1, tiers.capacity)
        if progress.padding is None or progress.padding.shape != shape:
            progress.padding = torch.zeros(shape, dtype=torch.bool, device=tiers.layers[0].device)
        after = progress.length + self.tokens
        progress.padding[:, 0, 0, :after].copy_(padding[:, :after])

    def phases(self, captured: Phase) -> tuple[Phase, ...]:
        """The phases that a graph captured in the phase `captured` runs now.

        With the option verify only a draft approximates: any other step of one token runs as an extend.
        """
        session, options = self.session, self.session.options
        if captured == EXTEND and not options.host_tier:
            raise no_host_tier("a call of several tokens after the prefill")
        exact = captured.one_token and options.drafts and not session.drafting
        return (EXTEND,) if exact else phases(captured, options)

    def graphs_to_run(self, graph: Any, arguments: Sequence[Any]) -> list[Rewritten]:
        """The rewritten graphs to run: that of the phase, after a pre-decode if slots or speculative token are
        missing."""
        captured, progress, tiers = graph.captured, self.session.progress, self.session.tiers
        front = self.front if self.by_lengths else None

        def rewritten(phase: Phase) -> Rewritten:
            variant = variant_of(captured, phase, tiers.options, front, arguments, tiers.capacity)
            return graph.rewrites.compiled_for(variant, arguments)

        *before, phase = self.phases(captured.phase)
        last = rewritten(phase)
        self.session.one_length = reason_for_one_length(captured.is_causal, last)
        if progress.differ or progress.joined:
            check_positions(progress, last)
            if self.session.rope_switch.misfit(self.stops):
                raise SpecacheError(
                    f"these rows cannot run in one call: {self.session.rope_switch.reason()}. Separate them with "
                    "specache_compile.split(cache)"
                )
        chosen = all(progress.ready) and not (last.reads_speculative and progress.speculative is None)
        return [*(rewritten(earlier) for earlier in before if not chosen), last]

    def run(self, graph: Any, arguments: Sequence[Any]) -> list[Any]:
        """The outputs of the captured graph, with held tensors for the cache."""
        *before, last = self.graphs_to_run(graph, arguments)
        self.begin_run()
        for rewritten in before:
            self.run_pre_decode(graph, rewritten, arguments)
        outputs = self.run_graph(graph, last, arguments)
        self.finish()
        for position, (site, part) in last.held_outputs.items():
            outputs[position] = self.session.held(site, part)
        return outputs

    def begin_run(self) -> None:
        """Note that from here on a policy may drop pairs, and rounding loses them without a host tier.

        Everything that runs is compiled and checked before.
        """
        session = self.session
        session.half_evicted = bool(session.tiers.fields("kept")) or not session.options.host_tier

    def run_pre_decode(self, graph: Any, rewritten: Rewritten, arguments: Sequence[Any]) -> None:
        """Run a pre-decode. Rows that already have slots and a speculative token keep these. The caller's tensors that
        the graph writes to, such as a recurrent state, are afterwards as before."""
        session, progress = self.session, self.session.progress
        whole = progress.speculative is not None or not rewritten.speculates  # a missing one is missing for every row
        rows = [row for row, is_ready in enumerate(progress.ready) if is_ready and whole]
        chosen = [{name: state[name][rows] for name in CHOSEN} for state in session.state] if rows else []
        speculative = progress.speculative
        sources = (rewritten.inputs[place] for place in rewritten.writes)
        written = [arguments[source.argument] for source in sources if source.source == "argument"]
        before = [value.clone() for value in written]
        try:
            self.run_graph(graph, rewritten, arguments)
        finally:
            for value, earlier in zip(written, before, strict=True):
                value.copy_(earlier)
        if not rows:
            return
        session.tiers.drain()
        for state, kept in zip(session.state, chosen, strict=True):
            for name, value in kept.items():
                state[name][rows] = value
        if speculative is not None and progress.speculative is not None:
            progress.speculative = progress.speculative.clone()
            progress.speculative[rows] = speculative[rows]

    def run_graph(self, graph: Any, rewritten: Rewritten, arguments: Sequence[Any]) -> list[Any]:
        """Run one rewritten graph on the session's state, keep its speculative token, and return the other outputs."""
        session = self.session
        captures = rewritten.capture and rewritten not in graph.uncaptured
        rows = self.rows_recorded(graph, rewritten, arguments) if captures else session.tiers.batch
        inputs = self.inputs_of(rewritten, arguments, rows)
        if rewritten.rows is not None:
            inputs = filled_up(inputs, rewritten.rows, session.tiers.batch, rows)
        start = time.perf_counter()
        if captures:
            give_up = functools.partial(graph.stop_capturing, rewritten)
            device, shape = session.cursor.device, (rows, session.cursor.shape[1])
            outputs = session.recorded.run(rewritten.run, inputs, rewritten.stays, device, give_up, shape)
            session.statistics.replays = session.recorded.replays
        else:
            outputs = list(rewritten.run(*inputs))
        self.inside += time.perf_counter() - start
        self.ran.append(rewritten.variant.phase)
        if rewritten.rows is not None:
            outputs = first_rows(outputs, rewritten.rows, session.tiers.batch)
        session.progress.speculative = outputs.pop() if rewritten.speculates else None
        return outputs

    def rows_recorded(self, graph: Any, rewritten: Rewritten, arguments: Sequence[Any]) -> int:
        """Rows of the CUDA graph: those of the bucket if inactive rows may pad the batch, else the batch."""
        live, dims, holds = self.session.tiers.batch, rewritten.rows, graph.captured.symbols.holds
        rows = live if dims is None else row_bucket(live, self.session.tiers.most_rows)
        if dims is None or not all(holds(each, arguments, {dims.number: rows}) for each in dims.assumed):
            return live
        return rows

    def inputs_of(self, rewritten: Rewritten, arguments: Sequence[Any], rows: int) -> list[Any]:
        """The inputs of a rewritten graph: the caller's arguments, and the session's state for so many rows."""
        progress, (state, cursor) = self.session.progress, self.session.padded_to(rows)
        own = {"cursor": cursor, "padding": progress.padding, "speculative": progress.speculative}
        if DTensor in set(map(type, arguments)):
            arguments = [local(value) for value in arguments]
        every: list[Any] = [arguments, own, *state]
        return [every[place][key] for place, key in rewritten.places]

    def fill(self, pairs: Iterable[Sequence[Tensor]]) -> None:
        """Store each site's new keys and values [B, H, T, d], with the ops of a prefill."""
        session, frequencies = self.session, self.session.tiers.frequencies
        padding = session.progress.mask
        with self.filling() as states:
            for site, (keys, values) in enumerate(pairs):
                state = states[site]
                given = {"k": keys.contiguous(), "v": values.contiguous(), "padding": padding, "cursor": session.cursor}
                for call in METHODS[session.options.method].recipe(session.options, site).stores:
                    tensors: dict[str, Any] = {operand: state[field] for operand, field in call.state.items()}
                    if call.turned and state[call.turned].shape[2]:
                        tensors["frequencies"] = frequencies[site]
                    op = getattr(torch.ops.specache, call.op)
                    op(*operands(call.op, {**given, **tensors, **call.settings}))

    @contextlib.contextmanager
    def filling(self) -> Iterator[list[LayerState]]:
        """Within it, other code writes to the layers' state what a prefill would."""
        self.begin_run()
        yield self.session.state
        self.ran.append(PREFILL)
        self.finish()

    def finish(self) -> None:
        """Count the tokens as cached. Earlier views of the cache become stale."""
        session, progress, tiers = self.session, self.session.progress, self.session.tiers
        chosen = self.ran[-1].before is not None and selects(session.options)
        progress.ready = (chosen,) * tiers.batch
        session.statistics.bytes_to_host += tiers.host_bytes(sum(self.new_tokens))
        # In one statement: an interrupted step has happened or not.
        progress.lengths, progress.length, session.version, session.view = (
            tuple(self.stops), progress.length + self.tokens, session.version + 1, None
        )  # fmt: skip
        session.statistics.full_cache_bytes = full_cache_bytes(tiers.layers, tiers.batch, progress.length, itemsize=2)
        session.half_evicted = False
        if session.cursor.is_cuda and self.tokens > copy_stream.WRITE_THROUGH:
            copy_stream.release_staging()

    def abandon(self) -> None:
        """Wait for the copies, and undo the step.

        Under eviction it cannot be undone: some layers have dropped pairs and counted the step's attention.
        """
        session = self.session
        session.tiers.drain()
        copy_stream.release_staging()
        session.forget_selection()
        session.tiers.undo_step(session.progress.lengths, self.tokens)


@torch.inference_mode(False)
@torch.no_grad()
def compress(session: Session) -> None:
    """Compress a 16-bit cache at any length: its pairs are stored as a prefill stores them, in a new pool.

    Until they are, both pools are in memory, with a host tier each.
    """
    session.tiers.drain()
    tiers, progress = session.tiers, session.progress
    assert tiers.pending is not None
    made = tiers.under(tiers.pending, progress.lengths)
    made.pending = None
    made.frequencies = [
        None if each is None else each.to(layer.device)
        for each, layer in zip(tiers.frequencies, tiers.layers, strict=True)
    ]
    none = (0,) * tiers.batch
    empty = replace(progress, length=0, lengths=none)
    step = Step(session.derived(made, empty), progress.length)
    step.front = tuple(progress.length - length for length in progress.lengths)
    step.write_cursor()
    made.find_sinks(progress.mask, none, progress.lengths)
    every = (tiers.all_pairs(site, progress.lengths, progress.length) for site in range(len(tiers.layers)))
    step.fill(pairs.unbind(3) for pairs in every)
    made.drain()
    session.tiers = made
    session.refresh()
    session.forget_selection()


def padding_in_front(padding: Tensor, lengths: Sequence[int], columns: int, tokens: int) -> tuple[int, ...] | None:
    """Padding in front of each row's first new token, from a mask [B, ≥ columns + tokens]; None if the mask hides
    anything else. A fake mask hides nothing.

    The host waits for the device.
    """
    if isinstance(padding, FakeTensor):
        return (0,) * len(lengths)
    there = padding[:, : columns + tokens].bool()
    counts = there.sum(1)
    last = torch.arange(columns + tokens, device=there.device) >= (columns + tokens - counts)[:, None]
    if not bool((there == last).all()):
        return None
    front = tuple(length + tokens - count for length, count in zip(lengths, counts.tolist(), strict=True))
    possible = all(0 <= absent <= (0 if length else tokens) for absent, length in zip(front, lengths, strict=True))
    return front if possible else None


def reason_for_one_length(causal: bool, rewritten: Rewritten) -> str | None:
    """Why the graph requires rows of one length, whatever a call passes; None if it does not."""
    if not causal:
        return "the model's masks hide more than padding (ALiBi, say)"
    if rewritten.counts_positions and rewritten.variant.phase.one_token:
        return "the model counts positions by the cache's columns"
    return None


def check_positions(progress: Progress, rewritten: Rewritten) -> None:
    """SpecacheError if a graph counts positions by columns, and the rows have different positions."""
    apart = progress.joined or (rewritten.variant.phase.one_token and progress.longest != progress.length)
    if rewritten.counts_positions and apart and progress.differ:
        raise SpecacheError(
            "the rows of this cache have different lengths, so the model cannot count their positions. Pass "
            "position_ids; for one new token: position_ids=specache_compile.lengths(cache)[:, None]"
        )


def other_mask() -> SpecacheError:
    return SpecacheError(
        "the attention mask differs from the lengths of this cache's rows (specache_compile.lengths(cache)). Leave the "
        "mask out, or pass one that is 0 before each row's first token and 1 from there on. Rows of different lengths "
        "require a model whose masks hide only padding"
    )
