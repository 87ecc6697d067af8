"""RunningCalls: counts the calls inside a storage, so that closing it can wait for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class RunningCalls:
    """Calls that run, and whether more may begin; for calls from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the count, and whether it has ended
        self._count = 0
        self._ended = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count one call while it runs.

        Raises
        ------
        RuntimeError
            Where :meth:`end` came first.
        """
        with self._changed:
            if self._ended:
                raise RuntimeError("the storage is closed")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def end(self) -> bool:
        """Let no call begin any more, and wait for those that run; not to be called from within one.

        Returns
        -------
        bool
            Whether this was the first time.
        """
        with self._changed:
            first, self._ended = not self._ended, True
            self._changed.wait_for(lambda: self._count == 0)
            return first
