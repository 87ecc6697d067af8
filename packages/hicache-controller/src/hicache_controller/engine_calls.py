"""EngineCalls: the seam to the engine, where its one thread calls in and its callbacks are called."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from .interrupts import hold_interrupts, let_interrupts_in
from .wait_bound import WaitBound

logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class EngineCalls:
    """The public calls of one engine: which thread makes them, and what they raise when they end.

    A public method does its work in ``with calls:``. Calls may be nested: a tree shares the object of its controller,
    and callbacks of the engine call both. Only the outermost call matters for what follows:

    - Interrupts are held back until it ends; waits let them in with :func:`~.interrupts.interruptibly`.
    - What a callback of the engine raises (``device_free_fn``, a listener) interrupts nothing, where it is called
      through :meth:`call`. It is raised when the outermost call ends: the first error, after every step was done.
      Later ones are logged. A call that would lose its result by that keeps it, and calls :meth:`raise_first` before it
      hands the result out; within another public call that does nothing, so the outer one gets the result.

    The first call binds the thread; a call from another one is an error until that one has called
    :meth:`adopt_thread`. A call with nothing to do needs only :meth:`check_thread`, which is much cheaper.

    Parameters
    ----------
    name
        What is called, for messages.

    Attributes
    ----------
    depth
        Calls under way, one within the other.
    bound
        What the call's waits for storage share, from the first of them to its end; see ``StorageLink.one_call``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: int | None = None
        self._thread_name = ""
        self.depth = 0
        self._holds = False
        self._error: BaseException | None = None
        self.bound: WaitBound | None = None
        self._bound_before: WaitBound | None = None

    # The thread

    def check_thread(self) -> None:
        """Raise RuntimeError unless the calling thread is the one that makes the calls; the first becomes it."""
        if self._thread == threading.get_ident():
            return
        if self._thread is not None:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} calls the {self._name} of thread {self._thread_name!r}; "
                "only one thread may: call adopt_thread() in the thread that takes over, while the other makes no call"
            )
        self._bind()

    def adopt_thread(self) -> None:
        """Let the calling thread make the calls from now on.

        Raises
        ------
        RuntimeError
            While another thread is in a call.
        """
        if self.depth and self._thread != threading.get_ident():
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} adopts the {self._name}, which thread "
                f"{self._thread_name!r} is in a call of; adopt_thread() must come after that call"
            )
        self._bind()

    def _bind(self) -> None:
        self._thread_name = threading.current_thread().name
        self._thread = threading.get_ident()

    # Calls in

    def __enter__(self) -> None:
        """Begin a public call."""
        if self._thread != threading.get_ident():
            self.check_thread()
        if not self.depth:
            self._holds = hold_interrupts()
            self._bound_before = self.bound
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it; the outermost raises the first error of a callback, unless an interrupt leaves it."""
        self.depth -= 1
        if self.depth:
            return
        first, self.bound = self._error, self._bound_before
        try:
            if first is not None:
                self._error = None
                if error is None or (error is not first and isinstance(error, Exception)):
                    raise first
                if error is not first:
                    _log(first)
        finally:
            if self._holds:
                let_interrupts_in()

    # Calls out

    def call(
        self, callback: Callable[Parameters, Result], *arguments: Parameters.args, **keywords: Parameters.kwargs
    ) -> Result | None:
        """Call something that runs the engine's code; None where it raises, and the error is raised at the end."""
        try:
            return callback(*arguments, **keywords)
        except BaseException as error:
            if self._error is None:
                self._error = error
            elif error is not self._error:
                _log(error)
            return None

    def raise_first(self) -> None:
        """Raise the first error of a callback, unless an outer public call will."""
        error = self._error
        if error is not None and self.depth <= 1:
            self._error = None
            raise error


def _log(error: BaseException) -> None:
    logger.error("another call of the engine's code failed, with %r", error, exc_info=error)
