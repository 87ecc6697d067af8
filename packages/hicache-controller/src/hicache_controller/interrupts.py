"""Holds Ctrl-C back while several steps have to be done together."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module signal looks every handler up in an enum: 20 times as slow
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, TypeVar

_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))
Result = TypeVar("Result")
_Arrived = list[Callable[[], object]]
_held: HeldInterrupts | None = None  # the block that the main thread is in
_main = threading.main_thread().ident


def _start_anew() -> None:
    global _held, _main
    _held, _main = None, threading.main_thread().ident


os.register_at_fork(after_in_child=_start_anew)  # the thread that forks is the child's main thread, and in no block


class HeldInterrupts:
    """A block at whose end the handlers of SIGINT and SIGTERM run, not within it; see :func:`interruptibly`.

    A handler that raises, as Ctrl-C's does, may do so between any two steps of Python. Only the main thread runs
    handlers, so in others this does nothing; nor does it within another such block, or where a signal has no handler
    in Python. A handler that is installed within the block, such as by a callback of the engine, stays, and is not held
    back. A block is entered once.
    """

    __slots__ = ("_note", "arrived", "handlers")

    def __init__(self) -> None:
        self.arrived: _Arrived = []
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> None:
        """Take the place of the handlers."""
        global _held
        if _held is not None or threading.get_ident() != _main:
            return
        handlers = self.handlers

        def note(number: int, frame: FrameType | None) -> None:
            # After the block this calls the handler itself, should an interrupt have kept it in its place.
            if _held is self:
                self.arrived.append(partial(handlers[number], number, frame))
            else:
                handlers[number](number, frame)

        self._note = note
        for number in _SIGNALS:
            if callable(handler := _signal.getsignal(number)):
                handlers[number] = handler
        try:
            _held = self
            for number in handlers:
                _signal.signal(number, note)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Put the handlers back, and call those of the signals that have arrived."""
        global _held
        if _held is not self:
            return
        _held = None
        for number, handler in self.handlers.items():
            if _signal.getsignal(number) is self._note:
                _signal.signal(number, handler)
        if self.arrived:
            _handle(self.arrived)


def interrupts_held_back() -> HeldInterrupts:
    """Return a block that holds interrupts back."""
    return HeldInterrupts()


def interruptibly(wait: Callable[[], Result]) -> Result:
    """Wait with interrupts let in, within whatever block this is called: it must cope with an error from here."""
    global _held
    held = _held
    if held is None or threading.get_ident() != _main:
        return wait()
    try:
        _held = None
        if held.arrived:
            _handle(held.arrived)
        return wait()
    finally:
        _held = held


def _handle(arrived: _Arrived) -> None:
    """Call the handlers of what has arrived, each of them even if one before it raises."""
    with ExitStack() as calls:
        while arrived:
            calls.callback(arrived.pop())
