"""`stats(model)`: what the last generation of a compiled model did."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError

from .records import ModelRecord, Verified, find_record
from .state import device_total


@dataclass(frozen=True)
class HitRate:
    """What slots, sinks, recent tier and new pair covered of the output token's true attention, averaged over KV heads.

    mass: the share of the attention mass.
    top_k: the share of the k tokens of the low-bit tier, without sinks, that it wanted most.
    """

    mass: float
    top_k: float


@dataclass(frozen=True)
class Verification:
    """What drafting and verifying came to (option verify).

    acceptance: the share of the drafted tokens that the verification confirmed. Its own token is among
        tokens_per_verification; a step for which no draft was found counts as one.
    bytes_per_token: those that came from the host, streamed or fetched.
    offload_bytes_per_token: those that the method `offload` would have streamed.
    """

    verifications: int
    acceptance: float
    tokens_per_verification: float
    bytes_per_token: float
    offload_bytes_per_token: float


@dataclass(frozen=True)
class Stats:
    """The newest cache of a model: steps by phase, copies, waiting, memory. Bytes are bytes, times are seconds.

    widened: decodes of several tokens (lookup).
    replays: decode steps that were one launch of a recorded CUDA graph (`mode`).
    lanes: tokens that run in a decode step.
    ranks: processes that the model is split over; all else is this rank's own part.
    compiles: all graphs of the model so far.
    left_exact: reasons why attentions of the model are not rewritten (sliding windows, for example), and how many.
    python_seconds: of `seconds` those spent finding and binding the session.
    seconds_waited, seconds_corrected: steps stood still for fetches ahead, and for corrections; None on CUDA, where the
        host does not know.
    pairs_ahead, pairs_corrected: pairs that prefetches brought, and corrections within a step (option correct).
    bytes_to_device: of these pairs. What an extend and the methods `offload` and `kcache` read of the host tier is not
        counted; `verification` tells what the verifications read.
    kv_ratio: device KV bytes over the bytes of the same tokens in a 16-bit cache, whatever the model's dtype is.
    hit_rate: None unless the option hit_rate was set.
    verification: None unless a draft was verified.
    """

    prefills: int
    extends: int
    pre_decodes: int
    decodes: int
    widened: int
    replays: int
    lanes: int
    ranks: int
    compiles: int
    left_exact: dict[str, int]
    seconds: float
    python_seconds: float
    seconds_waited: float | None
    seconds_corrected: float | None
    pairs_ahead: int
    pairs_corrected: int
    bytes_to_device: int
    bytes_to_host: int
    bytes_by_tier: dict[str, int]
    device_bytes: int
    host_bytes: int
    kv_ratio: float
    hit_rate: HitRate | None
    verification: Verification | None

    def __str__(self) -> str:
        rows = [f"{name:18} {shown(name, value)}" for name, value in vars(self).items() if value not in (None, {})]
        if self.kv_ratio > 1 and "low-bit" in self.bytes_by_tier:
            rows.append(LARGER)
        return "\n".join(rows)


# A window, slots and sinks have the same size at every length.
LARGER = (
    "This cache takes more of the device than a 16-bit cache: its window and slots have a fixed size. It saves memory "
    "at longer contexts (most settings: from about a thousand tokens on). min_context=N keeps shorter ones in 16 bits."
)


def shown(name: str, value: object) -> str:
    """A figure with its unit."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(name, item)}" for key, item in value.items())
    if isinstance(value, int) and "bytes" in name:
        return f"{value / 2**20:.2f} MiB"
    if isinstance(value, float):
        return f"{value:.3f}" + (" s" if "seconds" in name else "")
    return str(value)


def stats(model: torch.nn.Module) -> Stats:
    """Statistics of the model's newest cache; SpecacheError where the backend has held none.

    Where graph breaks leave the steps in parts, each with layers of its own, they are the last part's.
    """
    record = find_record(model)
    if record is None or record.latest is None:
        raise no_statistics(record)
    latest = record.latest
    latest.queue.settle()
    tier = latest.bytes_by_tier
    device = device_total(tier)
    tally = torch.stack([t.cpu() for t in latest.tallies]).sum(0) if latest.tallies else torch.zeros(3, device="cpu")
    mass, recall, count = tally.tolist()
    fetched = sum(int(count) for count in [*latest.fetched, *latest.corrected])
    return Stats(
        prefills=latest.steps["prefill"],
        extends=latest.steps["extend"],
        pre_decodes=latest.steps["pre-decode"],
        decodes=latest.steps["decode"],
        widened=latest.steps["widened"],
        replays=latest.replays,
        lanes=max(made.lanes for graph in record.graphs for made in graph.rewrites.made.values()),
        ranks=latest.ranks,
        compiles=sum(len(graph.rewrites.made) for graph in record.graphs),
        left_exact=left_exact(record),
        seconds=latest.seconds,
        python_seconds=latest.python_seconds,
        seconds_waited=latest.queue.waited,
        seconds_corrected=latest.queue.correcting,
        pairs_ahead=pairs(latest.fetched, latest.pair_bytes),
        pairs_corrected=pairs(latest.corrected, latest.pair_bytes),
        bytes_to_device=fetched,
        bytes_to_host=latest.bytes_to_host,
        bytes_by_tier=dict(tier),
        device_bytes=device,
        host_bytes=tier.get("host", 0),
        kv_ratio=device / max(1, latest.full_cache_bytes),
        hit_rate=HitRate(mass / count, recall / count) if count else None,
        verification=verification(latest.verified, fetched) if latest.verified.drafted else None,
    )


def left_exact(record: ModelRecord) -> dict[str, int]:
    """The number of attentions that stay exact, by reason: the most in any graph of the model."""
    counts = [collections.Counter(item.reason for item in graph.captured.left_alone) for graph in record.graphs]
    return dict(functools.reduce(operator.or_, counts, collections.Counter()))


def verification(counts: Verified, fetched: int) -> Verification:
    """From a session's counts, and the bytes that its drafts have fetched."""
    return Verification(
        verifications=counts.rounds,
        acceptance=counts.accepted / counts.drafted,
        tokens_per_verification=counts.tokens / counts.rounds,
        bytes_per_token=(counts.bytes_streamed + fetched) / counts.tokens,
        offload_bytes_per_token=counts.bytes_of_steps / counts.tokens,
    )


def pairs(counts: Sequence[Tensor], pair_bytes: Sequence[int]) -> int:
    """KV pairs of one head that each layer's bytes make."""
    return sum(int(count) // size for count, size in zip(counts, pair_bytes, strict=True))


def no_statistics(record: ModelRecord | None) -> SpecacheError:
    if record is not None and record.unused is not None:
        return SpecacheError(
            f"the newest generation ran no compiled graph, so there are no statistics: {record.unused}"
        )
    if record is not None and record.absorbed:
        return SpecacheError(
            f"{record.absorbed} latent attentions of this model are rewritten (absorbed) and exact. They read Hugging "
            "Face's own cache: nothing is compressed, so there are no statistics of tiers"
        )
    return SpecacheError(
        "this model has run no graph that specache rewrote: compile it with backend='specache' and generate first"
    )
