"""One step of a session: opened, run, and closed as done or as undone.

with opened(session, tokens, padding) as step:     room for the tokens; cursor and padding are written
    outputs = step.run(graph, arguments)           a captured graph's rewritten forms, on the session's state;
    step.fill(pairs, frequencies)                  or pairs that were made elsewhere, put into the tiers
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specache_compile.errors import SpecacheError, copy_failed, no_host_tier
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state.cursor import CURSOR_SIZE, LENGTH, publish
from specache_compile.lowering.row_buckets import filled_up, first_rows, row_bucket
from specache_compile.methods import METHODS
from specache_compile.methods.field import LayerState
from specache_compile.passes.phase import EXTEND, PREFILL, WIDENED, Phase
from specache_compile.passes.plan import Input
from specache_compile.passes.reading.local_shards import local
from specache_compile.rope_switch import rows_apart

from .records import Graph
from .rewritten import Rewritten
from .session import UNCAPTURED, Mode, Progress, Session
from .variant import phases, selects, variant_of

# What a pre-decode writes of a layer, and the fetch that it begins.
CHOSEN = ("slots", "slot_index", "selected")


@contextlib.contextmanager
def opened(session: Session, tokens: int, padding: Tensor | None, causal: bool = False) -> Iterator[Step]:
    """A step that adds `tokens` to a session's cache. padding [B, ≥ n + tokens]: which tokens are there; None: all.
    causal: as for `phases`.

    Where the body raises, the session is as it was before the step, which can be taken again; under eviction, and
    without a host tier, it cannot once it has started.
    """
    step = Step(session, tokens)
    try:
        step.begin(padding, causal)
        yield step
    except BaseException as error:
        step.abandon()
        if session.queue.error is not None and isinstance(error, Exception):
            raise copy_failed(session.queue.error) from error
        raise


class Step:
    """A step under way.

    front: new tokens of each row that are no tokens, but padding in front of its first.
    by_lengths: a padding mask says nothing that lengths do not.
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
        self.session.make_room(self.tokens)
        self.see(padding, causal)
        self.point()
        session, progress = self.session, self.session.progress
        there = progress.padding[:, 0, 0] if progress.padding is not None and progress.padded else None
        stops = [length + new for length, new in zip(progress.lengths, self.new_tokens, strict=True)]
        session.tiers.find_sinks(there, progress.lengths, stops)

    @property
    def new_tokens(self) -> list[int]:
        """Those of each row that are tokens."""
        return [self.tokens - absent for absent in self.front]

    def point(self) -> None:
        """Write the cursor."""
        session, lengths = self.session, self.session.progress.lengths
        rows = [
            (length - absent, *map(session.options.low_bit_length, (length, length + new)), session.queue.number)
            for length, absent, new in zip(lengths, self.front, self.new_tokens, strict=True)
        ]
        if len(set(rows)) > 1:
            told = torch.tensor(rows)
            told = told.pin_memory() if session.cursor.is_cuda else told
            session.cursor[:, :CURSOR_SIZE].copy_(told, non_blocking=True)
        else:
            for place, value in enumerate(rows[0]):
                session.cursor[:, place].fill_(value)  # an assignment would copy it from host memory, and stop the host
        if session.cursor.is_cuda:
            publish(session.cursor, [row[LENGTH] for row in rows])

    def see(self, padding: Tensor | None, causal: bool) -> None:
        """Take over the padding outside of the graph, so that a recorded step finds the session's where it was.

        None: all tokens are there, those too that were no candidates when the slots were chosen. Padding in front of a
        row's first token becomes its length, where the method allows for such rows, and nothing else hides a token.
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
                self.session.choose_again()
            progress.padded = False
            return
        if progress.differ or tiers.table is not None:
            raise other_mask()
        progress.padded = True
        shape = (tiers.batch, 1, 1, tiers.capacity)
        if progress.padding is None or progress.padding.shape != shape:
            progress.padding = torch.zeros(shape, dtype=torch.bool, device=tiers.layers[0].device)
        after = progress.length + self.tokens
        progress.padding[:, 0, 0, :after].copy_(padding[:, :after])

    def phases(self, captured: Phase, causal: bool) -> tuple[Phase, ...]:
        """The phases that a graph runs now which was captured in the phase `captured`.

        causal: the graph's masks are causal, and hide nothing but padding besides.

        With the option verify nothing but a draft approximates: any other step of one token is an extend. Under lookup
        a draft's verification is no extend but a widened decode.
        """
        session, options = self.session, self.session.options
        if options.lookup:
            widened = captured is EXTEND and causal and session.mode is Mode.VERIFY
            return (WIDENED,) if widened else phases(captured, options)
        if captured is EXTEND and session.tiers.has_no_host:
            raise no_host_tier("a call of several tokens behind cached ones")
        exact = captured.one_token and options.verify is not None and session.mode is not Mode.DRAFT
        return (EXTEND,) if exact else phases(captured, options)

    def forms(self, graph: Graph, arguments: Sequence[Any]) -> list[Rewritten]:
        """The rewritten graphs to run: that of the phase, and before it a pre-decode where one is needed.

        One is needed where the slots were not chosen for this step, or the guess is missing.
        """
        captured, progress = graph.captured, self.session.progress
        ragged = is_ragged(captured.phase, self.front)
        unpadded = (self.by_lengths and not ragged) or captured.unpadded(arguments)

        def form(phase: Phase) -> Rewritten:
            tiers = self.session.tiers
            in_pages = tiers.table is not None
            variant = variant_of(phase, self.session.options, unpadded, ragged, tiers.capacity, in_pages)
            return graph.rewrites.form(variant, arguments)

        *before, phase = self.phases(captured.phase, captured.is_causal)
        last = form(phase)
        self.session.one_length = reason_for_one_length(captured.is_causal, last)
        if progress.differ or progress.joined:
            check_positions(progress, last)
            self.check_rope()
        chosen = all(progress.ready) and not (last.needs_guess and progress.guess is None)
        return [*(form(earlier) for earlier in before if not chosen), last]

    def check_rope(self) -> None:
        """SpecacheError where joined rows would have other frequencies than each alone."""
        switch, lengths = self.session.rope_switch, self.session.progress.lengths
        if switch is not None and switch.misfit(
            [length + new for length, new in zip(lengths, self.new_tokens, strict=True)]
        ):
            raise rows_apart(switch)

    def run(self, graph: Graph, arguments: Sequence[Any]) -> list[Any]:
        """What the captured graph returns, held tensors in place of the cache."""
        forms = self.forms(graph, arguments)
        self.start(forms[-1].variant.phase)
        *before, last = forms
        for form in before:
            self.choose(graph, form, arguments)
        outputs = self.launch(graph, last, arguments)
        self.finish()
        for position, (site, part) in forms[-1].held_outputs.items():
            outputs[position] = self.session.held(site, part)
        return outputs

    def start(self, phase: Phase) -> None:
        """From here until the end a policy drops pairs, layer by layer; without a host tier rounding loses them.

        All that runs is compiled and checked by now.
        """
        session, tiers = self.session, self.session.tiers
        session.half_evicted = bool(tiers.fields("kept")) or tiers.has_no_host
        if phase.over_tiers and session.options.top_k and not selects(session.options):
            session.queue.wait_for_offloads()  # what the step itself will fetch may still be on its way to the host

    def choose(self, graph: Graph, form: Rewritten, arguments: Sequence[Any]) -> None:
        """A pre-decode. What rows had chosen, and guessed, before others joined them stays theirs."""
        session, progress = self.session, self.session.progress
        whole = progress.guess is not None or not form.guesses  # a guess that is missing is every row's
        rows = [row for row, is_ready in enumerate(progress.ready) if is_ready and whole]
        chosen = [{name: state[name][rows] for name in CHOSEN} for state in session.state] if rows else []
        guess = progress.guess
        self.launch(graph, form, arguments)
        if not rows:
            return
        session.drain()
        for state, kept in zip(session.state, chosen, strict=True):
            for name, value in kept.items():
                state[name][rows] = value
        if guess is not None and progress.guess is not None:
            progress.guess = progress.guess.clone()
            progress.guess[rows] = guess[rows]

    def launch(self, graph: Graph, form: Rewritten, arguments: Sequence[Any]) -> list[Any]:
        """Run one rewritten graph on the session's state, and keep its guess; returns the outputs."""
        session = self.session
        captures = form.capture and form not in graph.uncaptured
        if captures and not session.capturable:
            session.tell(UNCAPTURED, not_pinned(graph.captured.mode))
        captures = captures and session.capturable
        rows = self.rows_recorded(graph, form, arguments) if captures else session.tiers.batch
        inputs = self.bind(form.inputs, arguments, rows)
        if form.rows is not None:
            inputs = filled_up(inputs, form.rows, session.tiers.batch, rows)
        start = time.perf_counter()
        if captures:
            owned = [source.source in ("state", "cursor", "padding") for source in form.inputs]
            stays = [own or position in form.writes for position, own in enumerate(owned)]
            give_up = functools.partial(graph.stop_capturing, form)
            device, shape = session.cursor.device, (rows, session.cursor.shape[1])
            outputs = session.recorded.run(form.run, inputs, stays, device, give_up, session.deferred, shape)
            session.statistics.replays = session.recorded.replays
        else:
            session.deferred.make()
            outputs = list(form.run(*inputs))
        self.inside += time.perf_counter() - start
        self.ran.append(form.variant.phase)
        if form.rows is not None:
            outputs = first_rows(outputs, form.rows, session.tiers.batch)
        session.progress.guess = outputs.pop() if form.guesses else None
        return outputs

    def rows_recorded(self, graph: Graph, form: Rewritten, arguments: Sequence[Any]) -> int:
        """As many as a form's CUDA graph has, or will have: what their bucket has, where dead rows may fill it up."""
        live, dims = self.session.tiers.batch, form.rows
        if dims is None:
            return live
        rows = row_bucket(live, self.session.tiers.most_cursors)
        if rows == live:
            return live
        holds = graph.captured.symbols.holds
        return rows if all(holds(each, arguments, {dims.number: rows}) for each in dims.assumed) else live

    def bind(self, inputs: Sequence[Input], arguments: Sequence[Any], rows: int) -> list[Any]:
        """The values of a rewritten graph's inputs: the caller's arguments, and the session's state of so many rows, of
        which some may be dead."""
        session = self.session
        state, cursor = session.filled_up(rows)
        own = {"cursor": cursor, "padding": session.progress.padding, "guess": session.progress.guess}
        values: list[Any] = []
        for source in inputs:
            if source.source == "argument":
                values.append(local(arguments[source.argument]))
            elif source.source == "state":
                values.append(state[source.site][source.field])
            elif source.source == "counted":
                values.append(self.counted())
            else:
                values.append(own[source.source])
        return values

    def counted(self) -> Tensor:
        """Which lanes a row is not only filled up with, float32 [lanes, B, 1, 1]."""
        session = self.session
        drafted = session.drafted or (self.tokens - 1,) * session.tiers.batch
        there = torch.arange(self.tokens)[:, None] <= torch.tensor(drafted)
        return there[:, :, None, None].to(session.layers[0].device, torch.float32)

    def fill(self, pairs: Sequence[tuple[Tensor, Tensor]], frequencies: Tensor | None) -> None:
        """Put each site's new keys and values [B, H, T, d] into its tiers, by the ops that a prefill stores with.
        frequencies: RoPE's, where keys are centered."""
        session = self.session
        padding = session.progress.padding if session.progress.padded else None
        with self.filling() as states:
            for site, (keys, values) in enumerate(pairs):
                state = states[site]
                new = (keys.contiguous(), values.contiguous(), padding, session.cursor)
                for call in METHODS[session.options.method].recipe(session.options, site).stores:
                    turned = [frequencies] if call.turned and state[call.turned].shape[2] else []
                    op, tensors = getattr(torch.ops.specache, call.op), [state[name] for name in call.state]
                    op(*new, *tensors, *call.settings, *turned)

    @contextlib.contextmanager
    def filling(self) -> Iterator[list[LayerState]]:
        """Within it, what a prefill would leave is put into the layers' state by other means."""
        self.start(PREFILL)
        yield self.session.state
        self.ran.append(PREFILL)
        self.finish()

    def finish(self) -> None:
        """The tokens are cached; views of the cache taken before are stale from here on."""
        session = self.session
        chosen = self.ran[-1].speculates and selects(session.options)
        session.progress.ready = (chosen,) * session.tiers.batch
        session.advance(self.tokens, self.new_tokens)
        session.half_evicted = False
        if session.cursor.is_cuda and self.tokens > copy_stream.WRITE_THROUGH:
            copy_stream.release_staging()

    def abandon(self) -> None:
        """Wait out the copies, and bring the tiers back to where they were.

        Under eviction the tiers do not come back: some layers have dropped pairs for the step, and counted its
        attention.
        """
        session = self.session
        session.queue.settle()
        copy_stream.release_staging()
        session.deferred.drop()
        session.choose_again()
        session.tiers.take_back(session.progress.lengths)


def padding_in_front(padding: Tensor, lengths: Sequence[int], columns: int, tokens: int) -> tuple[int, ...] | None:
    """How many of the new tokens of each row a mask [B, ≥ columns + tokens] says are padding in front of its first one;
    None where it hides others: any behind a row's first, or a cached one. A fake mask hides none.

    The host waits for the answer.
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


def is_ragged(phase: Phase, front: Sequence[int]) -> bool:
    """Whether the attention of a phase must be shown padding that is not stored: the model's own, in a prefill."""
    return not phase.has_past and any(front)


def reason_for_one_length(causal: bool, form: Rewritten) -> str | None:
    """Why rows of other lengths than their neighbours' would be refused, whatever the call gives."""
    if not causal:
        return "the model's masks hide more than padding (ALiBi, say)"
    if form.counts_positions and form.variant.phase.one_token:
        return "the model counts positions by the cache's columns"
    return None


def check_positions(progress: Progress, form: Rewritten) -> None:
    """SpecacheError where a graph counts positions by columns, and rows have positions of their own."""
    apart = progress.joined or (form.variant.phase.one_token and progress.longest != progress.length)
    if form.counts_positions and apart and progress.differ:
        raise no_positions()


def other_mask() -> SpecacheError:
    return SpecacheError(
        "the rows of this cache have lengths of their own (specache_compile.lengths), and the attention mask says "
        "something else: leave it out, or give one that is 0 in front of each row's tokens and 1 behind, as left "
        "padding is; a model whose masks hide more than padding has no such rows"
    )


def no_positions() -> SpecacheError:
    return SpecacheError(
        "the rows of this cache have lengths of their own, so that the model cannot count their positions: give it "
        "position_ids, of one new token specache_compile.lengths(cache)[:, None]"
    )


def not_pinned(mode: str | None) -> str:
    """The GPU cannot read such a host tier."""
    return (
        f"mode={mode!r}: no CUDA graph of the decode step: the host tier could not be pinned, so that the host makes "
        "its copies. Raise the limit on locked memory (ulimit -l), or lower the batch or the context"
    )
