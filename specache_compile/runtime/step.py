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

from specache_compile.errors import copy_failed, no_host_tier
from specache_compile.kernels.movement import copy_stream
from specache_compile.kernels.state.cursor import LENGTH, LOW_BIT, NEXT_LOW_BIT, publish
from specache_compile.methods import METHODS
from specache_compile.methods.field import LayerState
from specache_compile.passes.phase import EXTEND, PREFILL, WIDENED, Phase
from specache_compile.passes.plan import Input
from specache_compile.passes.reading.local_shards import local

from .records import Graph
from .rewritten import Rewritten
from .session import UNCAPTURED, Mode, Session
from .variant import phases, selects, variant_of


@contextlib.contextmanager
def opened(session: Session, tokens: int, padding: Tensor | None) -> Iterator[Step]:
    """A step that adds `tokens` to a session's cache. padding [B, ≥ n + tokens]: which tokens are there; None: all.

    Where the body raises, the session is as it was before the step, which can be taken again; under eviction, and
    without a host tier, it cannot once it has started.
    """
    step = Step(session, tokens)
    try:
        step.begin(padding)
        yield step
    except BaseException as error:
        step.abandon()
        if session.queue.error is not None and isinstance(error, Exception):
            raise copy_failed(session.queue.error) from error
        raise


class Step:
    """A step under way.

    ran: the phases that have run.
    inside: seconds spent in lowered graphs so far.
    """

    def __init__(self, session: Session, tokens: int) -> None:
        self.session, self.tokens = session, tokens
        self.ran: list[Phase] = []
        self.inside = 0.0

    @torch.inference_mode(False)
    def begin(self, padding: Tensor | None) -> None:
        self.session.make_room(self.tokens)
        self.point()
        self.see(padding)
        session, progress = self.session, self.session.progress
        there = progress.padding[:, 0, 0] if progress.padding is not None and progress.padded else None
        session.tiers.find_sinks(there, session.length, session.length + self.tokens)

    def point(self) -> None:
        """Write the cursor."""
        session, length = self.session, self.session.length
        low_bit, next_low_bit = (session.options.low_bit_length(n) for n in (length, length + self.tokens))
        for place, value in ((LENGTH, length), (LOW_BIT, low_bit), (NEXT_LOW_BIT, next_low_bit)):
            session.cursor[place].fill_(value)  # an assignment would copy it from host memory, and stop the host
        if session.cursor.is_cuda:
            publish(session.cursor, length)

    def see(self, padding: Tensor | None) -> None:
        """Take over the padding outside of the graph, so that a recorded step finds the session's where it was.

        None: all tokens are there, those too that were no candidates when the slots were chosen.
        """
        progress, tiers = self.session.progress, self.session.tiers
        if padding is None:
            progress.slots_ready = progress.slots_ready and not progress.padded
            progress.padded = False
            return
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
        unpadded = captured.unpadded(arguments)

        def form(phase: Phase) -> Rewritten:
            variant = variant_of(phase, self.session.options, unpadded, self.session.tiers.capacity)
            return graph.rewrites.form(variant, arguments)

        *before, phase = self.phases(captured.phase, captured.is_causal)
        last = form(phase)
        chosen = progress.slots_ready and not (last.needs_guess and progress.guess is None)
        return [*(form(earlier) for earlier in before if not chosen), last]

    def run(self, graph: Graph, arguments: Sequence[Any]) -> list[Any]:
        """What the captured graph returns, held tensors in place of the cache."""
        forms = self.forms(graph, arguments)
        self.start(forms[-1].variant.phase)
        outputs = [self.launch(graph, form, arguments) for form in forms][-1]
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

    def launch(self, graph: Graph, form: Rewritten, arguments: Sequence[Any]) -> list[Any]:
        """Run one rewritten graph on the session's state, and keep its guess; returns the outputs."""
        session, inputs = self.session, self.bind(form.inputs, arguments)
        start = time.perf_counter()
        captures = form.capture and form not in graph.uncaptured
        if captures and not session.capturable:
            session.tell(UNCAPTURED, not_pinned(graph.captured.mode))
        if captures and session.capturable:
            stays = [source.source in ("state", "cursor", "padding") for source in form.inputs]
            give_up = functools.partial(graph.stop_capturing, form)
            outputs = session.recorded.run(form.run, inputs, stays, session.cursor.device, give_up, session.deferred)
            session.statistics.replays = session.recorded.replays
        else:
            session.deferred.make()
            outputs = list(form.run(*inputs))
        self.inside += time.perf_counter() - start
        self.ran.append(form.variant.phase)
        session.progress.guess = outputs.pop() if form.guesses else None
        return outputs

    def bind(self, inputs: Sequence[Input], arguments: Sequence[Any]) -> list[Any]:
        """The values of a rewritten graph's inputs: the caller's arguments, and the session's state."""
        session = self.session
        own = {"cursor": session.cursor, "padding": session.progress.padding, "guess": session.progress.guess}
        values: list[Any] = []
        for source in inputs:
            if source.source == "argument":
                values.append(local(arguments[source.argument]))
            elif source.source == "state":
                values.append(session.state[source.site][source.field])
            else:
                values.append(own[source.source])
        return values

    def fill(self, pairs: Sequence[tuple[Tensor, Tensor]], frequencies: Tensor | None) -> None:
        """Put each site's new keys and values [B, H, T, d] into its tiers, by the ops that a prefill stores with.
        frequencies: RoPE's, where keys are centered."""
        session = self.session
        padding = session.progress.padding if session.progress.padded else None
        with self.filling() as states:
            for site, (keys, values) in enumerate(pairs):
                state = states[site]
                if session.layers[site].rank:
                    keys, values = torch.cat([keys, values], -1).chunk(2, -1)
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
        session.progress.slots_ready = self.ran[-1].speculates and selects(session.options)
        session.advance(self.tokens)
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
        session.tiers.take_back(session.length)


def not_pinned(mode: str | None) -> str:
    """The GPU cannot read such a host tier."""
    return (
        f"mode={mode!r}: no CUDA graph of the decode step: the host tier could not be pinned, so that the host makes "
        "its copies. Raise the limit on locked memory (ulimit -l), or lower the batch or the context"
    )
