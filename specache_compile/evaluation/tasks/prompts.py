"""Prompts from a person's own files: cut to the model's context, with or without a chat template or a separate
question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specache_compile.errors import SpecacheError

from .task import Ask, Bench


def without_middle(ids: list[int], most: int) -> list[int]:
    """All tokens, or the first and the last `most` / 2 where there are more."""
    return ids if len(ids) <= most else [*ids[: most // 2], *ids[len(ids) - (most - most // 2) :]]


def around(bench: Bench, chat: bool) -> tuple[list[int], list[int]]:
    """The tokens before and behind a prompt's own: those of a chat's turn, or a BOS and nothing."""
    return bench.reader.around() if chat else (bench.reader.begin(), [])


def parted(
    bench: Bench, before: Sequence[int], context: str, behind: Sequence[int], new_tokens: int,
    references: tuple[str, ...], tags: dict[str, Any] | None = None,
) -> Ask:  # fmt: skip
    """`before`, a context and the question `behind` it, encoded separately. The context loses its middle where all
    three and an answer of `new_tokens` do not fit the model's context."""
    room = bench.limit - new_tokens - len(before) - len(behind)
    if room < 1:
        raise SpecacheError(
            f"a question of {len(behind):,} tokens and an answer of {new_tokens:,} leave no room for a text in the "
            f"model's context of {bench.limit:,}"
        )
    kept = without_middle(bench.reader.encode(context), room)
    return Ask([*before, *kept, *behind], references, tags or {}, len(behind))
