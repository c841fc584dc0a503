"""Eviction policies by name. Each file has one function that computes the importance of the kept pairs.

The least important pair is evicted. A new policy is a file here and a line in POLICIES; `methods` registers it as a
method.
"""

from __future__ import annotations

from . import h2o, random, roco, scissorhands, streaming_llm, tova
from .history import Policy

POLICIES: dict[str, Policy] = {
    "random": random.importance,
    "streaming_llm": streaming_llm.importance,
    "scissorhands": scissorhands.importance,
    "h2o": h2o.importance,
    "tova": tova.importance,
    "roco": roco.importance,
}
