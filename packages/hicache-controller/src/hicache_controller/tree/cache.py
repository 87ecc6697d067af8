"""UnifiedRadixCache: the prefix tree that decides what is cached in which tier."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hicache_kernels.validation import finite, whole
from hicache_pools.group import PoolEntry
from hicache_pools.pool_transfer import PoolName

from ..controller import HiCacheController
from ..hashing import Namespace
from ..hybrid import HybridCacheController, SidecarPoolSpec
from ..wait_bound import WaitBound, checked_timeout
from . import integrity
from .bounded import bounded
from .components import WindowComponent
from .events import Change, Listener, Tier
from .keys import KEY_BYTES, SequenceKeys, Tokens, common_pages, join_keys
from .namespaces import NO_BOOKS
from .node import NO_PAGES, Pages, TreeNode, unpack
from .policies import MAX_PRIORITY, MIN_PRIORITY, NO_NAMESPACE, AnyStrategy, Quota, WritePolicy
from .references import TreeReferences
from .results import InsertResult, Match, Restored, TreeStats, WindowStats
from .retraction import Retraction
from .structure import PageAllocator

logger = logging.getLogger(__name__)


class UnifiedRadixCache(TreeReferences):
    """Prefix tree over the device pool, the host pool and storage.

    Keys are chained page hashes (:class:`SequenceKeys`), so equal keys at one place mean an equal prefix, namespace
    included. Not thread-safe: an engine's scheduler thread owns it.

    A prefix is a hit as far as the anchor and every windowed pool can be restored from some tier at that very length.

    The entries of the anchor and of windowed pools get ``host_evict_fn`` and ``device_evict_fn`` where they have none,
    so that an allocation of the engine through their group evicts what the tree can spare.

    Parameters
    ----------
    controller
        Moves the bytes and owns the host pools. With components it has to be a :class:`HybridCacheController`.
    device_allocator
        Hands out device pages; the anchor entry's ``device_alloc_fn`` draws on the same one.
    page_size
        Slots a page.
    write_policy
        See :class:`WritePolicy`.
    selective_hits
        Uses after which ``write_through_selective`` writes a node.
    eviction
        ``"lru"``, ``"lfu"``, ``"size_aware"``, ``"fifo"``, ``"filo"``, ``"mru"``, ``"slru"``, an
        :class:`EvictionStrategy` or a :class:`PlacedEvictionStrategy`.
    components
        Pools of which a prefix needs the last pages alone.
    quotas
        Limits by namespace; see :meth:`set_quota`.
    load_back_pages
        A match with fewer pages on the host is cut to its device part instead: a short load may cost more than
        computing.
    load_quota_pages
        Most anchor pages one load-back moves; None for no limit.
    listener
        Called for each :class:`CacheEvent`.
    clock
        Seconds, for pins with a time to live; ``time.monotonic`` by default.

    Raises
    ------
    ValueError, TypeError, KeyError
        Naming what was given and what is accepted.
    """

    def __init__(
        self,
        controller: HiCacheController,
        device_allocator: PageAllocator,
        *,
        page_size: int,
        write_policy: WritePolicy | str = WritePolicy.WRITE_THROUGH,
        selective_hits: int = 2,
        eviction: AnyStrategy | str = "lru",
        components: Sequence[WindowComponent] = (),
        quotas: Mapping[Namespace, Quota] | None = None,
        load_back_pages: int = 1,
        load_quota_pages: int | None = None,
        listener: Listener | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        for name, value in (
            ("selective_hits", selective_hits),
            ("load_back_pages", load_back_pages),
            ("load_quota_pages", load_quota_pages),
        ):
            if value is not None:
                whole(name, value)
        super().__init__(
            controller,
            device_allocator,
            page_size=page_size,
            write_policy=WritePolicy(write_policy),
            eviction=eviction,
            components=components,
            quotas=quotas or {},
            listener=listener,
            clock=clock,
            load_back_pages=load_back_pages,
            load_quota_pages=load_quota_pages,
        )
        self.selective_hits = selective_hits
        self._retraction = Retraction(self)

    # Lookup

    @bounded
    def match_prefix(
        self, keys: Sequence[bytes] | SequenceKeys, *, namespace: Namespace | None = None, priority: int = 0
    ) -> Match:
        """Longest prefix of ``keys`` that can be restored from device and host, pinned.

        Parameters
        ----------
        keys
            Page keys of the whole request, 16 bytes each, or the sequence itself. A request shorter than a page has
            none, and an empty match.
        namespace
            Whose quota its new pages count against; the sequence's own where ``keys`` is one.
        priority
            Its pages leave a tier after all of lower priority; any int32.
        """
        priority = whole("priority", priority, least=MIN_PRIORITY, most=MAX_PRIORITY)
        tokens: Tokens | None = None
        if isinstance(keys, SequenceKeys):
            namespace = keys.namespace if namespace is None else namespace
            tokens = keys.tokens() if self.listener is not None else None
            blob = join_keys(keys.hashes)
        else:
            blob = join_keys(keys)
        self._tick += 1
        self._reclaim.use_on_this_thread()
        self.expire()
        node, matched = self._walk(self.root, blob, 0)
        if self.windows:
            node, matched = self._last_restorable(node, matched)
        match = self._match_at(blob, node, matched, owner=self._owner(namespace), priority=priority, tokens=tokens)
        self._touch(match.node, priority)
        return match

    def known_pages(self, keys: Sequence[bytes]) -> int:
        """Leading pages of ``keys`` that the anchor has in some tier, whether or not a prefix may end there.

        Where this is more than a match's ``pages``, windows or states are what is missing: other requests went on from
        there in another way, so that it is a good place to save some.
        """
        return sum(same for _, same in self._known(self.root, join_keys(keys)))

    def pin(self, match: Match, seconds: float) -> None:
        """Keep what a match found in the tiers where it is now for some time, whatever becomes of the match."""
        seconds = finite("seconds", seconds)
        self._keep_until(self.clock() + seconds, self._like(match, match.node, match.pages))

    def device_page_numbers(self, match: Match) -> Pages:
        """Device pages of the match's leading ``device_pages``, in order.

        Raises
        ------
        ValueError
            If some are there no more, because a load that was to fill them failed and a poll has seen it; ``settle``
            gives the shorter match.
        """
        parts = [unpack(node.device) for node in self._path(match.device_node) if node.device is not None]
        pages = np.concatenate(parts[::-1]) if parts else NO_PAGES
        if len(pages) != match.device_pages:
            raise ValueError(
                f"the match has {len(pages)} of its {match.device_pages} device pages, as a load of the others failed; "
                "settle must come first"
            )
        return pages

    def window_page_numbers(self, match: Match, name: PoolName | str) -> Pages:
        """Device pages of a windowed pool for the last pages of a match, in order; at most the window's.

        Raises
        ------
        ValueError
            If some are on the host; load_back must come first.
        """
        found = []
        for part, needed in self._window(match.node, str(name)) or ():
            if part.device is None or part.on_device < needed:
                raise ValueError(f"the match has pages of {name!s} on the host; load_back must come first")
            found.append(unpack(part.device)[part.on_device - needed :])
        return np.concatenate(found[::-1]) if found else NO_PAGES

    def _touch(self, node: TreeNode, priority: int) -> None:
        write: TreeNode | None = None
        selective = self.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        for above in self._path(node):
            self._used(above, priority)
            if selective and write is None and above.hits >= self.selective_hits and above.device is not None:
                write = above
        for name in self.windows:
            for part, _ in self._window(node, name) or ():
                part.last_access = self._tick
        if write is not None:
            self._write_through(write)
        self._store_again(node)

    def _write_through(self, node: TreeNode) -> None:
        """Write a prefix and its windows to the host; an error is logged, as the caller's own work is done by then."""
        try:
            if node.host is None:
                self._ensure_host(node)
            self._write_windows(node)
        except Exception:
            logger.exception("a prefix of %d pages was not written to the host", node.depth)

    @bounded
    def alloc_device(self, count: int) -> Pages | None:
        """Allocate pages for the engine to compute into, evicting what the strategy says; None if too few."""
        return self._alloc_device(whole("count", count, least=0))

    @bounded
    def alloc_window(self, name: PoolName | str, count: int) -> Pages | None:
        """Allocate pages of a windowed pool for the engine to compute into; None if too few."""
        return self._alloc_window_device(str(name), whole("count", count, least=0))

    @bounded
    def insert(
        self,
        match: Match,
        pages: Pages,
        count: int | None = None,
        *,
        windows: Mapping[str, Pages] | None = None,
        computed_tokens: int | None = None,
    ) -> InsertResult:
        """Hand computed pages over to the tree, behind a match that is wholly on the device.

        Parameters
        ----------
        match
            Pinned match; the one in the result replaces it.
        pages
            Device page numbers of the pages behind the match.
        count
            How many pages to publish (default: all of ``pages``); the others stay the engine's.
        windows
            For windowed pools, the device pages of the last published pages, at most ``count``. A prefix that gets
            none for a pool is no hit at this length; so a recurrent state is given where it was saved.
        computed_tokens
            Tokens of the request, from its start, whose KV is computed: whole pages up to there are published. Given
            instead of ``count``.

        Returns
        -------
        InsertResult
            The pinned match over all published pages; where another request had inserted some of them first, the
            tree's pages stand and the duplicates among ``pages`` are freed. Pages that a load is to fill stand once it
            has, so it is waited for; where it fails, the request's own take their place.

        Raises
        ------
        ValueError
            Where the match was released or replaced before, or is not on the device, pages are not ones of the device
            pool, each once, or counts do not fit. Nothing was changed.
        """
        self._check_pinned(match)
        pages = self._checked_pages("pages", pages, self.device_allocator.page_num)
        windows = windows or {}
        count = self._count_to_publish(match, pages, count, computed_tokens)
        for name, given in windows.items():
            if name not in self.windows:
                raise ValueError(f"windows has {name!s}; the tree's components are {list(self.windows)}")
            if len(given) > count:
                raise ValueError(f"windows has {len(given)} pages of {name!s} for {count} published pages")
        self._settle_behind(match, count)
        self._tick += 1
        begin, end = match.pages, match.pages + count
        blob = match.keys[: end * KEY_BYTES]
        node, at = match.node, begin
        duplicates: list[Pages] = []
        while at < end:
            child = node.child(blob[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if child is None:
                child = self._add_child(node, blob[at * KEY_BYTES :], match.owner)
                self._give_tokens(child, match, at)
                self._set_device(child, pages[at - begin : end - begin])
                self._tell(Change.STORED, Tier.DEVICE, child)
            else:
                tail = blob[at * KEY_BYTES : at * KEY_BYTES + len(child.keys)]
                same = common_pages(child.keys, tail)
                if same < child.pages:
                    child = self._split(child, same)
                own = pages[at - begin : at - begin + same]
                if child.device is None:
                    self._set_device(child, own)
                    self._tell(Change.STORED, Tier.DEVICE, child)
                else:
                    duplicates.append(own)
            node, at = child, at + child.pages
        parts = [p for name, given in windows.items() for p in self._adopt_window(node, name, given, device=True)]
        result = self._like(match, node, end)
        self._release_pins(match)
        self._offer_windows(parts)
        self._touch(node, match.priority)
        if duplicates:
            self.controller.evict_device(self._slots(np.concatenate(duplicates)))
        if self.write_policy is WritePolicy.WRITE_THROUGH:
            self._write_through(node)
            self.controller.start_writing()
        if match.owner.device_queue is not None:
            self._keep_quota(match.owner)
        return InsertResult(result, sum(map(len, duplicates)))

    @staticmethod
    def _checked_pages(name: str, pages: Pages, page_num: int) -> Pages:
        checked = np.asarray(pages)
        if checked.ndim != 1 or (checked.size and not np.issubdtype(checked.dtype, np.integer)):
            raise ValueError(f"{name} has shape {checked.shape} and type {checked.dtype}; accepted are integers [n]")
        if checked.size and not 0 <= int(checked.min()) <= int(checked.max()) < page_num:
            raise ValueError(f"{name} runs from {checked.min()} to {checked.max()}; accepted is 0..{page_num - 1}")
        if len(np.unique(checked)) != checked.size:
            raise ValueError(f"{name} names a page twice; every page is accepted once")
        return checked.astype(np.int64, copy=False)

    def _count_to_publish(self, match: Match, pages: Pages, count: int | None, computed_tokens: int | None) -> int:
        if match.host_pages or match.host_pin.parts:
            raise ValueError(
                f"match has {match.host_pages} pages and {len(match.host_pin.parts)} windows on the host; load_back "
                "must come before insert"
            )
        if match.node.parent is not None and (match.node.device is None or match.node.load is not None):
            raise ValueError("a load of the match is in flight or has failed; settle must come before insert")
        if computed_tokens is not None:
            if count is not None:
                raise ValueError("count and computed_tokens are both given; accepted is one of them")
            computed_tokens = whole("computed_tokens", computed_tokens, least=0)
            count = min(max(computed_tokens // self.page_size - match.pages, 0), len(pages))
        count = len(pages) if count is None else whole("count", count, least=0)
        request = len(match.keys) // KEY_BYTES
        if count > len(pages) or match.pages + count > request:
            raise ValueError(
                f"{count} pages to insert behind {match.pages} matched ones; the request has {request} pages and "
                f"{len(pages)} were given"
            )
        return count

    # Requests off the device

    @bounded
    def retraction_backup(
        self, request_id: str, match: Match, pages: Pages, *, windows: Mapping[str, Pages] | None = None
    ) -> bool:
        """Move a running request to the host, all pools or none; see :meth:`Retraction.backup`.

        Parameters
        ----------
        request_id
            For :meth:`retraction_restore` and :meth:`retraction_discard`.
        match
            Its pinned match, on the device. Released where the result is True.
        pages, windows
            Its private device pages of the anchor, and of windowed pools; freed where the result is True.

        Returns
        -------
        bool
            False where the host has no room even after evicting, or the write failed: the request stays as it was.

        Raises
        ------
        ValueError
            The request is retracted already, or its match is not on the device.
        """
        return self._retraction.backup(request_id, match, pages, windows=windows)

    @bounded
    def retraction_restore(self, request_id: str) -> Restored | None:
        """Bring a request back to the device; None where that has no room now, and it stays retracted.

        Raises
        ------
        KeyError
            No such request is retracted.
        """
        return self._retraction.restore(request_id)

    def retraction_discard(self, request_id: str) -> None:
        """Forget a retracted request; KeyError where there is none of that id."""
        self._retraction.discard(request_id)

    @property
    def retracted(self) -> tuple[str, ...]:
        """Ids of the requests that are off the device."""
        return self._retraction.requests

    # Pools that come later

    def register_sidecar_pool(self, spec: SidecarPoolSpec, entry: PoolEntry) -> None:
        """Let a pool that shares another's slots take part in every operation, and in storage where it is attached.

        Raises
        ------
        TypeError
            The controller is no HybridCacheController.
        ValueError
            Spec and entry name different pools, the pool has fewer host slots than its source, its pages have another
            size, or the tree holds pages already, whose sidecar part nobody has.
        KeyError
            The source is not in the group.
        """
        controller = self.controller
        if not isinstance(controller, HybridCacheController):
            raise TypeError(f"controller is a {type(controller).__name__}; sidecars need a HybridCacheController")
        if spec.pool_name != entry.name:
            raise ValueError(f"spec is for pool {spec.pool_name!s} and entry is {entry.name!s}; both must be the same")
        source = controller.host_group.get_pool(spec.indices_from_pool)
        for what in ("page_size", "size"):
            mine, theirs = int(getattr(entry.host_pool, what)), int(getattr(source, what))
            if mine != theirs if what == "page_size" else mine < theirs:
                raise ValueError(
                    f"pool {entry.name!s} has {what} {mine}; it shares the slots of {spec.indices_from_pool!s}, which "
                    f"has {theirs}, and needs {'the same' if what == 'page_size' else 'at least as many'}"
                )
        if self.root.children is not None:
            raise ValueError(
                f"the tree holds pages, of which pool {entry.name!s} has nothing; register it before the first insert, "
                "or after reset"
            )
        controller.add_entry(entry)
        controller.add_sidecar(spec)

    # Inspection, end

    def stats(self) -> TreeStats:
        """Size of the tree; walks all of it."""
        nodes = list(self._all_nodes())
        return TreeStats(
            len(nodes),
            sum(node.pages for node in nodes if node.device is not None),
            sum(node.pages for node in nodes if node.host is not None),
        )

    def window_stats(self, name: PoolName | str) -> WindowStats:
        """Pages of a windowed pool; walks the whole tree."""
        parts = [part for node in self._all_nodes() if (part := node.window(str(name))) is not None]
        return WindowStats(
            sum(part.on_device for part in parts),
            sum(part.on_host for part in parts),
        )

    def namespace_stats(self, namespace: Namespace | None) -> tuple[int, int]:
        """Device and host pages of a namespace."""
        books = self._books.get(NO_NAMESPACE if namespace is None else namespace, NO_BOOKS)
        return books.device_pages, books.host_pages

    def check_integrity(self) -> None:
        """Check every invariant; raises RuntimeError naming the node and the fault."""
        integrity.check(self.root, self.windows)

    def pretty(self) -> str:
        """Draw the tree as text, a node a line: pages, tiers (D, H, S), locks, windows."""
        return integrity.draw(self.root)

    def reset(self, timeout: float | None = None) -> None:
        """Forget everything: device pages go back to the engine's allocators, host pages are free; matches are void.

        Parameters
        ----------
        timeout
            Seconds to wait for storage to take what is on its way there, by default as long as it gets on.

        Raises
        ------
        TimeoutError
            If a call to storage does not end then. Backups were given up, nothing else was changed; call it again.
        """
        timeout = checked_timeout(timeout)
        bound = WaitBound(math.inf if timeout is None else timeout)
        if not self.drain(None if timeout is None else bound.left()):
            for operation in list(self._backups.values()):
                self._give_up_backup(operation)
        self.controller.quiesce(None if timeout is None else bound.left())
        self._retraction.forget()
        if self.listener is not None:
            for node in reversed(list(self._all_nodes())):
                self._tell_gone(node)
        for node in list(self._all_nodes()):
            for part in node.windows:
                if part.device is not None and part.load is None:
                    self._free_window_pages(part.name, unpack(part.device), device=True)
                part.device = part.host = None
            # What a load is still to fill goes back with it, by the controller.
            if node.device is not None and node.load is None:
                self.controller.evict_device(self._slots(unpack(node.device)))
            # Queues and old matches may still hold it; it has nothing any more.
            node.device = node.host = None
        self.controller.reset()
        self.root = TreeNode(0, None, b"")
        for running in (self._writes, self._loads, self._backups):
            running.clear()
        self._backed_up_pages = 0
        self._timed.clear()
        self._pinned.clear()
        self._prefetches.clear()
        self._to_store.clear()
        self._references.clear()
        for queue in self._queues():
            queue.clear()
        for books in self._books.values():
            books.device_pages = books.host_pages = 0
