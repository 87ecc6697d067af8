"""UnifiedRadixCache: the prefix tree that decides what is cached in which tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from hicache_pools.group import PoolEntry
from hicache_pools.pool_transfer import PoolHitPolicy, PoolName, PoolTransfer

from ..controller import HiCacheController
from ..hashing import Namespace
from ..hybrid import HybridCacheController, SidecarPoolSpec
from . import integrity
from .components import WindowComponent
from .events import Change, Listener, Tier
from .keys import KEY_BYTES, SequenceKeys, Tokens, common_pages, join_keys
from .node import NO_PAGES, Pages, TreeNode, WindowPart, unpack
from .policies import EvictionStrategy, Quota, WritePolicy
from .results import InsertResult, Match, TreeStats, WindowStats
from .retraction import Retraction
from .structure import PageAllocator
from .transfers import TreeTransfers, further


class UnifiedRadixCache(TreeTransfers):
    """Prefix tree over the device pool, the host pool and storage.

    Keys are chained page hashes (:class:`SequenceKeys`), so equal keys at one place mean an equal prefix, namespace
    included. Not thread-safe: an engine's scheduler thread owns it.

    A prefix is a hit as far as the anchor and every windowed pool can be restored from some tier at that very length.

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
        ``"lru"``, ``"lfu"``, ``"size_aware"`` or an :class:`EvictionStrategy`.
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
        eviction: EvictionStrategy | str = "lru",
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
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")
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
        )
        self.selective_hits = selective_hits
        self.load_back_pages = load_back_pages
        self.load_quota_pages = load_quota_pages
        self.retraction = Retraction(self)

    # Lookup

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
            Its pages leave a tier after all of lower priority.
        """
        tokens: Tokens | None = None
        if isinstance(keys, SequenceKeys):
            namespace = keys.namespace if namespace is None else namespace
            tokens = keys.tokens() if self.listener is not None else None
            blob = join_keys(keys.hashes)
        else:
            blob = join_keys(keys)
        self._tick += 1
        self.expire()
        node, matched = self._walk(self.root, blob, 0)
        if self.windows:
            node, matched = self._last_restorable(node, matched)
        match = self._match_at(blob, node, matched, owner=self._owner(namespace), priority=priority, tokens=tokens)
        self._touch(match.node, priority)
        return match

    def release(self, match: Match) -> None:
        """Unpin a match; once for each match handed out."""
        self._release_pins(match)
        if self._books[match.owner].device_queue is not None:
            self._keep_quota(match.owner)

    def pin(self, match: Match, seconds: float) -> None:
        """Keep what a match found in the tiers where it is now for some time, whatever becomes of the match."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; it must not be negative")
        self._keep_until(self.clock() + seconds, self._like(match, match.node, match.pages))

    def device_page_numbers(self, match: Match) -> Pages:
        """Device pages of the match's leading ``device_pages``, in order."""
        parts = [unpack(node.device) for node in self._path(match.device_node) if node.device is not None]
        return np.concatenate(parts[::-1]) if parts else NO_PAGES

    def window_page_numbers(self, match: Match, name: PoolName | str) -> Pages:
        """Device pages of a windowed pool for the last pages of a match, in order; at most the window's.

        Raises
        ------
        ValueError
            If some are on the host; load_back must come first.
        """
        found = []
        for part, needed in self._window(match.node, str(name)) or ():
            if part.device is None or len(part.device) < needed:
                raise ValueError(f"the match has pages of {name!s} on the host; load_back must come first")
            found.append(part.device[len(part.device) - needed :])
        return np.concatenate(found[::-1]) if found else NO_PAGES

    def _match_at(
        self,
        keys: bytes,
        node: TreeNode,
        pages: int,
        *,
        owner: int = 0,
        priority: int = 0,
        tokens: Tokens | None = None,
    ) -> Match:
        """Pin the restorable prefix that ends with ``node``."""
        device_pages, above = pages, node
        while above.device is None and above.parent is not None:
            device_pages -= above.pages
            above = above.parent
        device_pin, host_pin = self._pins(node)
        above.device_lock += 1
        if device_pages < pages:
            node.host_lock += 1
        return Match(
            keys, device_pages, pages - device_pages, above, node, device_pin, host_pin, owner, priority, tokens
        )

    def _like(self, match: Match, node: TreeNode, pages: int) -> Match:
        """Pin another prefix of the same request."""
        return self._match_at(match.keys, node, pages, owner=match.owner, priority=match.priority, tokens=match.tokens)

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
            if write.host is None:
                self._ensure_host(write)
            self._write_windows(write)

    # What an engine does with a match

    def prefetch(self, match: Match) -> Match:
        """Bring the pages behind the match from storage to the host; the match it returns replaces the one given."""
        rest = match.rest()
        found = self._storage_exists(rest) if rest and self.controller.has_storage else 0
        if not found:
            return match
        # The new node needs a host part above it, which must stay while room is made for it.
        above = match.node
        above.host_lock += 1
        longer = self._prefetch_below(match, rest[:found]) if self._settled_on_host(above) else None
        self._unlock_host(above)
        if longer is None:
            return match
        self.release(match)
        return longer

    def _storage_exists(self, keys: list[bytes]) -> int:
        windows = [
            PoolTransfer(name, keys=keys[: pool.window_pages], hit_policy=PoolHitPolicy.TRAILING_PAGES)
            for name, pool in self.windows.items()
        ]
        return int(self.controller.storage_exists(keys, **further(windows)))

    def _prefetch_below(self, match: Match, keys: list[bytes]) -> Match | None:
        slots = self._alloc_host(len(keys))
        if slots is None:
            return None
        room = len(slots) // self.page_size
        if room < len(keys) and self.windows:
            # A shorter prefix counts only where the windows of its own end are stored.
            wanted = self._storage_exists(keys[:room])
            if wanted < room:
                self.controller.evict_host(slots[wanted * self.page_size :])
            room, slots = wanted, slots[: wanted * self.page_size]
            if not room:
                return None
        keys = keys[:room]
        transfers: list[PoolTransfer] = []
        for name, pool in self.windows.items():
            last = keys[max(0, room - pool.window_pages) :]
            indices = self._alloc_window_host(name, len(last))
            if indices is None:
                self._free_host(slots, transfers)
                return None
            transfers.append(
                PoolTransfer(name, host_indices=indices, keys=last, hit_policy=PoolHitPolicy.TRAILING_PAGES)
            )
        operation = self.controller.prefetch(slots, keys, request_id=str(self._next_id), **further(transfers))
        operation.wait()
        got = operation.completed_pages
        if transfers and got < room:
            got = 0
        if got < room:
            self._free_host(slots[got * self.page_size :], transfers)
        if not got:
            return None
        end = match.pages + got
        node = self._adopt_host(match, self._pages(slots[: got * self.page_size]), end)
        for transfer in transfers:
            if transfer.host_indices is not None:
                converter = self.windows[str(transfer.name)].converter
                self._adopt_window(node, str(transfer.name), converter.pages(transfer.host_indices), device=False)
        self._mark_stored(node, transfers)
        if not self._restorable(node):
            return None
        return self._like(match, node, end)

    def _free_host(self, slots: torch.Tensor, transfers: list[PoolTransfer]) -> None:
        self.controller.evict_host(slots)
        for transfer in transfers:
            if transfer.host_indices is not None:
                self.controller.evict_host(transfer.host_indices, pool=transfer.name)
        transfers.clear()

    def _mark_stored(self, node: TreeNode, transfers: list[PoolTransfer]) -> None:
        for transfer in transfers:
            for part, _ in self._window(node, str(transfer.name)) or ():
                part.stored = part.host is not None and part.write is None

    def _adopt_host(self, match: Match, pages: Pages, end: int) -> TreeNode:
        """Give host pages that came from storage to the nodes behind a match, new ones where there are none."""
        node, at, begin = match.node, match.pages, match.pages
        blob = match.keys[: end * KEY_BYTES]
        while at < end:
            child = node.child(blob[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if child is None:
                child = self._add_child(node, blob[at * KEY_BYTES :], match.owner)
                self._give_tokens(child, match, at)
            else:
                same = common_pages(child.keys, blob[at * KEY_BYTES :])
                if same < child.pages:
                    child = self._split(child, same)
            own = pages[at - begin : at - begin + child.pages]
            if child.host is None:
                child.stored = True
                self._set_host(child, own)
                self._tell(Change.STORED, Tier.HOST, child)
            else:
                self.controller.evict_host(self._slots(own))
            # Eviction for the windows to come must not take what has just come.
            self._used(child, match.priority)
            node, at = child, at + child.pages
        return node

    def _give_tokens(self, node: TreeNode, match: Match, first_page: int) -> None:
        if match.tokens is not None and self.listener is not None:
            node.tokens = match.tokens[first_page * self.page_size : (first_page + node.pages) * self.page_size]

    def _settled_on_host(self, node: TreeNode) -> bool:
        """Whether the node has a host part whose write is done (the root needs none), writing it if need be."""
        if not self._ensure_host(node):
            return False
        while node.write is not None:
            self.poll(wait=True)
        return node is self.root or node.host is not None

    def load_back(self, match: Match, *, wait: bool = True) -> Match:
        """Load what the match has on the host to the device.

        Parameters
        ----------
        match
            Replaced by the one that is returned.
        wait
            False: the loads may still run. The engine then lets its layers wait for the match's ``consumers``, and
            calls :meth:`settle` before it inserts.

        Returns
        -------
        Match
            On the device. Shorter where the device has no room for all of it, a load failed, or ``load_back_pages``
            and ``load_quota_pages`` say so. What another request is loading already is not loaded again.
        """
        self._settle_writes(match.node)
        node, pages = match.node, match.pages
        while not self._is_alive(node):
            pages -= node.pages
            node = node.parent or self.root
        node, pages = self._worth_loading(match, node, pages)
        loaded = self._load_to(match, node, pages)
        self.release(match)
        return self.settle(loaded) if wait else loaded

    def _worth_loading(self, match: Match, node: TreeNode, pages: int) -> tuple[TreeNode, int]:
        """Cut a prefix where loading it is not worth its while, or above the quota."""
        to_load = pages - match.device_pages
        if 0 < to_load < self.load_back_pages:
            pages, node = self._go_up(node, pages, match.device_pages)
        elif self.load_quota_pages is not None and to_load > self.load_quota_pages:
            limit = match.device_pages + self.load_quota_pages
            # Stop at the node that spans the limit, and cut it there.
            while pages - node.pages >= limit and node.parent is not None:
                pages -= node.pages
                node = node.parent
            if pages > limit:
                node, pages = self._split(node, node.pages - (pages - limit)), limit
        return self._last_restorable(node, pages)

    @staticmethod
    def _go_up(node: TreeNode, pages: int, limit: int) -> tuple[int, TreeNode]:
        while pages > limit and node.parent is not None:
            pages -= node.pages
            node = node.parent
        return pages, node

    def _load_to(self, match: Match, node: TreeNode, pages: int) -> Match:
        """Start loading the longest prefix up to ``node`` that the device has room for, and pin it."""
        while True:
            pinned = self._like(match, node, pages)
            if pinned.on_device:
                return pinned
            if self._try_load(pinned):
                loaded = self._like(match, node, pages)
                self._release_pins(pinned)
                return loaded
            self._release_pins(pinned)
            if node.parent is None:
                return self._like(match, self.root, 0)
            node, pages = self._last_restorable(node.parent, pages - node.pages)

    def _try_load(self, match: Match) -> bool:
        nodes = [node for node in self._path(match.node) if node.device is None][::-1]
        parts: dict[str, list[WindowPart]] = {}
        for part in match.host_pin.parts:
            parts.setdefault(part.name, []).append(part)
        hosts = [unpack(node.host) for node in nodes if node.host is not None]
        slots = self._slots(np.concatenate(hosts) if hosts else NO_PAGES)
        if not self._make_device_room(len(slots) // self.page_size):
            return False
        transfers = []
        for name, mine in parts.items():
            for part in mine:
                # What the device has of it is too short, and comes again with the rest.
                if part.device_pins:
                    return False
                self._drop_window(part, device=True)
            pages = np.concatenate([part.host for part in mine if part.host is not None])
            if not self._make_window_room(name, len(pages)):
                return False
            transfers.append(
                PoolTransfer(
                    name,
                    host_indices=self.windows[name].converter.slots(pages),
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            )
        operation = self._operation([])
        target = self.controller.load(slots, node_id=operation.id, **further(transfers))
        if target is None:
            return False
        self._start_load(operation, nodes, self._pages(target.cpu()), parts, transfers)
        return True

    def settle(self, match: Match) -> Match:
        """Wait for the loads that fill a match; the match it returns replaces it, shorter where one failed."""
        while True:
            waiting = any(node.load is not None for node in self._path(match.node)) or any(
                part.load is not None for part in match.device_pin.parts
            )
            if not waiting:
                break
            self.poll(wait=True)
        node, pages = match.node, match.pages
        while node.parent is not None and not (
            node.device is not None and self._is_alive(node) and self._windows_on_device(node)
        ):
            pages -= node.pages
            node = node.parent
        if node is match.node:
            return match
        shorter = self._like(match, node, pages)
        self.release(match)
        return shorter

    def _windows_on_device(self, node: TreeNode) -> bool:
        for name in self.windows:
            parts = self._window(node, name)
            if parts is None or any(part.on_device < needed for part, needed in parts):
                return False
        return True

    def alloc_device(self, count: int) -> Pages | None:
        """Allocate pages for the engine to compute into, evicting what the strategy says; None if too few."""
        if not self._make_device_room(count):
            return None
        return self.device_allocator.alloc_pages(count)

    def alloc_window(self, name: PoolName | str, count: int) -> Pages | None:
        """Allocate pages of a windowed pool for the engine to compute into; None if too few."""
        return self._alloc_window_device(str(name), count)

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
            tree's pages stand and the duplicates among ``pages`` are freed.

        Raises
        ------
        ValueError
            Where the match is not on the device, or counts do not fit. Nothing was changed.
        """
        windows = windows or {}
        count = self._count_to_publish(match, pages, count, computed_tokens)
        for name, given in windows.items():
            if name not in self.windows:
                raise ValueError(f"windows has {name!s}; the tree's components are {list(self.windows)}")
            if len(given) > count:
                raise ValueError(f"windows has {len(given)} pages of {name!s} for {count} published pages")
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
        for name, given in windows.items():
            if len(given):
                self._adopt_window(node, name, given, device=True)
        result = self._like(match, node, end)
        self._release_pins(match)
        self._touch(node, match.priority)
        if duplicates:
            self.controller.evict_device(self._slots(np.concatenate(duplicates)))
        if self.write_policy is WritePolicy.WRITE_THROUGH:
            self._ensure_host(node)
            self._write_windows(node)
            self.controller.start_writing()
        if self._books[match.owner].device_queue is not None:
            self._keep_quota(match.owner)
        return InsertResult(result, sum(map(len, duplicates)))

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
            count = min(max(computed_tokens // self.page_size - match.pages, 0), len(pages))
        count = len(pages) if count is None else count
        request = len(match.keys) // KEY_BYTES
        if not 0 <= count <= len(pages) or match.pages + count > request:
            raise ValueError(
                f"{count} pages to insert behind {match.pages} matched ones; the request has {request} pages and "
                f"{len(pages)} were given"
            )
        return count

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
            sum(len(part.device) for part in parts if part.device is not None),
            sum(len(part.host) for part in parts if part.host is not None),
        )

    def namespace_stats(self, namespace: Namespace | None) -> tuple[int, int]:
        """Device and host pages of a namespace."""
        books = self._books[self._owner(namespace)]
        return books.device_pages, books.host_pages

    def check_integrity(self) -> None:
        """Check every invariant; raises RuntimeError naming the node and the fault."""
        integrity.check(self.root, self.windows)

    def pretty(self) -> str:
        """Draw the tree as text, a node a line: pages, tiers (D, H, S), locks, windows."""
        return integrity.draw(self.root)

    def reset(self) -> None:
        """Forget everything: device pages go back to the engine's allocators, host pages are free; matches are void."""
        self.drain()
        self.retraction.forget()
        for node in list(self._all_nodes()):
            for part in node.all_windows():
                if part.device is not None:
                    self._free_window_pages(part.name, part.device, device=True)
                part.device = part.host = None
            if node.device is not None:
                self.controller.evict_device(self._slots(unpack(node.device)))
            # Queues and old matches may still hold it; it has nothing any more.
            node.device = node.host = None
        self.controller.reset()
        self.root = TreeNode(0, None, b"")
        self._timed.clear()
        for books in self._books:
            books.device_pages = books.host_pages = 0
