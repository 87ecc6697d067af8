"""FailureLog and LogLimit: let failures be seen at WARNING, and none fill the log."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)


class FailureLog:
    """Logs failed transfers: the first of each direction and kind of error as a warning, all others at DEBUG.

    Safe to call from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._warned: set[tuple[str, type[BaseException]]] = set()

    def note(self, direction: str, error: BaseException) -> None:
        """Log that a transfer failed."""
        with self._lock:
            first = (direction, type(error)) not in self._warned
            self._warned.add((direction, type(error)))
        if first:
            logger.warning(
                "a %s failed with %s; further ones are logged at DEBUG and counted",
                direction,
                repr(error),
                exc_info=error,
            )
        else:
            logger.debug("a %s failed with %s", direction, repr(error), exc_info=error)


class LogLimit:
    """Says what may be logged again: each thing once in ``seconds``. Safe to call from several threads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()  # guards the next
        self._again_at: dict[str, float] = {}

    def due(self, what: str) -> bool:
        """Tell whether it may be logged, and note that it is."""
        now = time.monotonic()
        with self._lock:
            if now < self._again_at.get(what, now):
                return False
            self._again_at[what] = now + self._seconds
            return True
