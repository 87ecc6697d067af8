"""Worker: runs jobs one at a time and in order, on a thread of its own or in the thread that submits them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .events import Event, is_queued
from .forks import refuse_in_forks
from .interrupts import interruptibly

if TYPE_CHECKING:
    from .devices import Device
    from .transfer_handle import InFlightOperation

logger = logging.getLogger(__name__)

_STOP_CHECK_SECONDS = 0.1


class WorkerStoppedError(RuntimeError):
    """A job was dropped because its worker stopped before it ran."""


class Worker:
    """Runs jobs in the order in which they are submitted, each after the events it has to follow.

    A worker is to a transfer on a GPU what a stream is, and gives transfers on the CPU and calls to storage the same
    order. The caller goes on at once, unless the worker is synchronous or a job is run inline.

    Invariant: one job runs at a time, and it waits only for events of jobs submitted before it, by whichever worker,
    and for events of callers. So workers never wait for each other in a circle.

    Parameters
    ----------
    name
        Of the thread.
    device
        Where the jobs do their work: it orders them after their events.
    synchronous
        Run each job before ``submit`` returns; there is no thread then.
    max_pages
        Pages of jobs that may wait; one job may always wait. None: no bound.

    Attributes
    ----------
    device
        As given.
    depth
        Pages waiting.
    stopping
        Whether no other job is to start.
    """

    def __init__(self, name: str, device: Device, *, synchronous: bool = False, max_pages: int | None = None) -> None:
        refuse_in_forks(self)
        self._name = name
        self.device = device
        self._max_pages = max_pages
        self._changed = threading.Condition()  # guards the jobs that wait, their pages, and whether one runs
        self._jobs: deque[tuple[InFlightOperation, Sequence[Event]]] = deque()
        self.depth = 0
        self._running = self.stopping = False
        self._thread: threading.Thread | None = None
        if not synchronous:
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def submit(
        self, job: InFlightOperation, after: Sequence[Event] = (), *, inline: bool = False, timeout: float = 0.0
    ) -> bool:
        """Run ``job`` after the jobs before it and after the events ``after``.

        Parameters
        ----------
        inline
            Run it in this thread where no job is before it and no event has to be waited for.
        timeout
            Seconds to wait for room in the queue.

        Returns
        -------
        bool
            Whether the job has run or will; False where the queue stayed full, or the worker is stopped, which abandons
            the job.
        """
        if self._thread is None and not self.stopping:  # the caller's thread alone runs jobs
            with self.device.scope():
                self._run(job, after)
            return True
        pages = job.pages
        with self._changed:
            if not self._has_room(pages):
                interruptibly(lambda: self._changed.wait_for(lambda: self._has_room(pages), timeout))
                if not self._has_room(pages):
                    return False
            idle = not (self._running or self._jobs or self.stopping)
            here = inline and idle and all(map(is_queued, after))
            if not (here or self.stopping):
                self._jobs.append((job, after))
                self.depth += pages
                self._changed.notify_all()
                return True
            self._running |= here
        if not here:
            self._run(job, after)  # which abandons it
            return False
        try:
            with self.device.scope():
                self._run(job, after)
        finally:
            self._end()
        return True

    def withdraw(self, job: InFlightOperation) -> bool:
        """Take a job that has not started out of the queue, and return whether it was there."""
        with self._changed:
            found = next((entry for entry in self._jobs if entry[0] is job), None)
            if found is not None:
                self._jobs.remove(found)
                self.depth -= job.pages
                self._changed.notify_all()
        return found is not None

    def drain(self, timeout: float) -> bool:
        """Block until no job waits or runs, at most ``timeout`` seconds; return whether none does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout)

    def stop(self) -> None:
        """Let the running job end, abandon those that wait, and accept no more; returns at once."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Stop, and return whether the running job and the thread ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        with self._changed:  # a job that runs inline
            return self._changed.wait_for(lambda: not self._running, max(0.0, deadline - time.monotonic()))

    def _has_room(self, pages: int) -> bool:
        return self._max_pages is None or self.stopping or not self._jobs or self.depth + pages <= self._max_pages

    def _work(self) -> None:
        with self.device.scope():
            while True:
                with self._changed:
                    while self._running or not (self._jobs or self.stopping):
                        self._changed.wait()
                    if not self._jobs:
                        return
                    job, after = self._jobs.popleft()
                    self.depth -= job.pages
                    self._running = True
                    self._changed.notify_all()
                try:
                    self._run(job, after)
                except BaseException:  # the job has it as its error; the jobs after it still run
                    logger.exception("a job of %s ended with something that is not an Exception", self._name)
                finally:
                    self._end()

    def _run(self, job: InFlightOperation, after: Sequence[Event]) -> None:
        try:
            for event in after:
                while not (self.stopping or self.device.order(event, _STOP_CHECK_SECONDS)):
                    pass
        except Exception as error:  # such as after a fault of the device: those who wait for the job must learn of it
            job.abandon(error)
            return
        if self.stopping:
            job.abandon(WorkerStoppedError(f"thread {self._name} was closed before this could start"))
        else:
            job.run()

    def _end(self) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()
