"""FirstError: lets all of several steps be done though some raise, and raises the first error behind the last step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

logger = logging.getLogger(__name__)


class FirstError:
    """Steps of which none may be left out because one before it raised.

    Used as ``with FirstError() as errors:``, with each step in a ``with errors.kept():`` of its own. Further errors are
    logged.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what the block raises for the end."""
        try:
            yield
        except BaseException as error:
            if self.error is None:
                self.error = error
            elif error is not self.error:
                logger.error("a further step failed, with %r", error, exc_info=error)

    def __enter__(self) -> FirstError:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.error is not None:
            raise self.error
