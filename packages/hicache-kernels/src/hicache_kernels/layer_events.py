"""Events that a load records after each layer, made before they are needed: making them costs the caller's thread."""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_HANDLES = torch.empty(0, dtype=torch.int64, device="cpu")
"""Handles of no events."""


class LayerEvents(NamedTuple):
    """Events of one load that no caller has seen yet, and their handles, int64 on CPU."""

    events: tuple[torch.cuda.Event, ...] = ()
    handles: torch.Tensor = NO_HANDLES

    def first(self, count: int) -> LayerEvents:
        """Return the first ``count`` of them."""
        return LayerEvents(self.events[:count], self.handles[:count])

    def rest(self, count: int) -> LayerEvents:
        """Return all but the first ``count``."""
        return LayerEvents(self.events[count:], self.handles[count:])


class SpareEvents:
    """Events for the next load of one pool, made at the end of the load before.

    Safe from several threads: a set of events leaves the dictionary once.
    """

    def __init__(self) -> None:
        self._spare: dict[int, LayerEvents] = {}
        self._wanted = 0

    def take(self, count: int, stream: torch.cuda.Stream | None) -> LayerEvents:
        """Return ``count`` events, spare ones where there are as many; none at all on CPU."""
        if stream is None or count == 0:
            return LayerEvents()
        self._wanted = count
        taken = self._spare.pop(count, None)
        return _make(count, stream) if taken is None else taken

    def refill(self, stream: torch.cuda.Stream) -> None:
        """Make the events of one more load like the last, once that one is queued."""
        count = self._wanted
        if count not in self._spare and not torch.cuda.is_current_stream_capturing():
            self._spare = {count: _make(count, stream)}


def _make(count: int, stream: torch.cuda.Stream) -> LayerEvents:
    events = tuple(stream.record_event() for _ in range(count))  # an event has no handle before it was recorded
    return LayerEvents(events, torch.tensor([event.cuda_event for event in events], dtype=torch.int64, device="cpu"))
