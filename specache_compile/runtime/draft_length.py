"""How many tokens to draft before the next verification (option verify)."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass, field

# The most that "auto" drafts, the lengths that its first rounds try, and the rounds that it goes by.
MOST = 64
FIRST_ROUNDS = (4, 8, 4, 8)
REMEMBERED = 16
# What a round counts for in the acceptance after each later one; and the drafted tokens that it begins with.
DECAY = 0.95
ACCEPTED, REJECTED = 4.0, 1.0


@dataclass
class DraftLength:
    """γ as it was asked for; with "auto" the one that promises most tokens a second, by what the rounds so far took.

    asked: the option.
    accepted, rejected: drafted tokens that were; those of older rounds count less.
    each: seconds that a drafted token takes.
    rounds: the newest ones: tokens drafted, and seconds.

    A round drafts γ tokens and verifies them. The round is taken to last `fixed` + γ·`each` seconds; both are medians,
    which a few slow rounds do not move. Each drafted token is taken to be right with one probability a, so that a round
    yields 1 + a + ... + a^γ tokens (arXiv 2211.17192, equation 1).
    """

    asked: int | str
    accepted: float = ACCEPTED
    rejected: float = REJECTED
    each: float = 0.0
    rounds: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def next(self) -> int:
        """Tokens to draft now."""
        if isinstance(self.asked, int):
            return self.asked
        if len(self.rounds) < len(FIRST_ROUNDS):
            return FIRST_ROUNDS[len(self.rounds)]
        fixed = max(statistics.median(seconds - drafted * self.each for drafted, seconds in self.rounds), 1e-9)
        return max(range(1, MOST + 1), key=lambda drafted: self.expected(drafted) / (fixed + drafted * self.each))

    def expected(self, drafted: int) -> float:
        """Tokens that a round of so many drafted ones yields, the exact pass's own among them."""
        probability = self.accepted / (self.accepted + self.rejected)
        return sum(probability**place for place in range(drafted + 1))

    def note(self, drafted: int, accepted: int, seconds: float | None) -> None:
        """What a round has shown; no seconds where it also compiled something."""
        self.accepted = self.accepted * DECAY + accepted
        self.rejected = self.rejected * DECAY + (accepted < drafted)
        if seconds is not None:
            self.took(drafted, seconds)

    def took(self, drafted: int, seconds: float) -> None:
        """How long a round of so many drafted tokens lasted."""
        self.rounds.append((drafted, seconds))
        slopes = [(t - s) / (n - m) for (m, s), (n, t) in itertools.combinations(self.rounds, 2) if n != m]
        if slopes:
            self.each = max(0.0, statistics.median(slopes))
