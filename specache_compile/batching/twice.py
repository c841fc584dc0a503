"""Errors that come again, and errors that do not: a signal's handler may raise in the middle of any call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class FailedTwice(Exception):
    """A call that raised two times in a row. error: the second one's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def twice(call: Callable[[], T]) -> T:
    """The result of a call that can be repeated.

    If it raises, it is repeated once. An error that does not come again was a signal handler's, and is raised. One that
    comes again is the call's own: FailedTwice.
    """
    try:
        return call()
    except Exception:
        try:
            call()
        except Exception as error:
            raise FailedTwice(error) from error
        raise
