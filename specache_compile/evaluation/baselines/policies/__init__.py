"""Eviction policies by name, each one file with one function: what each kept pair is worth; the lowest goes.

A new policy is a file here and a line in POLICIES; `methods` makes a method of each.
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
