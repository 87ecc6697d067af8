"""Holds Ctrl-C back while streams and books change together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Result = TypeVar("Result")
_Arrived = list[Callable[[], object]]
_held: _Arrived | None = None  # calls of handlers that the block which the main thread is in holds back


def _let_go() -> None:
    global _held
    _held = None


os.register_at_fork(after_in_child=_let_go)  # another thread's child has no main thread that would


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let the handlers of SIGINT and SIGTERM run when the block is left, not within it; see :func:`interruptibly`.

    A handler that raises, as Ctrl-C's does, may do so between any two steps of Python. Only the main thread runs
    handlers, so in others this does nothing; nor does it where a signal has no handler in Python. A handler that is
    installed within the block, such as by a callback of the engine, stays, and is not held back.
    """
    global _held
    if _held is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: _Arrived = []

    def note(number: int, frame: FrameType | None) -> None:
        # Once the block is over it is as if this were the handler itself, should an interrupt keep it in its place.
        if _held is arrived:
            arrived.append(partial(handlers[number], number, frame))
        else:
            handlers[number](number, frame)

    handlers = {int(number): handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    try:
        _held = arrived
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        _held = None
        for number, handler in handlers.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
        _handle(arrived)


def interruptibly(wait: Callable[[], Result]) -> Result:
    """Wait with interrupts let in, whatever block this is called in: that one has to stand an error from here."""
    global _held
    held = _held
    if held is None or threading.current_thread() is not threading.main_thread():
        return wait()
    try:
        _held = None
        _handle(held)
        return wait()
    finally:
        _held = held


def _handle(arrived: _Arrived) -> None:
    """Call the handlers of what has arrived, each though one before it raises."""
    with ExitStack() as calls:
        while arrived:
            calls.callback(arrived.pop())
