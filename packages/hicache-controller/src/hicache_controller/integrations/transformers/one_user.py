"""OneUser: the thread that uses what is made for one thread; another one is refused meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable


class OneUser:
    """The thread that uses something, from its first entry until it has left as often; any other may follow it.

    Parameters
    ----------
    name
        What is used, for messages.
    adopt
        Called by a thread that follows another one.
    """

    def __init__(self, name: str, adopt: Callable[[], object] | None = None) -> None:
        self._name = name
        self._adopt = adopt
        self._lock = threading.Lock()  # guards the two below
        self._thread: threading.Thread | None = None
        self._entries = 0

    def enter(self) -> None:
        """Use it, as often as wanted, until as many calls of :meth:`leave`.

        Raises
        ------
        RuntimeError
            While another thread uses it.
        """
        with self._lock:
            self._check()
            if self._thread is not (thread := threading.current_thread()):
                if self._adopt is not None:
                    self._adopt()
                self._thread, self._entries = thread, 0
            self._entries += 1

    def leave(self) -> None:
        """Take back an entry."""
        with self._lock:
            self._entries -= 1
            if not self._entries:
                self._thread = None

    def check(self) -> None:
        """Raise RuntimeError while another thread uses it."""
        with self._lock:
            self._check()

    def _check(self) -> None:
        thread, mine = self._thread, threading.current_thread()
        if thread is not None and thread is not mine and thread.is_alive():
            raise RuntimeError(
                f"thread {mine.name!r} uses {self._name} while thread {thread.name!r} does, which may have a session "
                "open; one thread at a time may: put a lock around sessions, or give every thread a cache of its own"
            )

    def __enter__(self) -> None:
        """Use it for the block."""
        self.enter()

    def __exit__(self, *_: object) -> None:
        """Leave it."""
        self.leave()
