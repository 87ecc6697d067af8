"""When to try a failing medium again, and when to say that it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Backoff:
    """Pauses that double from ``first`` to ``limit`` seconds while something keeps failing; thread-safe.

    Parameters
    ----------
    clock
        Seconds that grow, such as ``time.monotonic``.
    first, limit
        Seconds of the first pause and of the longest.
    """

    def __init__(self, clock: Callable[[], float], *, first: float = 0.1, limit: float = 30.0) -> None:
        self._clock = clock
        self._first = first
        self._limit = limit
        self._pause = 0.0
        self._until = 0.0
        self._lock = threading.Lock()  # guards the pause and its end

    @property
    def active(self) -> bool:
        """Whether the pause is on."""
        return self._pause > 0 and self._clock() < self._until

    @property
    def failing(self) -> bool:
        """Whether nothing has succeeded since the last failure."""
        return self._pause > 0

    def failed(self) -> bool:
        """Note a failure; return whether it is the first since a success, and so the one to log."""
        with self._lock:
            if self.active:  # several threads failing at once are one failure
                return False
            news = self._pause == 0
            self._pause = self._first if news else min(2 * self._pause, self._limit)
            self._until = self._clock() + self._pause
            return news

    def succeeded(self) -> bool:
        """Note a success; return whether it ends a series of failures."""
        if not self._pause:
            return False
        with self._lock:
            ended = self._pause > 0
            self._pause = 0.0
            return ended
