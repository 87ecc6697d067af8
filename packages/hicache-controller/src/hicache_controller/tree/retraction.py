"""Retraction: requests that a scheduler takes off the device and brings back later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache_pools.pool_transfer import PoolHitPolicy, PoolTransfer

from ..first_error import FirstError
from ..interrupts import interruptibly, interrupts_held_back
from .node import NO_PAGES, Operation, Pages, Pin, TreeNode
from .results import Match, Restored

if TYPE_CHECKING:
    from .cache import UnifiedRadixCache


@dataclass(frozen=True, eq=False)
class _Retracted:
    """A request on the host: its prefix, pinned there, and its own slots by pool (the anchor's first)."""

    match: Match
    node: TreeNode
    pin: Pin
    anchor: torch.Tensor
    windows: dict[str, torch.Tensor]


class Retraction:
    """Requests on the host.

    Each has a prefix in the tree, pinned on the host, and private pages that the tree does not know: what was computed
    and not published, an unfinished last page, a running state. These move as one operation of the controller, so that
    the group takes the slots of all pools or none.
    """

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._requests: dict[str, _Retracted] = {}

    @property
    def requests(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple(self._requests)

    def backup(
        self, request_id: str, match: Match, pages: Pages, *, windows: Mapping[str, Pages] | None = None
    ) -> bool:
        """Take a request off the device.

        Its prefix is pinned on the host before anything moves, and only what has arrived leaves the device; so a False
        leaves the request as it was. Parameters and errors are those of ``UnifiedRadixCache.retraction_backup``.
        """
        cache = self._cache
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is retracted already; restore or discard must come first")
        if not match.on_device:
            raise ValueError(f"match has {match.host_pages} pages on the host; load_back must come before retraction")
        if not cache._settled_on_host(match.node):
            return False
        node, pin = match.node, Pin()
        # An interrupt comes while this waits, and leaves the request as it was, or once it is off the device.
        with interrupts_held_back():
            node.host_lock += 1
            moved = None
            try:
                if self._hold_windows(node, pin):
                    moved = self._write(pages, windows or {})
            finally:
                if moved is None:
                    self._let_go(node, pin)
            if moved is None:
                return False
            self._requests[request_id] = _Retracted(match, node, pin, *moved)
            try:
                self._free_device(pages, windows or {})
            finally:
                cache.release(match)
        return True

    def restore(self, request_id: str) -> Restored | None:
        """Bring a request back to the device, all of it or nothing.

        An interrupt comes while this waits, and leaves the request as it was, or once it is on the device.
        """
        cache = self._cache
        kept = self._requests[request_id]
        found = None
        with interrupts_held_back():
            match = cache._like(kept.match, kept.node, kept.match.pages)
            try:
                match = self._load_prefix(match)
                match = cache.settle(match)
                found = self._load(kept) if match.pages == kept.match.pages else None
                interruptibly(lambda: None)
            except BaseException:
                if found is not None:
                    self._free_device(*found)
                cache.release(match)
                raise
            if found is None:
                cache.release(match)
                return None
            self.discard(request_id)
        return Restored(match, *found)

    def _load_prefix(self, match: Match) -> Match:
        """Load all of a prefix, whatever the engine wants to be loaded at a time."""
        cache = self._cache
        threshold, quota = cache.load_back_pages, cache.load_quota_pages
        cache.load_back_pages, cache.load_quota_pages = max(1, match.host_pages), None
        try:
            return cache.load_back(match, wait=False)
        finally:
            cache.load_back_pages, cache.load_quota_pages = threshold, quota

    def discard(self, request_id: str) -> None:
        """Forget a retracted request; KeyError where there is none of that id."""
        with interrupts_held_back():
            kept = self._requests.pop(request_id)
            self._free_host(kept.anchor, kept.windows)
            self._let_go(kept.node, kept.pin)

    def forget(self) -> None:
        """Drop every request, as the pools are about to be cleared."""
        self._requests.clear()

    def _free_host(self, anchor: torch.Tensor, windows: Mapping[str, torch.Tensor]) -> None:
        controller = self._cache.controller
        if anchor.numel():
            controller.evict_host(anchor)
        for name, slots in windows.items():
            controller.evict_host(slots, pool=name)

    def _free_device(self, pages: Pages, windows: Mapping[str, Pages]) -> None:
        cache = self._cache
        with FirstError() as errors:
            if len(pages):
                with errors.kept():
                    cache.controller.evict_device(cache._slots(pages))
            for name, mine in windows.items():
                if len(mine):
                    with errors.kept():
                        cache._free_window_pages(name, mine, device=True)

    def _let_go(self, node: TreeNode, pin: Pin) -> None:
        self._cache._unpin(pin, device=False)
        self._cache._unlock_host(node)

    def _hold_windows(self, node: TreeNode, pin: Pin) -> bool:
        """Pin on the host what the prefix needs of windowed pools, after writing it if need be."""
        cache = self._cache
        for name in cache.windows:
            for part, needed in cache._window(node, name) or ():
                if part.on_host < needed and not cache._write_window(part):
                    return False
                pin.hold(part, device=False)
        while any(part.write is not None for part in pin.parts):
            cache.poll(wait=True)
        return all(part.host is not None for part in pin.parts)

    def _write(self, pages: Pages, windows: Mapping[str, Pages]) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """Move private pages to the host; None, with nothing taken, where there is no room or the write failed."""
        cache = self._cache
        given = {name: mine for name, mine in windows.items() if len(mine)}
        if not len(pages) and not given:
            return torch.empty(0, dtype=torch.int64), {}
        operation = cache._operation([])
        transfers = [
            PoolTransfer(
                name,
                device_indices=cache.windows[name].converter.slots(mine),
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )
            for name, mine in given.items()
        ]
        slots = cache._slots(pages)
        for name, mine in given.items():
            missing = len(mine) - cache._smallest(cache.windows[name].free_host_pages())
            if missing > 0:
                cache.evict_window_host(name, missing)
        host = cache._queue_write(operation, slots, transfers)
        if host is None and cache.evict_host(len(pages)):
            host = cache._queue_write(operation, slots, transfers)
        if host is None:
            return None
        taken = host, {str(t.name): t.host_indices for t in transfers if t.host_indices is not None}
        arrived = self._finish(operation, cache._writes, lambda: self._free_host(*taken), device=False)
        return taken if arrived else None

    def _load(self, kept: _Retracted) -> tuple[Pages, dict[str, Pages]] | None:
        """Move private pages to the device; None, with nothing taken, where there is no room or the load failed."""
        cache = self._cache
        if not kept.anchor.numel() and not kept.windows:
            return NO_PAGES, {}
        if not cache._make_device_room(kept.anchor.numel() // cache.page_size):
            return None
        for name, slots in kept.windows.items():
            if not cache._make_window_room(name, slots.numel() // cache.windows[name].converter.page_size):
                return None
        transfers = [
            PoolTransfer(name, host_indices=slots, hit_policy=PoolHitPolicy.TRAILING_PAGES)
            for name, slots in kept.windows.items()
        ]
        operation = cache._operation([])
        device = cache._queue_load(operation, kept.anchor, transfers)
        if device is None:
            return None
        cache.controller.start_loading()
        windows = {
            str(t.name): cache.windows[str(t.name)].converter.pages(t.device_indices.cpu())
            for t in transfers
            if t.device_indices is not None
        }
        taken = cache._pages(device.cpu()), windows
        arrived = self._finish(operation, cache._loads, lambda: self._free_device(*taken), device=True)
        return taken if arrived else None

    def _finish(
        self, operation: Operation, running: dict[int, Operation], give_back: Callable[[], None], *, device: bool
    ) -> bool:
        """Wait for what was queued; tell whether it arrived. Where waiting raises, what was taken for it goes back."""
        running[operation.id] = operation
        try:
            while not operation.done:
                self._cache.poll(wait=True)
        except BaseException:
            if not operation.done:
                self._cache._abandon(operation, running, device=device)
            elif not operation.failed:
                give_back()
            raise
        return not operation.failed
