"""LayerDoneCounter: lets a forward pass start on layer 0 while later layers still travel from the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from hicache_kernels.validation import whole

from .events import Event
from .forks import refuse_in_forks

NOTHING_TO_WAIT_FOR = -1
"""Consumer id of a start_loading that had nothing to load."""

_MAX_FAILURES = 4096
"""Failed loads kept by id once they are acked; of older ones only the newest id is kept."""


class LayerDoneCounter:
    """Per-layer events of loads, found by the consumer id that ``start_loading`` returned.

    Ids only grow and are never used again, so an id whose load has long been acked still means that load: nothing is
    left to wait for, and if it failed, its rows are still not there.

    Parameters
    ----------
    layers
        Model layers of every load.
    """

    def __init__(self, layers: int) -> None:
        refuse_in_forks(self)
        self.layers = whole("layers", layers, least=0)
        self._lock = threading.Lock()  # guards all below: forward passes wait on threads of their own
        self._next = 0
        self._loads: dict[int, tuple[Sequence[Event], Callable[[], BaseException | None]]] = {}
        self._consumers: tuple[int, ...] = ()
        # What errors said, not they themselves: a traceback would keep the transfer and its tensors.
        self._failures: dict[int, str] = {}
        self._last_dropped_failure = -1

    def register(self, events: Sequence[Event], error: Callable[[], BaseException | None]) -> int:
        """Add a load: an event for each layer, and a function that returns its error; return its consumer id."""
        with self._lock:
            consumer = self._next
            self._next += 1
            self._loads[consumer] = (events, error)
            return consumer

    def events(self, consumer: int) -> tuple[Event, ...]:
        """Return the events of a load's layers; none once it has been acked."""
        with self._lock:
            return tuple(self._loads[consumer][0]) if consumer in self._loads else ()

    def forget(self, consumer: int, error: BaseException | None) -> None:
        """Drop a load that has been acked, except for its error: those who wait for it must still get that."""
        with self._lock:
            known = self._loads.pop(consumer, None) is not None
            if error is None or not known:
                return
            self._failures[consumer] = str(error) or repr(error)
            if len(self._failures) > _MAX_FAILURES:
                oldest = next(iter(self._failures))
                del self._failures[oldest]
                self._last_dropped_failure = max(self._last_dropped_failure, oldest)

    def set_consumer(self, consumer: int | Iterable[int]) -> None:
        """Choose the load, or loads, that the forward pass about to run waits for; -1 for none."""
        chosen = (consumer,) if isinstance(consumer, int) else tuple(consumer)
        with self._lock:
            wrong = [c for c in chosen if not -1 <= c < self._next]
            if wrong:
                raise ValueError(f"consumer is {wrong[0]}; accepted: -1, or an id that start_loading returned")
            self._consumers = chosen

    def wait_until(self, layer: int) -> None:
        """Let the current stream (CPU: the calling thread) wait until ``layer`` of the chosen loads is in place.

        Raises
        ------
        ValueError
            If there is no such layer.
        RuntimeError
            If a chosen load failed, acked or not: its rows must not be read. Also if it is so old that thousands of
            loads have failed since: its outcome is not known any more.
        """
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer is {layer}; accepted: 0..{self.layers - 1}")
        with self._lock:
            loads = [self._loads[c] for c in self._consumers if c in self._loads]
            acked = [c for c in self._consumers if c >= 0 and c not in self._loads]
            for consumer in acked:
                if consumer in self._failures:
                    raise RuntimeError(f"the load of layer {layer} failed: {self._failures[consumer]}")
                if consumer <= self._last_dropped_failure:
                    raise RuntimeError(f"load {consumer} of layer {layer} is too old to tell whether it failed")
        for events, error in loads:
            # A query is cheaper than a wait for what has come.
            if not events[layer].query():
                events[layer].wait()
            failure = error()
            if failure is not None:
                raise RuntimeError(f"the load of layer {layer} failed: {failure}") from failure

    def reset(self) -> None:
        """Forget every load and consumer; ids go on growing."""
        with self._lock:
            self._loads.clear()
            self._failures.clear()
            self._last_dropped_failure = -1
            self._consumers = ()
