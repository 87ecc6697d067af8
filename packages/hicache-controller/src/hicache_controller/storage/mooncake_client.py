"""The connection to a Mooncake Store: made in the background, bounded in time, never touched once it is closed."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

from ..mooncake_module import import_mooncake
from .backoff import Backoff

logger = logging.getLogger(__name__)

_STALE_CONNECTIONS = 8
_NO_REQUEST = bytes(64)  # not a request: a master that lives answers by hanging up
_environment = threading.Lock()  # guards the environment while a client is set up with variables of its own
_kept: list[Any] = []  # stores that could not be closed; ending them under a running call would end the process


class MooncakeDownError(Exception):
    """There is no connection, or the master did not answer in time."""


class MooncakeClient:
    """One client of a Mooncake Store; thread-safe.

    Mooncake's ``setup`` keeps the interpreter's lock, and retries for a minute and a half where there is no answer. So
    it is called on a thread of its own, once the master has shown that it lives, and with one attempt.

    Invariant: ``_running`` counts the calls inside Mooncake, and the store is closed only while it is 0.

    Parameters
    ----------
    master, deadline_seconds
        As :class:`MooncakeStorage` takes them.
    setup
        What Mooncake's ``setup`` takes: local host name, metadata server, bytes of the segment and of the local buffer,
        protocol, devices, and the master.
    clock
        Seconds that grow.

    Raises
    ------
    ImportError
        Where Mooncake or a library it needs is not installed.
    """

    def __init__(
        self, master: str, setup: Sequence[str | int], *, deadline_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._module = import_mooncake()
        self._master = master
        self._setup = setup
        self._deadline = deadline_seconds
        self._backoff = Backoff(clock)
        self._changed = threading.Condition()  # guards the store, the attempt, the buffers and the calls that run
        self._store: Any = None
        self._lost = False
        self._running = 0
        self._closed = False
        self._attempt: threading.Thread | None = None
        self._buffers: dict[int, int] = {}

    @property
    def failing(self) -> bool:
        """Whether there is no connection, or the last sign of the master was a failure."""
        return self._store is None or self._lost

    def ready(self) -> bool:
        """Whether calls make sense; where not, an attempt to get there begins in the background, unless too early."""
        with self._changed:
            if not self.failing:
                return True
            if not self._closed and self._attempt is None and not self._backoff.active:
                self._attempt = threading.Thread(target=self._try, name="hicache-mooncake", daemon=True)
                self._attempt.start()
            return False

    def wait_ready(self, seconds: float) -> bool:
        """Begin an attempt where one is due, and block until it is over, at most ``seconds``; whether calls make sense.

        Nothing is waited for while it is too early for another attempt.
        """
        with self._changed:
            if not self.ready():
                self._changed.wait_for(lambda: self._attempt is None, seconds)
            return not self.failing

    def lost(self, error: object) -> None:
        """Note that the master failed: no call makes sense until an attempt in the background has succeeded."""
        with self._changed:
            self._lost = True
        self._failed(error)

    def register(self, address: int, size: int) -> None:
        """Register host memory, now or when there is a connection; memory that is registered already is left alone."""
        with self._changed:
            if address in self._buffers:
                return
            self._buffers[address] = size
            store = self._store
        if store is not None:
            with contextlib.suppress(MooncakeDownError):
                self._check_registered(self.call("register_buffer", address, size), size)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store in this thread; needed where the call touches memory of the caller's.

        Raises
        ------
        MooncakeDownError
            Where there is no connection.
        """
        with self._changed:
            store = self._store
            if store is None:
                raise MooncakeDownError("not connected")
            self._running += 1
        try:
            return getattr(store, method)(*arguments)
        except RuntimeError as error:
            raise MooncakeDownError(f"{method}: {error}") from error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def call_in_time(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store that touches no memory of the caller's, and wait for it up to the deadline.

        Raises
        ------
        MooncakeDownError
            Where there is no connection, or no answer in time; a call that hangs keeps its thread.
        """
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(self.call(method, *arguments))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="hicache-mooncake-call", daemon=True).start()
        if not wait([answer], self._deadline).done:
            raise MooncakeDownError(f"{method} had no answer within {self._deadline} s")
        return answer.result()

    def close(self) -> None:
        """Unregister all memory and leave the store, once no call is inside it. Idempotent.

        Where a call hangs beyond the deadline, or the master is down, the client stays until the process ends: leaving
        under a call would crash, and leaving a dead master holds the interpreter's lock for seconds.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._attempt is None, self._deadline)
            store, self._store = self._store, None
            if store is None:
                return
            idle = self._changed.wait_for(lambda: self._running == 0, self._deadline)
            buffers, self._buffers = list(self._buffers), {}
        if idle:
            for address in buffers:
                store.unregister_buffer(address)
        if idle and self._answers():
            store.close()
        else:
            why = "the master is down" if idle else "a call hangs"
            logger.warning("Mooncake at %s: %s; its client stays until the process ends", self._master, why)
            _kept.append(store)

    def _try(self) -> None:
        """Connect, or find out whether the master is back."""
        store: Any = None
        works = False
        try:
            _check_alive(self._master, self._deadline)
            if self._store is None:
                store = self._set_up()
            else:
                self._ping()
            works = True
        except Exception as error:  # not raised on this thread: it delays the next attempt
            self._failed(error)
        with self._changed:
            self._attempt = None
            if works and not self._closed:
                if store is not None:
                    for address, size in self._buffers.items():
                        self._check_registered(store.register_buffer(address, size), size)
                    self._store, store = store, None
                self._lost = False
                if self._backoff.succeeded():
                    logger.info("Mooncake at %s: works again", self._master)
            self._changed.notify_all()
        if store is not None:  # closed meanwhile
            store.close()

    def _ping(self) -> None:
        """Ask the master something; after a restart each connection of Mooncake's pool fails once."""
        for _ in range(_STALE_CONNECTIONS):
            (code,) = self.call("batch_is_exist", ["hicache"])
            if code >= 0:
                return
        raise MooncakeDownError(f"code {code}")

    def _failed(self, error: object) -> None:
        if self._backoff.failed() and not self._closed:
            logger.warning("Mooncake at %s: %s; going on without it and trying again", self._master, error)

    def _answers(self) -> bool:
        try:
            _check_alive(self._master, self._deadline)
        except OSError:
            return False
        return not self._lost

    def _set_up(self) -> Any:
        store = self._module.MooncakeDistributedStore()
        with _bounded(self._deadline):
            code = store.setup(*self._setup)
        if code != 0:
            raise RuntimeError(f"setup returned {code}")
        return store

    def _check_registered(self, code: int, size: int) -> None:
        if code != 0:
            logger.warning(
                "Mooncake at %s: registering %d bytes of host memory returned %d; RDMA cannot use them",
                self._master,
                size,
                code,
            )


def _check_alive(master: str, seconds: float) -> None:
    """Raise ``OSError`` where no process listens, or the one that does is stuck; masters behind etcd are trusted."""
    if "://" in master:
        return
    host, _, port = master.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
        connection.settimeout(seconds)
        connection.sendall(_NO_REQUEST)
        with contextlib.suppress(ConnectionError):
            connection.recv(1)


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Give a client that is set up now one attempt and a deadline for its requests, where the user has not."""
    milliseconds = str(max(1, round(1000 * seconds)))
    wanted = {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
    }
    with _environment:
        ours = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)
