"""The number of tokens to draft before the next verification (option verify)."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass, field

# Most tokens of a draft with "auto", the lengths of its first rounds, and the number of rounds that it remembers.
MOST = 64
FIRST_ROUNDS = (4, 8, 4, 8)
REMEMBERED = 16
# The weight of a round's acceptance after each later round; and the initial counts of drafted tokens.
DECAY = 0.95
ACCEPTED, REJECTED = 4.0, 1.0


@dataclass
class DraftLength:
    """The draft length γ: fixed, or with "auto" the length with the most expected tokens per second.

    option: the option verify.
    accepted, rejected: counts of drafted tokens, with decaying weights.
    each: seconds for each drafted token.
    rounds: tokens drafted and seconds of the latest rounds.

    A round of γ tokens is modelled to take `fixed` + γ·`each` seconds; both are medians, which a few slow rounds do not
    move. Each drafted token is accepted with probability a, so a round yields 1 + a + ... + a^γ tokens (arXiv
    2211.17192, equation 1).
    """

    option: int | str
    accepted: float = ACCEPTED
    rejected: float = REJECTED
    each: float = 0.0
    rounds: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def next(self) -> int:
        """Tokens to draft in the next round."""
        if isinstance(self.option, int):
            return self.option
        if len(self.rounds) < len(FIRST_ROUNDS):
            return FIRST_ROUNDS[len(self.rounds)]
        fixed = max(statistics.median(seconds - drafted * self.each for drafted, seconds in self.rounds), 1e-9)
        return max(range(1, MOST + 1), key=lambda drafted: self.expected(drafted) / (fixed + drafted * self.each))

    def expected(self, drafted: int) -> float:
        """Expected tokens of a round with so many drafted ones, the verification's own token included."""
        probability = self.accepted / (self.accepted + self.rejected)
        return sum(probability**place for place in range(drafted + 1))

    def note(self, drafted: int, accepted: int, seconds: float | None) -> None:
        """Record a round; seconds is None if the round also compiled."""
        self.accepted = self.accepted * DECAY + accepted
        self.rejected = self.rejected * DECAY + (accepted < drafted)
        if seconds is not None:
            self.took(drafted, seconds)

    def took(self, drafted: int, seconds: float) -> None:
        """Record how long a round of so many drafted tokens took."""
        self.rounds.append((drafted, seconds))
        slopes = [(t - s) / (n - m) for (m, s), (n, t) in itertools.combinations(self.rounds, 2) if n != m]
        if slopes:
            self.each = max(0.0, statistics.median(slopes))
