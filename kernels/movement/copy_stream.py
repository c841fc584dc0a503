"""The copy stream of a CUDA device, which runs fetches, offloads and corrections concurrently with compute."""

#   main stream    ... select_0 ─┐   layer 1, 2, ...        wait_0 ── attend_0 (next step) ...
#   copy stream                  └── gather_0, gather_1 ... ──┘
#
#   main stream    score_0 ── choose_0 ─┬─ low-bit values_0 ─┬─ slots_0, recent_0, new_0 ── merge_0 ...
#   copy stream                         └─ gather_0 ─────────┘
#
# The copy stream accesses session state, or staging that this module owns, but no Inductor temporaries. A correction
# also reads the chosen tokens, which the next attention keeps alive. No op here blocks the host in a decode step.
# A captured CUDA graph contains the fork, and must end it by `join_capture`, since it cannot wait for outside events.
# While a thread captures, no other thread may copy on the same device.
# The capture stream is in `lowering/cuda_graphs.py`.

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from specache_compile.kernels.attention.kept_logits import lse_of
from specache_compile.kernels.memory.host_memory import makes_fakes
from specache_compile.kernels.state.cursor import host_record, lengths_of
from specache_compile.kernels.state.page_table import PAGE, Pages, pairs_of, rows_of_pages, runs, tokens_of, views
from specache_compile.kernels.state.stored_pairs import stored, write

# More new tokens than this are copied by the DMA engines, through staging; fewer are written through by a kernel.
WRITE_THROUGH = 64


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the copy stream of a device. Its high priority lets a gather start before all programs of an attention."""
    return torch.cuda.Stream(device, priority=-1)


def adopt(state: Mapping[str, Tensor]) -> None:
    """Record in the allocator that copies use these tensors, so that it does not reuse their memory too soon.

    A state without fetches lacks some of them.
    """
    for field in {"selected", "slots", "slot_index", "fetched", "corrected"} & state.keys():
        state[field].record_stream(stream_of(state[field].device))


def has_streams(device: torch.device) -> bool:
    """Return whether copies run on streams: on a CPU each copy ends within its op, and fake tensors have no copies."""
    return device.type == "cuda" and not makes_fakes()


def join(device: torch.device) -> None:
    """Let the main stream wait for all submitted copies."""
    if has_streams(device):
        torch.cuda.current_stream(device).wait_stream(stream_of(device))


def drain(device: torch.device) -> None:
    """Block until all copies of launched steps have ended."""
    if has_streams(device):
        torch.cuda.synchronize(device)


def join_capture(device: torch.device) -> None:
    """Join the copy stream before a capture ends, if a copy has forked it: events of others are outside the capture."""
    with torch.cuda.stream(stream_of(device)):
        forked = torch.cuda.is_current_stream_capturing()
    if forked:
        join(device)


def prefetch(
    selected: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, fetched: Tensor
) -> None:
    """Run `tier_ops.prefetch` on the copy stream, after all work that the main stream has so far."""
    from .triton_copy import gather

    copy = stream_of(slots.device)
    copy.wait_stream(torch.cuda.current_stream(slots.device))
    with torch.cuda.stream(copy):
        gather(selected, cursor, host, slots, slot_index, fetched)
    if not torch.cuda.is_current_stream_capturing():
        host_record(cursor).fetches[slots.data_ptr()] = copy.record_event()


def wait(after: Tensor, cursor: Tensor, slots: Tensor, slot_index: Tensor, selected: Tensor) -> None:
    """Run `tier_ops.wait`: later work on the main stream waits for the fetch; the host does not block."""
    fetch = host_record(cursor).fetches.pop(slots.data_ptr(), None)
    if fetch is not None and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(slots.device).wait_event(fetch)


def correct(
    scores: Tensor, cursor: Tensor, host: Tensor, slots: Tensor, slot_index: Tensor, corrected: Tensor, *kept: Any
) -> Tensor:
    """Run `tier_ops.correct`: select by the kept logits on the main stream, and gather concurrently until
    `wait_for_correction`. No decision requires the host."""
    from .triton_copy import gather
    from .triton_select_logits import select

    chosen, (q, logits, base, mask) = torch.empty_like(slot_index), kept
    select(logits, base, lse_of(base, q), mask, cursor, chosen)
    copy = stream_of(slots.device)
    copy.wait_stream(torch.cuda.current_stream(slots.device))
    with torch.cuda.stream(copy):
        programs = slot_index.shape[0] * slot_index.shape[1]
        gather(chosen, cursor, host, slots, slot_index, corrected, programs=programs)
    return chosen


def wait_for_correction(slots: Tensor) -> None:
    """Let later work on the main stream wait for the correction of these slots, the last copy."""
    join(slots.device)


class Staging:
    """Two buffers on one device, through which a long prefill copies its pairs to the host, layer by layer.

    The device holds at most two layers' 16-bit pairs; a third layer waits for the first one's copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self.copied: list[torch.cuda.Event | None] = [None, None]
        self.next = 0

    def send(self, k: Tensor, v: Tensor, start: int, host: Pages) -> None:
        """Copy new pairs k, v [1, H, T, d] to the host tier's tokens from `start` on, staged in pages of its layout."""
        main, copy = torch.cuda.current_stream(self.device), stream_of(self.device)
        number, self.next = self.next, 1 - self.next
        copied = self.copied[number]
        if copied is not None:
            main.wait_event(copied)
        first, stop = start // PAGE * PAGE, start + k.shape[2]
        count = -(-(stop - first) // PAGE)
        size = count * host.pages[0].nbytes
        if self.buffers[number].numel() < size:
            self.buffers[number] = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.buffers[number].record_stream(stream_of(self.device))
        staged = self.buffers[number][:size].view(host.dtype).view(count, *host.pages.shape[1:])
        pieces = list(zip(staged[:, None], runs(host, start, stop), strict=True))
        for page, (_, begin, end) in pieces:
            new = torch.stack([x[:, :, begin - start : end - start] for x in (k, v)], 3)
            write(stored(new, host.dtype, host.shape[-1]), views(page, begin, end))
        copy.wait_stream(main)
        with torch.cuda.stream(copy):
            for page, run in pieces:
                send_tokens(page, *run)
        self.copied[number] = copy.record_event()


def send_tokens(page: Tensor, target: Tensor, begin: int, end: int) -> None:
    """Copy a row's tokens `begin` to `end` of a page [1, H, 256, 2, d or w] across PCIe to a host page.

    A whole page is one copy. Otherwise each head's parts are copied, which are contiguous.
    """
    if end - begin == PAGE:
        target.copy_(page, non_blocking=True)
        return
    for one, other in zip(views(page, begin, end), views(target, begin, end), strict=True):
        for head in range(page.shape[1]):
            other[0, head].copy_(one[0, head], non_blocking=True)


staging_of = functools.cache(Staging)


def release_staging() -> None:
    """Release the staging buffers; the allocator reuses them after their last copy."""
    staging_of.cache_clear()


def offload(k: Tensor, v: Tensor, padding: Tensor | None, cursor: Tensor, host: Tensor) -> None:
    """Run `tier_ops.offload`: write few pairs through directly, copy many through staging on the copy stream."""
    from .triton_copy import write_through

    if k.shape[2] <= WRITE_THROUGH:
        write_through(k, v, cursor, host)
        return
    rows = zip(rows_of_pages(pairs_of(host, cursor)), lengths_of(cursor), k.split(1), v.split(1), strict=True)
    for pages, length, *new in rows:
        keys, values = (x[:, :, max(0, -length) :] for x in new)
        staging_of(k.device).send(keys, values, max(0, length), pages)


def host_blocks(host: Pages, length: int, size: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield one row's first `length` host pairs in blocks [1, H, ≤ size, 2, d or w] on `device`, with their first
    tokens.

    On CUDA the pages of the next block, which are copied whole, arrive while the caller uses this one. size: a multiple
    of 256.
    """
    starts = range(0, length, size)
    if device.type != "cuda":
        for first in starts:
            yield first, tokens_of(host, first, min(first + size, length)).to(device)
        return
    main, copy = torch.cuda.current_stream(device), stream_of(device)
    count = -(-min(size, length) // PAGE)
    buffers = [Pages(host.pages.new_empty(count, *host.pages.shape[1:], device=device), torch.arange(count)[None])
               for _ in range(2)]  # fmt: skip
    for buffer in buffers:
        buffer.pages.record_stream(copy)

    def load(number: int) -> Any:
        copy.wait_stream(main)  # the attention to the buffer's last block is already launched
        with torch.cuda.stream(copy):
            loaded = runs(host, starts[number], min(starts[number] + size, length))
            for target, (page, _, _) in zip(buffers[number % 2].pages.split(1), loaded, strict=False):
                target.copy_(page, non_blocking=True)
        return copy.record_event()

    following: Any = load(0) if len(starts) else None
    for number, first in enumerate(starts):
        loaded, following = following, load(number + 1) if number + 1 < len(starts) else None
        main.wait_event(loaded)
        yield first, tokens_of(buffers[number % 2], 0, min(size, length - first))
