"""tree_call: what every public call of the tree does before and after its work."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..controller import HiCacheController


class HasController(Protocol):
    """Moves bytes by a controller, whose thread and seam to the engine it shares."""

    controller: HiCacheController


Tree = TypeVar("Tree", bound=HasController)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def tree_call(
    method: Callable[Concatenate[Tree, Arguments], Result],
) -> Callable[Concatenate[Tree, Arguments], Result]:
    """Make a method a public call of :class:`EngineCalls`.

    Its waits for storage share one bound, ``StorageSettings.max_wait_seconds``, except where it sets another.
    """

    @wraps(method)
    def call(tree: Tree, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with tree.controller.engine_calls, tree.controller.storage.one_call():
            return method(tree, *arguments, **keywords)

    return call
