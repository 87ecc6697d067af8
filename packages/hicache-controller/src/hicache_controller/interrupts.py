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

_SIGINT, _SIGTERM = int(signal.SIGINT), int(signal.SIGTERM)
Result = TypeVar("Result")
_Handler = Callable[[int, FrameType | None], Any]

_held = False  # whether the main thread is in a block
_arrived: list[Callable[[], object]] = []  # what the handlers of a block's signals have to be called for
_main = threading.main_thread().ident


class _Note:
    """Stands in for a handler: within a block a signal is noted, outside it is handled at once.

    Outside it is called where an interrupt has kept it in its place, or where code that found it there has put it back.
    """

    __slots__ = ("handler",)

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _held:
            _arrived.append(partial(self.handler, number, frame))
        else:
            self.handler(number, frame)


_notes = {_SIGINT: _Note(signal.default_int_handler), _SIGTERM: _Note(signal.default_int_handler)}


def _start_anew() -> None:
    global _held, _main
    _held, _main = False, threading.main_thread().ident
    _arrived.clear()


os.register_at_fork(after_in_child=_start_anew)  # the thread that forks is the child's main thread, and in no block


def hold_interrupts() -> bool:
    """Begin a block; return whether there was none, and :func:`let_interrupts_in` has to end it.

    From then on the handlers of SIGINT and SIGTERM run at its end; see :func:`interruptibly`. A handler that raises, as
    Ctrl-C's does, may do so between any two steps of Python. Only the main thread runs handlers, so in others this does
    nothing; nor does it where a signal has no handler in Python. A handler that is installed within the block, such as
    by a callback of the engine, stays, and is not held back.
    """
    global _held
    if _held or threading.get_ident() != _main:
        return False
    try:
        _held = True
        for number, note in _notes.items():
            handler = _signal.getsignal(number)
            if handler is not note.handler and type(handler) is not _Note and callable(handler):
                note = _notes[number] = _Note(handler)
            if handler is note.handler:
                _signal.signal(number, note)
    except BaseException:
        let_interrupts_in()
        raise
    return True


def let_interrupts_in() -> None:
    """End the block: put the handlers back, and call those of the signals that have arrived, each of them."""
    global _held
    try:
        _held = False
        for number in _notes:
            note = _signal.getsignal(number)
            if type(note) is _Note:
                _signal.signal(number, note.handler)
    finally:
        if _arrived:
            with ExitStack() as calls:
                while _arrived:
                    calls.callback(_arrived.pop())


class HeldInterrupts:
    """A block that holds interrupts back, as :func:`hold_interrupts` says."""

    __slots__ = ("_holds",)

    def __enter__(self) -> None:
        self._holds = hold_interrupts()

    def __exit__(self, *_: object) -> None:
        if self._holds:
            let_interrupts_in()


def interruptibly(wait: Callable[[], Result]) -> Result:
    """Wait with interrupts let in, within whatever block this is called: it must cope with an error from here."""
    if not _held or threading.get_ident() != _main:
        return wait()
    try:
        let_interrupts_in()
        return wait()
    finally:
        hold_interrupts()
