"""UnifiedRadixCache: the prefix tree that decides what is cached in which tier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from hicache_kernels.validation import finite, whole
from hicache_pools.group import PoolEntry
from hicache_pools.pool_transfer import PoolName

from ..controller import HiCacheController
from ..forks import refuse_in_forks
from ..hashing import Namespace
from ..pool_transfers import SidecarPoolSpec
from ..wait_bound import WaitBound, checked_timeout
from . import integrity
from .allocator import PageAllocator, check_device_pages
from .backups import Backups
from .calls import tree_call
from .components import WindowComponent, WindowPool
from .events import Events, Listener
from .evictor import Evictor
from .keys import SequenceKeys, join_keys
from .node import Pages, TreeNode
from .order import EvictionOrder
from .policies import MAX_PRIORITY, MIN_PRIORITY, AnyStrategy, Quota, WritePolicy
from .pools import Pools
from .prefetches import Prefetches
from .radix_tree import RadixTree
from .requests import Requests, checked_pages
from .results import InsertResult, Match, Prefetching, Restored, TreeStats, WindowStats
from .retraction import Retraction
from .transfers import Transfers


class UnifiedRadixCache:
    """Prefix tree over the device pool, the host pool and storage.

    Keys are chained page hashes (:class:`SequenceKeys`), so equal keys at one place mean an equal prefix, namespace
    included. A prefix is a hit as far as the anchor and every windowed pool can be restored from some tier at that very
    length. Entries of these pools without ``host_evict_fn`` or ``device_evict_fn`` get one, so that an allocation of
    the engine through their group evicts what the tree can spare.

    One thread makes the calls, that of the controller's. A call does all of its steps although a callback of the engine
    (an allocator, the listener) raises, and raises the first such error at its end; a match that it was to replace then
    stays the caller's. Interrupts come at the end of a call, or while it waits.

    Parameters
    ----------
    controller
        Moves the bytes and owns the host pools.
    device_allocator
        Hands out device pages; the anchor entry's ``device_alloc_fn`` draws on the same one.
    page_size
        Slots a page.
    write_policy, selective_hits
        See :class:`WritePolicy`; uses after which ``write_through_selective`` writes a node. May be set later.
    eviction
        ``"lru"``, ``"lfu"``, ``"size_aware"``, ``"fifo"``, ``"filo"``, ``"mru"``, ``"slru"``, an
        :class:`EvictionStrategy` or a :class:`PlacedEvictionStrategy`.
    components
        Pools of which a prefix needs only the last pages.
    quotas
        Limits by namespace; see :meth:`set_quota`.
    load_back_pages, load_quota_pages
        Fewest pages on the host that are loaded, as a short load may cost more than computing; most anchor pages that
        one load-back moves, None for no limit. May be set later.
    listener
        Called for each :class:`CacheEvent`.
    clock
        Seconds, for pins with a time to live; ``time.monotonic`` by default.
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
        self.write_policy = WritePolicy(write_policy)
        self.selective_hits = whole("selective_hits", selective_hits)
        self.load_back_pages = whole("load_back_pages", load_back_pages)
        self.load_quota_pages = None if load_quota_pages is None else whole("load_quota_pages", load_quota_pages)
        page_size = whole("page_size", page_size)
        if page_size != controller.page_size:
            raise ValueError(f"page_size is {page_size}; the controller's pools have pages of {controller.page_size}")
        group = controller.host_group
        check_device_pages(group.anchor_entry, device_allocator, page_size)
        refuse_in_forks(self)
        self.controller = controller
        self.engine_calls = calls = controller.engine_calls
        self.device_allocator = device_allocator
        self.page_size = page_size
        self.listener = listener
        self.clock = clock = time.monotonic if clock is None else clock
        self.windows = {str(c.name): WindowPool(c, group.get_entry(c.name)) for c in components}
        order = EvictionOrder(eviction, self.windows)
        self.strategy = order.strategy
        events = Events(listener, str(group.anchor_entry.name), page_size, calls)
        self._tree = tree = RadixTree(page_size, order, calls, clock)
        for namespace, quota in (quotas or {}).items():
            tree.set_quota(namespace, quota)
        self._pools = pools = Pools(tree, controller, device_allocator, events)
        self._backups = backups = Backups(pools, clock)
        self._transfers = transfers = Transfers(pools, backups)
        self._evictor = evictor = Evictor(pools, backups, transfers, self)
        self._prefetches = Prefetches(pools, backups, evictor)
        self._requests = requests = Requests(pools, transfers, evictor, self)
        self._retraction = Retraction(pools, transfers, evictor, requests)

    @property
    def root(self) -> TreeNode:
        """The node above all others, which has no pages; another one after :meth:`reset`."""
        return self._tree.root

    @tree_call
    def set_quota(self, namespace: Namespace | None, quota: Quota) -> None:
        """Limit the pages a namespace keeps; takes effect at its next insert or release."""
        self._tree.set_quota(namespace, quota)

    # Matches

    @tree_call
    def match_prefix(
        self, keys: Sequence[bytes] | SequenceKeys, *, namespace: Namespace | None = None, priority: int = 0
    ) -> Match:
        """Longest prefix of ``keys`` that can be restored from device and host, pinned.

        Parameters
        ----------
        keys
            Page keys of the whole request, 16 bytes each, or the sequence itself.
        namespace
            Whose quota its new pages count against; by default that of the sequence.
        priority
            Its pages leave a tier after all of lower priority; any int32.
        """
        self._pools.reclaim.use_on_this_thread()
        priority = whole("priority", priority, least=MIN_PRIORITY, most=MAX_PRIORITY)
        return self._requests.match(keys, namespace, priority)

    def known_pages(self, keys: Sequence[bytes]) -> int:
        """Leading pages of ``keys`` that the anchor has in some tier, whether or not a prefix may end there.

        If this is more than a match's ``pages``, windows or states are what is missing: other requests diverged there,
        so that it is a good place to save some.
        """
        return sum(same for _, same in self._tree.known(self.root, join_keys(keys)))

    @tree_call
    def release(self, match: Match) -> None:
        """Unpin a match; once for each match handed out."""
        self._evictor.release(match)

    @tree_call
    def pin(self, match: Match, seconds: float) -> None:
        """Keep what a match found in the tiers where it is now for some time, whatever becomes of the match."""
        self._tree.keep_match(match, finite("seconds", seconds))

    @tree_call
    def expire(self) -> int:
        """Release pins whose time is over; returns how many."""
        return self._tree.expire()

    def device_page_numbers(self, match: Match) -> Pages:
        """Device pages of a match, in order; ValueError if a load of some has failed, and :meth:`settle` must come."""
        return self._requests.device_pages(match)

    def window_page_numbers(self, match: Match, name: PoolName | str) -> Pages:
        """Device pages of a windowed pool at the end of a match, in order; ValueError if some are on the host."""
        return self._requests.window_pages(match, str(name))

    @tree_call
    def insert(
        self,
        match: Match,
        pages: Pages,
        count: int | None = None,
        *,
        windows: Mapping[str, Pages] | None = None,
        computed_tokens: int | None = None,
    ) -> InsertResult:
        """Give computed pages to the tree, after a match that is wholly on the device.

        If another request had inserted some of them first, the tree keeps its own pages and the duplicates are freed.
        It waits for loads of these pages; if one fails, the request's own take their place.

        Parameters
        ----------
        match
            Pinned match; the one in the result, over all published pages, replaces it.
        pages
            Device page numbers of the pages after the match.
        count
            How many pages to publish (default: all of ``pages``); the others stay the engine's.
        windows
            For windowed pools, the device pages of the last published pages, at most ``count``. A prefix that gets
            none for a pool is no hit at this length; so a recurrent state is given where it was saved.
        computed_tokens
            Instead of ``count``, tokens of the request whose KV is computed: whole pages up to there are published.

        Raises
        ------
        ValueError
            If the match was released or replaced before, or is not on the device, pages are not ones of the device
            pool, each once, or counts do not fit. Nothing was changed.
        """
        pages = checked_pages(pages, self.device_allocator.page_num)
        return self._requests.insert(match, pages, count, windows or {}, computed_tokens)

    # Room

    @tree_call
    def alloc_device(self, count: int) -> Pages | None:
        """Allocate pages for the engine to compute into, evicting what the strategy says; None if too few."""
        return self._evictor.alloc_device(whole("count", count, least=0))

    @tree_call
    def alloc_window(self, name: PoolName | str, count: int) -> Pages | None:
        """Allocate pages of a windowed pool for the engine to compute into; None if too few."""
        return self._evictor.alloc_window_device(str(name), whole("count", count, least=0))

    @tree_call
    def evict_device(self, count: int) -> int:
        """Free at least ``count`` device pages if the unlocked leaves allow; returns how many were freed.

        Under ``write_back`` the pages that leave are written to the host first. They are free once they have been read:
        on a GPU the current stream is made to wait for that, and nothing waits for the bytes to arrive on the host.
        """
        return self._evictor.evict_device(whole("count", count, least=0))

    def evict(self, count: int) -> int:
        """Free at least ``count`` device pages if the unlocked leaves allow; as :meth:`evict_device`."""
        return self.evict_device(count)

    @tree_call
    def evict_host(self, count: int) -> int:
        """Free at least ``count`` host pages if the unlocked leaves allow; returns how many were freed.

        Host copies of pages that are on the device as well may leave like all others. For what storage is to take first
        this waits within the scheduler's bound, then gives its backup up. Pages that a call to storage still reads are
        not free before it ends.
        """
        return self._evictor.evict_host(whole("count", count, least=0))

    @tree_call
    def evict_window_device(self, name: PoolName | str, count: int) -> int:
        """Free device pages of a windowed pool, least recently used prefixes first; each is saved on the host first."""
        return self._evictor.evict_window_device(str(name), whole("count", count, least=0))

    @tree_call
    def evict_window_host(self, name: PoolName | str, count: int) -> int:
        """Free host pages of a windowed pool, least recently used prefixes first; see :meth:`evict_host`."""
        return self._evictor.evict_window_host(str(name), whole("count", count, least=0))

    # From storage to the host, and on to the device

    @tree_call
    def prefetch(self, match: Match, *, timeout: float | None = None) -> Match:
        """Bring the pages after the match from storage to the host, and wait for all of them.

        The match that it returns replaces this one. What has come after ``timeout`` seconds, by default the storage's
        ``timeout_seconds``, counts.
        """
        with self._prefetches.waiting(checked_timeout(timeout)):
            return self._prefetches.finish(self._prefetches.start(match), wait=True)

    @tree_call
    def start_prefetch(self, match: Match) -> Prefetching:
        """Start to bring the pages after the match from storage to the host; none if it does not answer in time.

        The match stays pinned. The caller releases it, or calls :meth:`finish_prefetch`, exactly once for each start
        that brings pages.
        """
        return self._prefetches.start(match)

    def prefetch_ready(self, started: Prefetching) -> bool:
        """Return whether, by the controller's prefetch policy, the request may run."""
        return started.operation is None or self.controller.prefetch_ready(started.operation)

    @tree_call
    def finish_prefetch(self, started: Prefetching, *, wait: bool = False, timeout: float | None = None) -> Match:
        """End a prefetch as the policy says, or with ``wait`` once everything has come.

        The match it returns has what came, and replaces the one it began with. If waiting is interrupted, nothing
        comes, and that one stays the caller's.

        Parameters
        ----------
        started
            What :meth:`start_prefetch` returned.
        wait, timeout
            Whether to wait for all of it, and for how many seconds, by default the storage's ``timeout_seconds``.

        Raises
        ------
        ValueError
            If it has ended before, by this or by ``reset``, or ``timeout`` is given without ``wait``. Nothing was
            changed.
        """
        if not wait:
            if timeout is not None:
                raise ValueError(f"timeout is {timeout}, and wait is False; a timeout is accepted with wait=True")
            return self._prefetches.finish(started, wait=False)
        with self._prefetches.waiting(checked_timeout(timeout)):
            return self._prefetches.finish(started, wait=True)

    @tree_call
    def load_back(self, match: Match, *, wait: bool = True) -> Match:
        """Load what the match has on the host to the device.

        The match it returns replaces this one, and is on the device. It is shorter if the device has no room for all of
        it, a load failed, or ``load_back_pages`` and ``load_quota_pages`` say so. What another request is loading
        already is not loaded again. With ``wait=False`` the loads may still run: the engine lets its layers wait for
        the match's ``consumers``, and calls :meth:`settle` before it inserts.

        ValueError if the match was released or replaced before.
        """
        return self._requests.load_back(match, wait=wait)

    @tree_call
    def settle(self, match: Match) -> Match:
        """Wait for the loads that fill a match; the match it returns replaces it, shorter if one failed."""
        return self._requests.settle(match)

    # Transfers in flight

    def poll(self, *, wait: bool = False) -> bool:
        """Handle finished transfers (with ``wait``, at least one if any is in flight); returns whether there were any.

        Storage is waited for within the scheduler's bound, so that False may come while backups run; see :meth:`drain`.
        """
        return self._transfers.poll_if_busy(wait=wait)

    @tree_call
    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no transfer is in flight; returns whether that was reached.

        It waits for storage ``timeout`` seconds, where 0 only polls, or by default as long as another page is stored
        within the storage's ``timeout_seconds``.
        """
        return self._transfers.drain(checked_timeout(timeout))

    # Requests off the device

    @tree_call
    def retraction_backup(
        self, request_id: str, match: Match, pages: Pages, *, windows: Mapping[str, Pages] | None = None
    ) -> bool:
        """Move a running request to the host, all pools or none.

        Parameters
        ----------
        request_id
            For :meth:`retraction_restore` and :meth:`retraction_discard`.
        match, pages, windows
            Its pinned match, on the device, and its private device pages of the anchor and of windowed pools. The match
            is released and the pages freed if the result is True. It is False if the host has no room even after
            evicting, or the write failed: the request stays as it was.

        Raises
        ------
        ValueError
            The request is retracted already, or its match is not on the device.
        """
        return self._retraction.backup(request_id, match, pages, windows or {})

    @tree_call
    def retraction_restore(self, request_id: str) -> Restored | None:
        """Bring a request back to the device; None if that has no room now; KeyError if it is not retracted."""
        return self._retraction.restore(request_id)

    @tree_call
    def retraction_discard(self, request_id: str) -> None:
        """Forget a retracted request; KeyError if there is none of that id."""
        self._retraction.discard(request_id)

    @property
    def retracted(self) -> tuple[str, ...]:
        """Ids of the requests that are off the device."""
        return tuple(self._retraction.requests)

    # Single nodes

    @tree_call
    def inc_lock_ref(self, node: TreeNode) -> None:
        """Keep a node and its prefix on the device until as many calls of :meth:`dec_lock_ref`; not windowed pools.

        ValueError if the node is not in the tree, or not on the device.
        """
        self._tree.add_reference(node, device=True)

    @tree_call
    def dec_lock_ref(self, node: TreeNode) -> None:
        """Undo one :meth:`inc_lock_ref`; ValueError if there is none left."""
        self._tree.drop_reference(node, device=True)

    @tree_call
    def inc_host_lock_ref(self, node: TreeNode) -> None:
        """Keep a node, and with it its prefix, on the host; see :meth:`inc_lock_ref`."""
        self._tree.add_reference(node, device=False)

    @tree_call
    def dec_host_lock_ref(self, node: TreeNode) -> None:
        """Undo one :meth:`inc_host_lock_ref`; ValueError if there is none left."""
        self._tree.drop_reference(node, device=False)

    @tree_call
    def split(self, node: TreeNode, pages: int) -> TreeNode:
        """Split a node in two and return the head, which is new and has ``pages`` pages.

        The node stays as the tail, with its locks and transfers in flight. ValueError if it is not in the tree, is its
        root, or does not have more pages.
        """
        return self._tree.split(node, whole("pages", pages, least=0))

    # Pools that come later

    @tree_call
    def register_sidecar_pool(self, spec: SidecarPoolSpec, entry: PoolEntry) -> None:
        """Let a pool that shares another's slots take part in every operation, and in storage if it is attached.

        Raises
        ------
        ValueError
            Spec and entry name different pools, the pool has fewer host slots than its source, its pages have another
            size, or the tree holds pages already, of which the new pool has nothing.
        KeyError
            The source is not in the group.
        """
        self._pools.add_sidecar(spec, entry)

    # Inspection, end

    def stats(self) -> TreeStats:
        """Size of the tree; walks all of it."""
        return integrity.sizes(self._tree)

    def window_stats(self, name: PoolName | str) -> WindowStats:
        """Pages of a windowed pool; walks the whole tree."""
        return integrity.window_sizes(self._tree, str(name))

    def namespace_stats(self, namespace: Namespace | None) -> tuple[int, int]:
        """Device and host pages of a namespace."""
        usage = self._tree.usage(namespace)
        return usage.device_pages, usage.host_pages

    def check_integrity(self) -> None:
        """Check every invariant; raises RuntimeError naming the node and the fault."""
        integrity.check(self._tree)

    def pretty(self) -> str:
        """Draw the tree as text, a node a line: pages, tiers (D, H, S), locks, windows."""
        return integrity.draw(self._tree)

    @tree_call
    def reset(self, timeout: float | None = None) -> None:
        """Forget everything: device pages go back to the engine's allocators, host pages are free; matches are void.

        Waits for storage as :meth:`drain`, then gives up the backups.

        Raises
        ------
        TimeoutError
            If a call to storage does not end within ``timeout``. Nothing else was changed; call it again.
        """
        timeout = checked_timeout(timeout)
        bound = WaitBound(math.inf if timeout is None else timeout)
        if not self._transfers.drain(None if timeout is None else bound.left()):
            for operation in list(self._backups.running.values()):
                self._backups.give_up(operation)
        self.controller.quiesce(None if timeout is None else bound.left())
        self._pools.free_all()
        self.controller.reset()
        for part in (self._retraction, self._tree, self._transfers, self._backups):
            part.clear()
