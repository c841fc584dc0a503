"""`stats(model)`: counts, times and bytes of a compiled model's last generation."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specache_compile.errors import SpecacheError
from specache_compile.kernels.movement import copy_stream

from .records import ModelRecord, find_record
from .state import device_total


@dataclass(frozen=True)
class Verification:
    """Results of drafting and verification (option verify).

    acceptance: the share of the drafted tokens that verification accepted.
    tokens_per_verification: tokens that a round generates, the verification's own token included. A step without a
        draft counts as a round.
    """

    verifications: int
    acceptance: float
    tokens_per_verification: float


@dataclass(frozen=True)
class Stats:
    """Statistics of a model's newest cache, as `stats` returns them. Sizes are in bytes, times in seconds.

    Attributes:
        prefills, extends, pre_decodes, decodes: steps by phase.
        replays: decode steps that replayed a recorded CUDA graph (option mode).
        lanes: tokens that run in a decode step.
        ranks: processes that the model is split over; all other figures are of this rank alone.
        compiles: compiled graphs of the model with its newest options.
        left_exact: number of attentions that are not rewritten, by reason (a sliding window, for example).
        python_seconds: the part of `seconds` that was spent outside of compiled graphs.
        pairs_ahead, pairs_corrected: pairs that prefetches and corrections copied.
        bytes_to_device: bytes of these pairs, without reads of further turns and of the methods `offload` and `kcache`.
        bytes_to_host: bytes of pairs that were offloaded.
        bytes_by_tier, device_bytes, host_bytes: KV bytes now.
        kv_ratio: device KV bytes, as a share of a 16-bit cache of the same tokens.
        verification: None unless a draft was verified.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        model.generate(**tokenizer("Hello", return_tensors="pt").to(model.device), max_new_tokens=4)
        print(sc.stats(model).decodes, sc.stats(model).bytes_by_tier)
    """

    prefills: int
    extends: int
    pre_decodes: int
    decodes: int
    replays: int
    lanes: int
    ranks: int
    compiles: int
    left_exact: dict[str, int]
    seconds: float
    python_seconds: float
    pairs_ahead: int
    pairs_corrected: int
    bytes_to_device: int
    bytes_to_host: int
    bytes_by_tier: dict[str, int]
    device_bytes: int
    host_bytes: int
    kv_ratio: float
    verification: Verification | None

    def __str__(self) -> str:
        rows = [f"{name:18} {shown(name, value)}" for name, value in vars(self).items() if value not in (None, {})]
        if self.kv_ratio > 1 and "low-bit" in self.bytes_by_tier:
            rows.append(LARGER)
        return "\n".join(rows)


# The window, slots and sinks have the same size at every length.
LARGER = (
    "This cache uses more device memory than a 16-bit cache, because its window and slots have a fixed size. Longer "
    "contexts save memory, in most settings from about 1,000 tokens on. min_context=N keeps shorter ones in 16 bits."
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
    """Return statistics of the model's newest cache.

    If a graph break splits the model's steps into parts, they are those of the last part.

    Args:
        model: a model that was compiled with this backend and has generated.

    Returns:
        A `Stats`; `print` shows it as a table.

    Raises:
        SpecacheError: the newest generation ran no rewritten graph; the message states why.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        model.compile(backend="specache")
        model.generate(**tokenizer("Hello", return_tensors="pt").to(model.device), max_new_tokens=4)
        print(sc.stats(model))
    """
    record = find_record(model) or ModelRecord()
    if record.latest is None:
        raise no_statistics(record)
    latest = record.latest
    copy_stream.drain(latest.device)
    tier = latest.bytes_by_tier
    device, verification = device_total(tier), None
    if latest.drafted:
        tokens = (latest.accepted + latest.rounds) / latest.rounds
        verification = Verification(latest.rounds, latest.accepted / latest.drafted, tokens)
    return Stats(
        prefills=latest.steps["prefill"],
        extends=latest.steps["extend"],
        pre_decodes=latest.steps["pre-decode"],
        decodes=latest.steps["decode"],
        replays=latest.replays,
        lanes=max(made.lanes for graph in record.graphs for made in graph.rewrites.made.values()),
        ranks=latest.ranks,
        compiles=sum(len(graph.rewrites.made) for graph in record.graphs),
        left_exact=left_exact(record),
        seconds=latest.seconds,
        python_seconds=latest.python_seconds,
        pairs_ahead=pairs(latest.fetched, latest.pair_bytes),
        pairs_corrected=pairs(latest.corrected, latest.pair_bytes),
        bytes_to_device=sum(int(count) for count in [*latest.fetched, *latest.corrected]),
        bytes_to_host=latest.bytes_to_host,
        bytes_by_tier=dict(tier),
        device_bytes=device,
        host_bytes=tier.get("host", 0),
        kv_ratio=device / max(1, latest.full_cache_bytes),
        verification=verification,
    )


def left_exact(record: ModelRecord) -> dict[str, int]:
    """The number of attentions that stay exact, by reason: the most in any graph of the model."""
    counts = [collections.Counter(item.reason for item in graph.captured.left_alone) for graph in record.graphs]
    return dict(functools.reduce(operator.or_, counts, collections.Counter()))


def pairs(counts: Sequence[Tensor], pair_bytes: Sequence[int]) -> int:
    """Number of KV pairs of one head, from each layer's bytes."""
    return sum(int(count) // size for count, size in zip(counts, pair_bytes, strict=True))


def no_statistics(record: ModelRecord) -> SpecacheError:
    why = "this model has run no graph of this backend. Call model.compile(backend='specache') and generate first"
    if record.unused is not None:
        why = f"the newest generation ran no compiled graph: {record.unused}"
    elif record.absorbed:
        why = (
            f"the {record.absorbed} latent attentions of this model are rewritten (absorbed), but read Hugging Face's "
            "own cache, which is not compressed. Choose another model to compress its cache"
        )
    elif record.exact:
        why = f"every attention stays exact: {record.exact}"
    elif record.calls:
        why = "no attention was found in the graphs of this model"
    return SpecacheError(f"there are no statistics: {why}")
