"""FailureLog and LogLimit: failures are seen at WARNING, and none fills the log."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


class FailureLog:
    """Logs failed transfers: the first of each direction and kind of error as a warning, all others at DEBUG.

    Safe to call from several threads, which may both warn of the first.
    """

    def __init__(self) -> None:
        self._warned: set[tuple[str, type[BaseException]]] = set()

    def note(self, direction: str, error: BaseException) -> None:
        """Log that a transfer failed."""
        kind = (direction, type(error))
        first = kind not in self._warned
        self._warned.add(kind)
        if first:
            logger.warning(
                "a %s failed with %s; others are logged at DEBUG and counted",
                direction,
                repr(error),
                exc_info=error,
            )
        else:
            logger.debug("a %s failed with %s", direction, repr(error), exc_info=error)


class LogLimit:
    """Lets each thing be logged once in ``seconds``. Safe to call from several threads, which may both log it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._again_at: dict[str, float] = {}

    def due(self, what: str) -> bool:
        """Return whether it may be logged now; then it may not again for a while."""
        now = time.monotonic()
        if now < self._again_at.get(what, now):
            return False
        self._again_at[what] = now + self._seconds
        return True
