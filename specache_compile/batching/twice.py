"""Distinguishes an error of a call from one that a signal handler raised during it, by repeating the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class FailedTwice(Exception):
    """Raised for a call that raised twice in a row. error: the second error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def twice(call: Callable[[], T]) -> T:
    """Call a function that can be repeated.

    If the call raises, it is repeated once. If the second call succeeds, a signal handler raised the error, which is
    raised again. If the second call raises too, the error is the call's own: FailedTwice.
    """
    try:
        return call()
    except Exception:
        try:
            call()
        except Exception as error:
            raise FailedTwice(error) from error
        raise
