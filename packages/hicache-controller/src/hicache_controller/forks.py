"""Refuses work in a forked child for what has its threads and locks in the parent: an error instead of a hang."""

from __future__ import annotations

import os
import types
from typing import Any
from weakref import WeakValueDictionary

count = 0
"""Forks between the first process and this one; what was made at another count is a parent's."""

_owned: WeakValueDictionary[int, Any] = WeakValueDictionary()


def refuse_in_forks(owner: object) -> None:
    """Make every use of an object's attributes raise RuntimeError in the processes that are forked from this one.

    That costs nothing here. There, the object keeps the files and the memory that the parent uses as they are, whether
    it is garbage or not.
    """
    _owned[id(owner)] = owner


def fork_error(what: str) -> RuntimeError:
    """Make the error of a use in a forked child."""
    return RuntimeError(
        f"{what} was made before a fork, and process {os.getpid()} is the child, which has none of its threads; make a "
        "new one here, or start processes by the method spawn"
    )


def _refuse() -> None:
    global count
    count += 1
    errors: list[Exception] = []
    for owner in list(_owned.values()):
        try:
            owner.__class__ = _refusing(type(owner))
        except Exception as error:  # the others must refuse all the same
            errors.append(error)
    _owned.clear()
    if errors:
        raise errors[0]


def _refusing(kind: type[Any]) -> type[Any]:
    """Make the class of objects of ``kind`` that refuse."""

    def refuse(self: object, name: str) -> object:
        if name == "__class__":  # as isinstance asks
            return object.__getattribute__(self, name)
        raise fork_error(f"this {kind.__name__}")

    # Without slots of its own, so that objects of ``kind`` can become its own.
    namespace = {"__slots__": (), "__getattribute__": refuse}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(namespace))


os.register_at_fork(after_in_child=_refuse)
