"""tree_call: what every public call of the tree does before and after its work."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..engine_calls import EngineCalls


class HasCalls(Protocol):
    """Has public calls, by the seam to the engine that its controller has, too."""

    engine_calls: EngineCalls


Tree = TypeVar("Tree", bound=HasCalls)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def tree_call(
    method: Callable[Concatenate[Tree, Arguments], Result],
) -> Callable[Concatenate[Tree, Arguments], Result]:
    """Make a method a public call of :class:`EngineCalls`."""

    @wraps(method)
    def call(tree: Tree, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with tree.engine_calls:
            return method(tree, *arguments, **keywords)

    return call
