"""Events: moments of a transfer that other work can poll or wait for, on a CUDA stream or on a CPU thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from . import forks


@runtime_checkable
class Event(Protocol):
    """What acks and hazards are made of; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Return whether the moment has come."""
        ...

    def wait(self, stream: Any = None) -> None:
        """Let work queued afterwards on ``stream`` (default: the current one) follow this event."""
        ...

    def synchronize(self) -> object:
        """Block the calling thread until the moment has come."""
        ...


class Signal(Event, Protocol):
    """An event a transfer fires itself, once."""

    def fire(self, events: Sequence[torch.cuda.Event] | None = None) -> None:
        """Complete with the given events, or with the work queued so far where they are not known."""
        ...


class HostSignal:
    """An event of CPU work; waiting for it blocks the thread, whatever the stream.

    A transfer makes one for each layer, so it is cheap.

    Invariant: until it has fired, its lock is held; after that only for moments, by those who have waited.
    """

    __slots__ = ("_fired", "_forks", "_lock")

    def __init__(self) -> None:
        self._fired = False
        self._forks = forks.count
        self._lock = threading.Lock()  # guards nothing: those who wait try to take it
        self._lock.acquire()

    def query(self) -> bool:
        """Return whether it has fired."""
        return self._fired

    def wait(self, stream: Any = None) -> None:
        """Block until it has fired."""
        self.synchronize()

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block until it has fired, at most ``timeout`` seconds; return whether it has."""
        if not self._fired and self._forks != forks.count:
            raise forks.fork_error("the transfer or the storage operation that is waited for")
        if not self._fired and self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self._lock.release()
        return self._fired

    def fire(self, events: Sequence[torch.cuda.Event] | None = None) -> None:
        """Let all who wait go on; called by one thread at a time."""
        if not self._fired:
            self._fired = True
            self._lock.release()


class CompletedEvent:
    """An event that has always come."""

    __slots__ = ()

    def query(self) -> bool:
        """Return True."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def fire(self, events: Sequence[torch.cuda.Event] | None = None) -> None:
        """Change nothing."""


COMPLETED = CompletedEvent()


class StreamSignal:
    """An event of work on CUDA streams: known once that work is queued, come once all its events have.

    The queueing may happen on another thread, so those who wait block until it has happened, which is short, and
    then wait as for CUDA events.
    """

    __slots__ = ("_events", "_queued")

    def __init__(self) -> None:
        self._queued = HostSignal()
        self._events: tuple[torch.cuda.Event, ...] = ()

    def query(self) -> bool:
        """Return whether the work is queued and done."""
        return self.queued and all(_has_come(event) for event in self._events)

    @property
    def queued(self) -> bool:
        """Whether the work is queued."""
        return self._queued.query()

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let ``stream`` (default: the current one) wait; the calling thread waits for the queueing alone."""
        self._queued.wait()
        for event in self._events:
            event.wait(stream)

    def synchronize(self) -> None:
        """Block the calling thread until the work is done."""
        self._queued.wait()
        for event in self._events:
            event.synchronize()

    def fire(self, events: Sequence[torch.cuda.Event] | None = None) -> None:
        """Come with ``events``, or with None, with what the current stream holds now; only the first call counts."""
        if self.queued:
            return
        try:
            self._events = (torch.cuda.current_stream().record_event(),) if events is None else tuple(events)
        finally:
            # Also where recording fails, as it does once a kernel has faulted: no one may wait for ever.
            self._queued.fire()


def _has_come(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def is_queued(event: Event) -> bool:
    """Return whether a stream can be made to wait for an event without blocking the calling thread."""
    if isinstance(event, StreamSignal):
        return event.queued
    return event.query() if isinstance(event, HostSignal) else True


def wait_until_done(event: Event, timeout: float) -> bool:
    """Block until ``event`` has come or ``timeout`` seconds have passed, and return whether it has come.

    Only a :class:`HostSignal` is waited for without polling: the others have no bounded wait.
    """
    if isinstance(event, HostSignal):
        return event.synchronize(timeout)
    deadline = time.monotonic() + timeout
    while not event.query():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0005)
    return True
