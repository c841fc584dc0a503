"""The cost of drafting and verifying (option verify), by the event simulation: computed, not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specache_compile.generate import look_up
from specache_compile.options import MethodOptions

from .devices import Device
from .step_kernels import TierOp, Traced, captured, full_cache, kernels_of, over_tiers
from .step_time import computed

# The chance that a drafted token is right when those before it are. SmolLM2 under the default options has a higher one
# (benchmarks/results/verification.md).
ACCEPTED = 0.97
# Drafted tokens in the explanation where the option says "auto".
DRAFTED = 16


@dataclass(frozen=True)
class Round:
    """A draft and its verification.

    drafted, tokens: drafted tokens, and expected tokens of the round.
    draft_seconds, verification_seconds: seconds of each.
    bytes: from the host.
    offload_seconds, offload_bytes: a step of the method `offload`, to compare with.
    """

    drafted: int
    tokens: float
    draft_seconds: float
    verification_seconds: float
    bytes: float
    offload_seconds: float
    offload_bytes: float

    @property
    def seconds_per_token(self) -> float:
        return (self.draft_seconds + self.verification_seconds) / self.tokens

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens


def drafted_tokens(options: MethodOptions) -> int:
    if options.lookup:
        return look_up.DRAFTED
    return options.verify if isinstance(options.verify, int) else DRAFTED


def round_of(traced: Mapping[str, Traced], device: Device, accepted: float) -> Round:
    """The round of these rewritten graphs, by phase: a draft and its exact pass, or a looked-up draft, which costs
    nothing, and its widened decode."""
    load = traced["decode"].load
    looked_up = load.options.lookup and "widened" in traced
    drafted = drafted_tokens(load.options)

    def phase(name: str, tiers: TierOp = over_tiers) -> tuple[float, float]:
        """Seconds, and bytes from the host."""
        kernels = kernels_of(traced[name], device, load.length, load.batch, tiers)
        kernels = captured(kernels) if name == "decode" and tiers is over_tiers else kernels
        return computed(kernels, device).seconds, sum(kernel.to_device for kernel in kernels)

    step, fetched = (0.0, 0.0) if looked_up else phase("decode")
    before = phase("pre-decode")[0] if "pre-decode" in traced and not looked_up else 0.0
    verification, streamed = phase("widened" if looked_up else "extend")
    offload, offloaded = phase("pre-decode" if "pre-decode" in traced else "decode", full_cache(2, on_host=True))
    return Round(
        drafted, sum(accepted**place for place in range(drafted + 1)), drafted * step + before, verification,
        drafted * fetched + streamed, offload, offloaded,
    )  # fmt: skip
