"""TransferGate: lets transfers through until a pool is closed, and knows when none is in flight any more."""

from __future__ import annotations

import threading
import time
from collections import deque

from hicache_kernels import TransferResult

POLL_SECONDS = 0.0005
"""How often draining looks whether the calls under way have returned; they only queue work."""


class TransferGate:
    """Calls under way and results not yet done of one pool; ``with gate:`` holds the pool open for one call.

    It has no lock, so a call costs little: what threads do to a dictionary or a deque in one step is atomic. A call
    notes its thread before it looks whether the gate is closed, and draining closes the gate before it looks for
    threads: one of the two sees the other. A note that an interrupt left is replaced by the thread's next call, and
    does not keep that thread from draining.

    Parameters
    ----------
    name
        Of the pool, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._callers: dict[int, None] = {}  # threads with a call under way
        self._results: deque[TransferResult] = deque()

    @property
    def closed(self) -> bool:
        """Whether the pool has been closed."""
        return self._closed

    def check_open(self) -> None:
        """Raise RuntimeError once the pool is closed."""
        if self._closed:
            raise RuntimeError(f"this {self._name} has been destroyed; make a new one")

    def __enter__(self) -> None:
        caller = threading.get_ident()
        self._callers[caller] = None
        if self._closed:
            self._callers.pop(caller, None)
            self.check_open()

    def __exit__(self, *_: object) -> None:
        self._callers.pop(threading.get_ident(), None)

    def track(self, result: TransferResult) -> TransferResult:
        """Remember a result until its events are done; call it inside ``with gate:``, which draining waits for."""
        if result.device_released is None and result.host_ready is None:
            return result
        results = self._results
        while results:
            try:
                oldest = results.popleft()
            except IndexError:  # another thread looks at it
                break
            # Out of the deque while its events are asked, or two threads that find it done would drop the next as well.
            if not _done(oldest):
                results.appendleft(oldest)
                break
        results.append(result)
        return result

    def close(self) -> None:
        """Refuse new transfers."""
        self._closed = True

    def drain(self) -> None:
        """Refuse new transfers, and wait for the calls under way and the results in flight."""
        self.close()
        while any(caller != threading.get_ident() for caller in list(self._callers)):
            time.sleep(POLL_SECONDS)
        for result in tuple(self._results):
            for event in (result.device_released, result.host_ready):
                if event is not None:
                    event.synchronize()
        self._results.clear()


def _done(result: TransferResult) -> bool:
    events = (result.device_released, result.host_ready)
    return all(event is None or event.query() for event in events)  # type: ignore[no-untyped-call]
