"""tree_call: what every public call of the tree does before and after its work."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def tree_call(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Make a method of the tree a public call of its ``engine_calls``; see :class:`EngineCalls`."""

    @wraps(method)
    def call(tree: Any, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with tree.engine_calls:
            return method(tree, *arguments, **keywords)

    return call
