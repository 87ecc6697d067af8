"""The contract of a storage backend (L3): whole pages by key, straight out of and into a host pool's memory."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache_pools import PoolHitPolicy, PoolTransfer

from ..forks import refuse_in_forks

logger = logging.getLogger(__name__)

RemovalListener = Callable[[Sequence[bytes], str], None]
"""Takes keys, each at most once, and the name of the pool whose parts of their pages a storage no longer has."""

ANCHOR = "kv"
"""Name of the anchor's pool in a storage, whatever its entry is called."""

MAX_KEY_BYTES = 64
"""Longest key. A page hash has 16 bytes; block hashes of engines have 32, and more with the number of a group."""

_POOL_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


class StoragePool(Protocol):
    """What a storage needs of a host pool."""

    @property
    def page_size(self) -> int:
        """Slots a page."""

    @property
    def page_num(self) -> int:
        """Pages of the pool."""

    @property
    def page_bytes(self) -> int:
        """Bytes a page, over all its parts; 0 for a pool without memory, of a simulation."""

    @property
    def geometry(self) -> Any:
        """Dataclass of layout, dtypes, page size, components and layers."""

    def page_memory(self, page: int) -> tuple[memoryview, ...]:
        """Writable views of a page's parts, in storage order."""


class RegisteredPool(NamedTuple):
    """A pool a storage moves pages for, with its geometry read once."""

    name: str
    pool: StoragePool
    page_size: int
    page_num: int
    page_bytes: int
    digest: bytes

    def memory(self, page: int) -> Sequence[memoryview]:
        """Return writable views of a page's parts; none of a pool without memory."""
        return self.pool.page_memory(page) if self.page_bytes else ()


class StorageStats(NamedTuple):
    """Plain counters since the storage was opened; ``pages`` and ``bytes`` are what it holds now.

    ``stored`` pages were written, ``present`` ones were there already. ``orphans`` were refused because the page before
    them is not stored, ``no_room`` because capacity did not suffice, ``skipped`` because the storage was backing off.
    ``damaged``, ``foreign``, ``old_format`` and ``wrong_owner`` pages were found, counted as misses and removed.
    ``compiled_reads`` is whether a file storage reads in compiled calls by now, not page by page in Python.
    """

    pages: int = 0
    bytes: int = 0
    capacity_bytes: int | None = None
    hits: int = 0
    misses: int = 0
    stored: int = 0
    present: int = 0
    evicted: int = 0
    orphans: int = 0
    no_room: int = 0
    skipped: int = 0
    damaged: int = 0
    foreign: int = 0
    old_format: int = 0
    wrong_owner: int = 0
    read_errors: int = 0
    write_errors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    backing_off: bool = False
    compiled_reads: bool = False


class HiCacheStorage(ABC):
    """Pages that outlive the process or the machine.

    Callers use the ``batch_`` methods, which check their arguments. A backend implements :meth:`find_pages`,
    :meth:`load_pages`, :meth:`store_pages`, :meth:`format_digest`, :meth:`clear` and :meth:`stats`; it calls
    :meth:`note_removed` for what it removes. Faults of the medium are never raised: what cannot be read is not there,
    what cannot be written is reported as not stored. Methods may be called from several threads.
    """

    def __init__(self) -> None:
        refuse_in_forks(self)
        self._pools: dict[str, RegisteredPool] = {}
        self._closed = False
        self._removal_listener: RemovalListener | None = None
        self._removed_parts: deque[tuple[str, bytes]] = deque()
        self._lock = threading.Lock()  # guards the counts, and what a backend here knows of its pages
        self._counts: Counter[str] = Counter()

    def register_mem_pool_host(self, pool: StoragePool, name: str = "kv") -> None:
        """Make a host pool known, whose pages ``batch_get`` fills and ``batch_set`` reads.

        Parameters
        ----------
        pool
            A physical host pool, never a group.
        name
            The pool's name in the group; ``kv`` is the anchor.

        Raises
        ------
        ValueError
            Where the name is not 1 to 64 of letters, digits and underscores, or another pool has it.
        TypeError
            Where the pool lacks an attribute, or :meth:`format_digest` does not return bytes.
        """
        self.check_open()
        if not _POOL_NAME.fullmatch(name):
            raise ValueError(f"name is {name!r}; accepted are 1 to 64 letters, digits and underscores")
        known = self._pools.get(name)
        if known is not None and known.pool is not pool:
            raise ValueError(f"name is {name!r}; another pool is registered under it")
        for attribute in ("page_size", "page_num", "page_bytes", "geometry", "page_memory"):
            if not hasattr(pool, attribute):
                raise TypeError(f"pool is {type(pool).__name__}; it lacks {attribute}, which a storage needs")
        digest = self.format_digest(pool)
        if not isinstance(digest, bytes):
            raise TypeError(
                f"{type(self).__name__}.format_digest returned {digest!r}; it must return bytes that change with the "
                "format of the pool's pages, such as Fingerprint.pool_digest(pool.geometry)"
            )
        self._pools[name] = RegisteredPool(str(name), pool, pool.page_size, pool.page_num, pool.page_bytes, digest)

    def set_removal_listener(self, callback: RemovalListener | None) -> None:
        """Have the parts of pages reported that the storage removes on its own, or finds removed by others.

        That is eviction, a page found damaged, :meth:`clear`, and what another process removed, once a call here
        notices it; ``batch_get`` of a page that is not there reports it even where it never was. A part is reported
        under its page's key and its pool's name, if that pool is registered, by the thread whose call notices it,
        before that call returns and with no lock held. Where another thread stores the same part meanwhile, the report
        may come after that.

        Parameters
        ----------
        callback
            Called with the keys and the pool's name, once for each pool; None for no reports. What it raises is logged
            and not raised again.

        Raises
        ------
        RuntimeError
            Where another one is set; None must come before a second.
        """
        if callback is not None and self._removal_listener not in (None, callback):
            raise RuntimeError(
                f"callback is {callback!r}, but removals are reported to {self._removal_listener!r}; "
                "set_removal_listener(None) must come first"
            )
        self._removal_listener = callback
        if callback is None:
            self._removed_parts.clear()

    def batch_exists(self, keys: Sequence[bytes], *, name: str = "kv") -> int:
        """Return how many leading keys have a page of pool ``name``.

        The answer is about sizes and names; damage shows when a page is read.
        """
        present = self._which_exist(keys, name, leading=True)
        return present.index(False) if False in present else len(present)

    def batch_exists_each(self, keys: Sequence[bytes], *, name: str = "kv") -> list[bool]:
        """Return for each key whether its page of pool ``name`` is there, as :meth:`batch_exists` sees it."""
        return self._which_exist(keys, name, leading=False)

    def batch_get(self, keys: Sequence[bytes], host_indices: torch.Tensor, *, name: str = "kv") -> list[bool]:
        """Fill host pages from storage.

        Parameters
        ----------
        keys
            One a page, 1 to 64 bytes each.
        host_indices
            int64 or int32 slot indices on the CPU, whole pages of pool ``name`` in the order of ``keys``.

        Returns
        -------
        list of bool
            For each key whether its page is loaded. The bytes of a page that is not are undefined.

        Raises
        ------
        ValueError
            Where counts do not match or indices are not whole pages of the pool.
        KeyError
            Where no pool is registered under ``name``.
        """
        pool, names = self._pool(name), self._keys(keys)
        pages = _pages_of(host_indices, pool, len(names))
        try:
            return self.load_pages(pool, names, pages) if names else []
        finally:
            self.report_removed()

    def batch_set(
        self,
        keys: Sequence[bytes],
        host_indices: torch.Tensor,
        *,
        parents: Sequence[bytes | None] | None = None,
        name: str = "kv",
    ) -> list[bool]:
        """Store host pages.

        Parameters
        ----------
        keys
            One a page, 1 to 64 bytes each, heads of prefixes first.
        host_indices
            int64 or int32 slot indices on the CPU, whole pages of pool ``name`` in the order of ``keys``. Their bytes
            must not change before the call returns.
        parents
            For each key the key of the page before it, None for a sequence's first page. A page whose parent is not
            stored is refused, and leaves before its parent does. Without parents pages are independent.

        Returns
        -------
        list of bool
            For each key whether its page is in storage as the call returns. A page that is not is not visible either.
            Pages of one call do not evict each other: what there is no room for is refused.

        Raises
        ------
        ValueError, KeyError
            As ``batch_get``.
        """
        pool, names = self._pool(name), self._keys(keys)
        pages = _pages_of(host_indices, pool, len(names))
        before: list[bytes | None] = [None] * len(names) if parents is None else list(parents)
        if len(before) != len(names):
            raise ValueError(f"parents has {len(before)} entries for {len(names)} keys")
        self._keys([p for p in before if p is not None])
        try:
            return self.store_pages(pool, names, pages, before) if names else []
        finally:
            self.report_removed()

    def batch_exists_pools(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer], *, name: str = "kv") -> int:
        """Return the longest of :meth:`restorable_lengths`; 0 where there is none."""
        return max(self.restorable_lengths(keys, transfers, name=name), default=0)

    def restorable_lengths(
        self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer] = (), *, name: str = "kv"
    ) -> list[int]:
        """Return the length of every prefix of which every pool has what it needs.

        Parameters
        ----------
        keys
            One a page of the anchor, heads first.
        transfers
            What is needed in addition to the anchor's pages. ``ALL_PAGES``: the pool's part of each page.
            ``TRAILING_PAGES``: the pool's parts of the prefix's last pages, as many as the transfer has keys, one where
            it has none; a prefix shorter than that needs all of its pages.
        name
            The anchor.

        Returns
        -------
        list of int
            Pages, in ascending order, without 0. The bytes are checked when they are read.
        """
        length = self.batch_exists(keys, name=name)
        trailing = []
        for transfer in transfers:
            if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                length = min(length, self.batch_exists(keys[:length], name=transfer.name))
            else:
                trailing.append(transfer)
        restorable = np.ones(length, dtype=bool)
        for transfer in trailing:
            window = 1 if transfer.keys is None else len(transfer.keys)
            present = self.batch_exists_each(keys[:length], name=transfer.name)
            restorable &= _ends_a_run(np.array(present, dtype=bool), window)
        lengths: list[int] = (np.flatnonzero(restorable) + 1).tolist()
        return lengths

    def batch_get_pools(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Fill the host pages of each transfer's ``host_indices`` from its ``keys``; results by pool name."""
        return {
            str(transfer.name): self.batch_get(*_keys_and_indices(transfer), name=transfer.name)
            for transfer in transfers
        }

    def batch_set_pools(
        self, transfers: Sequence[PoolTransfer], *, parents: Mapping[bytes, bytes | None] | None = None
    ) -> dict[str, list[bool]]:
        """Store the host pages of each transfer, the anchor's first; results by pool name, as the call returns.

        Parameters
        ----------
        transfers
            With ``keys`` and ``host_indices``, the anchor before the pools that depend on it.
        parents
            The key of the page before each key, as ``batch_set`` takes it.
        """
        results = {}
        for transfer in transfers:
            keys, indices = _keys_and_indices(transfer)
            before = None if parents is None else [parents[key] for key in keys]
            results[str(transfer.name)] = self.batch_set(keys, indices, parents=before, name=transfer.name)
        for transfer in transfers[:-1]:  # whose pages may have made room for those of later ones
            keys, _ = _keys_and_indices(transfer)
            there = self.batch_exists_each(keys, name=transfer.name)
            stored = zip(results[str(transfer.name)], there, strict=True)
            results[str(transfer.name)] = [done and exists for done, exists in stored]
        return results

    @abstractmethod
    def clear(self) -> None:
        """Remove every page of this fingerprint."""

    @abstractmethod
    def stats(self) -> StorageStats:
        """Return counters since the storage was opened, and what it holds."""

    def close(self) -> None:
        """Stop using the medium; calls after it raise ``RuntimeError``. Idempotent."""
        self._closed = True

    @abstractmethod
    def find_pages(self, pool: RegisteredPool, keys: list[bytes], *, leading: bool) -> list[bool]:
        """Return for each key whether its page of ``pool`` is there, going by names and sizes.

        Parameters
        ----------
        pool, keys
            A registered pool, and checked keys.
        leading
            Only the keys before the first that is missing matter: the list may end with that one.
        """

    @abstractmethod
    def load_pages(self, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> list[bool]:
        """Fill pages of ``pool`` and check them; return for each key whether its page is loaded.

        Parameters
        ----------
        pool, keys
            A registered pool, and checked keys.
        pages
            Page numbers in the pool, one a key; ``pool.memory(number)`` is where the bytes go.
        """

    @abstractmethod
    def store_pages(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: list[bytes | None]
    ) -> list[bool]:
        """Store pages of ``pool``; return for each key whether its page is in storage, as :meth:`batch_set` says.

        Parameters
        ----------
        pool, keys, pages
            As in :meth:`load_pages`.
        parents
            For each key the key of the page before it, or None.
        """

    @abstractmethod
    def format_digest(self, pool: StoragePool) -> bytes:
        """Return what has to be equal for stored bytes to be this pool's: model, rank and the format of its pages.

        That is ``fingerprint.pool_digest(pool.geometry)`` of a :class:`Fingerprint`. Empty bytes are for storages whose
        pages live no longer than the pool, so that no other pool can ask for them.
        """

    def note_removed(self, keys: Iterable[bytes], name: str) -> None:
        """Note keys of pages whose part of pool ``name`` is gone, for the listener; locks may be held."""
        if self._removal_listener is not None:
            self._removed_parts.extend((name, key) for key in keys)

    def report_removed(self) -> None:
        """Report to the listener what was noted; no lock may be held. Every ``batch_`` method ends with this."""
        removed: dict[str, dict[bytes, None]] = {}
        with contextlib.suppress(IndexError):  # another thread reports the rest
            while self._removed_parts:
                name, key = self._removed_parts.popleft()
                removed.setdefault(name, {})[key] = None
        listener = self._removal_listener
        for name, keys in removed.items():
            try:
                if listener is not None:
                    listener(list(keys), name)
            except Exception:
                logger.exception("the removal listener failed on %d keys of pool %s", len(keys), name)

    def _which_exist(self, keys: Sequence[bytes], name: str, *, leading: bool) -> list[bool]:
        pool, names = self._pool(name), self._keys(keys)
        try:
            return self.find_pages(pool, names, leading=leading)
        finally:
            self.report_removed()

    def _count(self, **by: int) -> None:
        with self._lock:
            self._counts.update(by)

    def check_open(self) -> None:
        """Raise RuntimeError where the storage is closed."""
        if self._closed:
            raise RuntimeError("the storage is closed")

    def _pool(self, name: str) -> RegisteredPool:
        self.check_open()
        pool = self._pools.get(name)
        if pool is None:
            raise KeyError(f"name is {name!r}; registered pools: {', '.join(self._pools) or 'none'}")
        return pool

    @staticmethod
    def _keys(keys: Sequence[Any]) -> list[bytes]:
        for key in keys:
            if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
                raise ValueError(f"keys has {key!r}; accepted are 1 to {MAX_KEY_BYTES} bytes")
        return list(keys)


def _pages_of(host_indices: torch.Tensor, pool: RegisteredPool, pages: int) -> list[int]:
    """Page numbers of slot indices that are whole pages in order."""
    if host_indices.device.type != "cpu" or host_indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"host_indices is {host_indices.dtype} on {host_indices.device}; accepted is int64 or int32 on the CPU"
        )
    if host_indices.ndim != 1 or len(host_indices) != pages * pool.page_size:
        raise ValueError(
            f"host_indices has shape {tuple(host_indices.shape)}; {pages} keys of pool {pool.name!r} with pages of "
            f"{pool.page_size} slots need ({pages * pool.page_size},)"
        )
    slots: npt.NDArray[np.int64] = host_indices.numpy().astype(np.int64, copy=False).reshape(pages, pool.page_size)
    first = slots[:, :1]
    if pages and (first.min() < 0 or slots.max() >= pool.page_num * pool.page_size):
        raise ValueError(
            f"host_indices runs from {slots.min()} to {slots.max()}; pool {pool.name!r} has slots 0 to "
            f"{pool.page_num * pool.page_size - 1}"
        )
    if (first % pool.page_size).any() or (slots != first + np.arange(pool.page_size)).any():
        raise ValueError(f"host_indices are not whole pages of {pool.page_size} slots in order")
    numbers: list[int] = (first[:, 0] // pool.page_size).tolist()
    return numbers


def _ends_a_run(present: npt.NDArray[np.bool_], window: int) -> npt.NDArray[np.bool_]:
    """For each page whether it and the ``window - 1`` before it, or all before it, are present."""
    positions = np.arange(1, len(present) + 1)
    last_absent = np.maximum.accumulate(np.where(present, 0, positions))
    needed: npt.NDArray[np.bool_] = positions - last_absent >= np.minimum(window, positions)
    return needed


def _keys_and_indices(transfer: PoolTransfer) -> tuple[list[bytes], torch.Tensor]:
    if transfer.keys is None or transfer.host_indices is None:
        missing = "keys" if transfer.keys is None else "host_indices"
        raise ValueError(f"the transfer of pool {str(transfer.name)!r} has no {missing}")
    return HiCacheStorage._keys(transfer.keys), transfer.host_indices
