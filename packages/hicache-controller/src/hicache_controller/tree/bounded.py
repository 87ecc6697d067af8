"""Marks the tree's calls whose waits for storage share one bound, in whatever other calls they make."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..controller import HiCacheController


class HasController(Protocol):
    """Anything that moves bytes by a controller."""

    controller: HiCacheController


Tree = TypeVar("Tree", bound=HasController)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def bounded(
    call: Callable[Concatenate[Tree, Arguments], Result],
) -> Callable[Concatenate[Tree, Arguments], Result]:
    """Let a call wait for storage no longer than ``StorageSettings.max_wait_seconds``, in sum."""

    @wraps(call)
    def within_bound(tree: Tree, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        with tree.controller.storage.one_call():
            return call(tree, *arguments, **options)

    return within_bound
