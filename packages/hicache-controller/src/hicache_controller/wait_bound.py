"""WaitBound: how long one call of the scheduler's thread may still wait for storage."""

from __future__ import annotations

import time

from hicache_kernels.validation import seconds


def checked_timeout(timeout: float | None) -> float | None:
    """Return a timeout in seconds as a float, or None for none.

    Raises
    ------
    TypeError, ValueError
        Where it is no number, negative or not finite.
    """
    return None if timeout is None else seconds("timeout", timeout)


class WaitBound:
    """Seconds that all waits of a call share, counted from the first of them.

    Time that passes between two waits counts, too: it may have gone to another rank, which waited for its storage.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._seconds
        return max(0.0, self._until - now)
