"""TransferGate: lets transfers through until a pool is closed, and knows when none is in flight any more."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hicache_kernels import TransferResult


class TransferGate:
    """Calls under way and results not yet done of one pool.

    Parameters
    ----------
    name
        Of the pool, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._calls = 0
        self._closed = False
        self._results: deque[TransferResult] = deque()

    @property
    def closed(self) -> bool:
        """Whether the pool has been closed."""
        return self._closed

    def check_open(self) -> None:
        """Raise RuntimeError once the pool is closed."""
        if self._closed:
            raise RuntimeError(f"this {self._name} has been destroyed; make a new one")

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Hold the pool open while a transfer is queued."""
        with self._changed:
            self.check_open()
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def track(self, result: TransferResult) -> TransferResult:
        """Remember a result until its events are done; call it inside :meth:`transfer`."""
        if result.device_released is not None or result.host_ready is not None:
            with self._changed:
                self._forget_done()
                self._results.append(result)
        return result

    def close(self) -> None:
        """Refuse further transfers. Takes no lock: in a forked child, a thread that is gone may hold it."""
        self._closed = True

    def drain(self) -> None:
        """Refuse further transfers, and wait for the calls under way and the results in flight."""
        self.close()
        with self._changed:
            self._changed.wait_for(lambda: self._calls == 0)
            results = list(self._results)
        for result in results:
            for event in (result.device_released, result.host_ready):
                if event is not None:
                    event.synchronize()
        with self._changed:
            self._forget_done()

    def _forget_done(self) -> None:
        while self._results and _done(self._results[0]):
            self._results.popleft()


def _done(result: TransferResult) -> bool:
    events = (result.device_released, result.host_ready)
    return all(event is None or event.query() for event in events)  # type: ignore[no-untyped-call]
