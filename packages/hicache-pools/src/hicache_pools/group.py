"""HostPoolGroup: the host pools of one model as one object, with allocation that is all or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hicache_kernels import Capabilities
from hicache_kernels.checks import check_tensor

from .group_slots import Side, SlotRequest, SlotTaker, give_slots
from .pool_entry import REQUIRED_POOL_ATTRIBUTES, PoolEntry, check_device_callbacks, check_entry
from .pool_transfer import PoolHitPolicy, PoolName, PoolTransfer

__all__ = ["REQUIRED_POOL_ATTRIBUTES", "HostPoolGroup", "PoolEntry", "PoolHitPolicy", "PoolName", "PoolTransfer"]

logger = logging.getLogger(__name__)


class HostPoolGroup:
    """The host pools of one model.

    An allocation takes every slot it needs or none. A pool that is short is asked to reclaim once, after everything
    taken so far was given back and with no lock held, and then all is tried again: so a callback sees all free slots,
    may call the group, and whatever it does, the outcome is all or nothing. Pools are asked in the order of their
    names, which is the same on every rank.

    Safe to call from several threads; one transfer belongs to one thread at a time.

    Parameters
    ----------
    entries
        At least one. The anchor is the one marked ``is_primary_index_anchor``, or the first.

    Raises
    ------
    ValueError
        No entries, two of one name, or two anchors.
    TypeError
        A host pool lacks a required attribute.
    """

    def __init__(self, entries: Iterable[PoolEntry]) -> None:
        if not isinstance(entries, Iterable):
            raise TypeError(f"entries is a {type(entries).__name__}; it must be a sequence of PoolEntry")
        members = tuple(entries)
        if not members:
            raise ValueError("entries is empty; a group has at least one pool")
        names: set[str] = set()
        for entry in members:
            check_entry(entry, names)
            names.add(entry.name)
        anchors = [entry for entry in members if entry.is_primary_index_anchor]
        if len(anchors) > 1:
            raise ValueError(f"{[str(e.name) for e in anchors]} are all marked as anchor; a group has one")
        self._anchor = anchors[0] if anchors else members[0]
        self._entries = members
        self._slots = SlotTaker()

    # -- entries

    @property
    def entries(self) -> tuple[PoolEntry, ...]:
        """The entries, in the order they were given."""
        return self._entries

    @property
    def entry_map(self) -> Mapping[str, PoolEntry]:
        """The entries by name; a snapshot that cannot be written."""
        return MappingProxyType({entry.name: entry for entry in self._entries})

    @property
    def anchor_entry(self) -> PoolEntry:
        """The entry whose indices others derive from."""
        return self._anchor

    def add_entry(self, entry: PoolEntry) -> None:
        """Add a pool; the group's capabilities count it from now on.

        Raises
        ------
        ValueError
            The name is taken, or the entry is marked as anchor: the group has one.
        TypeError
            Its host pool lacks a required attribute.
        """
        with self._slots.lock:
            check_entry(entry, {other.name for other in self._entries})
            if entry.is_primary_index_anchor:
                raise ValueError(
                    f"entry {entry.name!s} is marked as anchor, but {self._anchor.name!s} is it; a group has one"
                )
            self._entries = (*self._entries, entry)

    def get_entry(self, name: PoolName | str | None = None) -> PoolEntry:
        """Return the entry called ``name``, the anchor's with None; KeyError for an unknown name."""
        if name is None:
            return self._anchor
        for entry in self._entries:
            if entry.name == name:
                return entry
        raise KeyError(f"no pool is called {name!s}; the group has {[str(e.name) for e in self._entries]}")

    def get_pool(self, name: PoolName | str | None = None) -> Any:
        """Return the host pool called ``name``, the anchor's with None; KeyError for an unknown name."""
        return self.get_entry(name).host_pool

    # -- what the group is

    @property
    def layout(self) -> str:
        """Layout of the anchor's pool."""
        return str(self._anchor.host_pool.layout)

    @property
    def page_size(self) -> int:
        """Slots of a page of the anchor's pool."""
        return int(self._anchor.host_pool.page_size)

    @property
    def size(self) -> int:
        """Slots of the anchor's pool."""
        return int(self._anchor.host_pool.size)

    @property
    def device(self) -> Any:
        """Device of the anchor's pool."""
        return self._anchor.host_pool.device

    @property
    def can_use_write_back_jit(self) -> bool:
        """Whether every pool writes back over the staged path."""
        return all(entry.host_pool.can_use_write_back_jit for entry in self._entries)

    @property
    def supports_per_pool_backup_indices(self) -> bool:
        """Whether any pool does, so that where indices go has to be decided pool by pool."""
        return any(entry.host_pool.can_use_write_back_jit for entry in self._entries)

    def capabilities(self) -> dict[str, Capabilities]:
        """Return each pool's transfer paths and reasons, by name."""
        return {str(entry.name): entry.host_pool.capabilities() for entry in self._entries}

    # -- slots

    def available_size(self, pool: PoolName | str | None = None) -> int:
        """Return the free slots of a pool, the anchor's with None."""
        return int(self.get_pool(pool).available_size())

    def alloc(
        self, n: int, pool: PoolName | str | None = None, *, reclaim: Callable[[int], object] | None = None
    ) -> torch.Tensor | None:
        """Take ``n`` host slots of a pool (the anchor's with None), reclaiming once if it is short.

        Parameters
        ----------
        n
            Slots, whole pages of the pool.
        pool
            Its name.
        reclaim
            Called with ``n`` in place of the entry's ``host_evict_fn``; it makes room for all of them.

        Returns
        -------
        torch.Tensor or None
            int64 CPU indices ``[n]`` owned by the caller; None where there is no room, and nothing was taken.
        """
        taken = self._slots.take([SlotRequest(self.get_entry(pool), n, reclaim)], "host")
        return None if taken is None else taken[0]

    def free(self, indices: torch.Tensor, pool: PoolName | str | None = None) -> int:
        """Give host slots of a pool (the anchor's with None) back; returns how many."""
        return int(self.get_pool(pool).free(indices))

    def alloc_device(self, n: int, pool: PoolName | str | None = None) -> torch.Tensor | None:
        """Take ``n`` device slots through the entry's ``device_alloc_fn``, reclaiming once if it is short."""
        request = SlotRequest(self.get_entry(pool), n)
        check_device_callbacks(request.entry)
        taken = self._slots.take([request], "device")
        return None if taken is None else taken[0]

    def free_device(self, indices: torch.Tensor, pool: PoolName | str | None = None) -> None:
        """Give device slots back through the entry's ``device_free_fn``."""
        entry = self.get_entry(pool)
        check_device_callbacks(entry)
        check_tensor("indices", indices)
        give_slots(entry, indices, "device")

    def clear(self) -> None:
        """Free every host slot of every pool."""
        for entry in self._entries:
            entry.host_pool.clear()

    def destroy(self) -> None:
        """Destroy every pool, also when one of them raises; the first error is raised at the end."""
        errors: list[Exception] = []
        for entry in self._entries:
            try:
                entry.host_pool.destroy()
            except Exception as error:
                logger.exception("destroying pool %s failed", entry.name)
                errors.append(error)
        if errors:
            raise errors[0]

    # -- transfers

    def resolve_host_transfers(
        self,
        transfers: Sequence[PoolTransfer] | None,
        *,
        primary_device_indices: torch.Tensor | None = None,
        primary_host_indices: torch.Tensor | None = None,
    ) -> list[PoolTransfer] | None:
        """Give every transfer that has none its host slots, and derived transfers their source's indices.

        A transfer without ``host_indices`` gets as many slots as it has ``device_indices``, or whole pages for its
        ``keys``. A transfer with ``indices_from_pool`` shares the (host and device) indices of that pool: the
        ``primary_*`` ones where it is the anchor, else those of the one transfer of that name.

        Parameters
        ----------
        transfers
            Filled in place.
        primary_device_indices, primary_host_indices
            The anchor's indices in this operation.

        Returns
        -------
        list of PoolTransfer or None
            The same transfers in the same order. None where there are none, and where some pool has no room even after
            reclaim, with every slot given back and every transfer as it was.

        Raises
        ------
        KeyError
            A transfer names a pool that the group does not have.
        ValueError
            A transfer is there twice, has nothing to size it by or part of a page, derives from a pool that this
            operation does not have, or has indices other than its source's. Nothing was changed.
        RuntimeError
            A reclaim callback resolved these very transfers; they are as it left them.
        """
        return self._resolve(transfers or (), "host", primary_host_indices, primary_device_indices)

    def resolve_device_transfers(
        self,
        transfers: Sequence[PoolTransfer] | None,
        *,
        primary_device_indices: torch.Tensor | None = None,
        primary_host_indices: torch.Tensor | None = None,
    ) -> list[PoolTransfer] | None:
        """Give every transfer that has none its device slots; otherwise as :meth:`resolve_host_transfers`."""
        return self._resolve(transfers or (), "device", primary_host_indices, primary_device_indices)

    def release_transfers(self, transfers: Sequence[PoolTransfer] | None) -> int:
        """Give back what a group filled in, and leave the transfers as they were before.

        Derived transfers only drop their indices. Slots that a transfer came with are not touched, and a second
        release does nothing.

        Returns
        -------
        int
            Slots given back, host and device.
        """
        released = 0
        errors: list[Exception] = []
        _check_transfers(transfers or ())
        pairs = [(transfer, self.get_entry(transfer.name)) for transfer in transfers or ()]
        for transfer, entry in pairs:
            for side in ("host", "device"):
                indices = self._claim(transfer, side)
                if indices is None or transfer.indices_from_pool is not None:
                    continue
                try:
                    give_slots(entry, indices, side)
                    released += indices.numel()
                except Exception as error:
                    _set_indices(transfer, side, indices, from_group=True)
                    errors.append(error)
        if errors:
            raise errors[0]
        return released

    def _claim(self, transfer: PoolTransfer, side: Side) -> torch.Tensor | None:
        """Take what the group filled in out of a transfer; of several threads only one gets it."""
        with self._slots.lock:
            indices = _indices(transfer, side)
            if not (transfer.host_from_group if side == "host" else transfer.device_from_group):
                return None
            _set_indices(transfer, side, None, from_group=False)
            return indices

    def _resolve(
        self,
        transfers: Sequence[PoolTransfer],
        side: Side,
        primary_host_indices: torch.Tensor | None,
        primary_device_indices: torch.Tensor | None,
    ) -> list[PoolTransfer] | None:
        _check_transfers(transfers)
        for name, indices in (
            ("primary_host_indices", primary_host_indices),
            ("primary_device_indices", primary_device_indices),
        ):
            if indices is not None:
                check_tensor(name, indices)
        if not transfers:
            return None
        if len({id(transfer) for transfer in transfers}) < len(transfers):
            raise ValueError(f"transfers has one transfer twice: {[str(transfer.name) for transfer in transfers]}")
        primary = PoolTransfer(self._anchor.name, primary_host_indices, primary_device_indices)
        derived = self._pair_derived(transfers, primary)
        owners = [t for t in transfers if t.indices_from_pool is None and _indices(t, side) is None]
        # The order of names, not of the list: what a rank's tree lists first must not decide who gets the last slots.
        owners.sort(key=lambda transfer: str(transfer.name))
        requests = [SlotRequest(self.get_entry(t.name), self._count(t, side)) for t in owners]
        if side == "device":
            for request in requests:
                check_device_callbacks(request.entry)
        _check_derived(derived, side, owners)

        taken = self._slots.take(requests, side)
        if taken is None:
            return None
        if any(_indices(transfer, side) is not None for transfer in owners):
            for request, indices in zip(requests, taken, strict=True):
                give_slots(request.entry, indices, side)
            raise RuntimeError(f"a reclaim callback filled transfers in: {[str(transfer.name) for transfer in owners]}")
        for transfer, indices in zip(owners, taken, strict=True):
            _set_indices(transfer, side, indices, from_group=True)
        for transfer, source in derived:
            for each in ("host", "device"):
                indices_or_none = _indices(source, each)
                if _indices(transfer, each) is None and indices_or_none is not None:
                    _set_indices(transfer, each, indices_or_none, from_group=True)
        return list(transfers)

    def _pair_derived(
        self, transfers: Sequence[PoolTransfer], primary: PoolTransfer
    ) -> list[tuple[PoolTransfer, PoolTransfer]]:
        """Pair each derived transfer with the transfer that owns its indices, through any chain."""
        has_primary = primary.host_indices is not None or primary.device_indices is not None
        named: dict[str, list[PoolTransfer]] = {}
        for transfer in transfers:
            self.get_entry(transfer.name)
            named.setdefault(transfer.name, []).append(transfer)
        if has_primary:
            named[self._anchor.name] = [primary]
        pairs = []
        for transfer in transfers:
            source = transfer
            seen = {str(transfer.name)}
            while source.indices_from_pool is not None:
                name = source.indices_from_pool
                found = named.get(name, [])
                if len(found) != 1:
                    raise ValueError(
                        f"transfer {transfer.name!s} derives its indices from {name!s}, of which this operation has "
                        f"{len(found)} transfers; it needs one (or the primary indices, where {name!s} is the anchor)"
                    )
                source = found[0]
                if str(name) in seen and source.indices_from_pool is not None:
                    raise ValueError(f"transfer {transfer.name!s} derives its indices from itself, through {name!s}")
                seen.add(str(name))
            if source is not transfer:
                pairs.append((transfer, source))
        return pairs

    def _count(self, transfer: PoolTransfer, side: Side) -> int:
        other = _indices(transfer, "device" if side == "host" else "host")
        page_size = int(self.get_pool(transfer.name).page_size)
        if other is not None:
            if other.numel() % page_size:
                raise ValueError(
                    f"transfer {transfer.name!s} has {other.numel()} indices; a multiple of its pool's page size "
                    f"{page_size} is accepted"
                )
            return other.numel()
        if transfer.keys is not None:
            return len(transfer.keys) * page_size
        raise ValueError(
            f"transfer {transfer.name!s} has none of host_indices, device_indices, keys and indices_from_pool; give one"
        )


def _check_transfers(transfers: Sequence[PoolTransfer]) -> None:
    for number, transfer in enumerate(transfers):
        if not isinstance(transfer, PoolTransfer):
            raise TypeError(f"transfers[{number}] is a {type(transfer).__name__}; it must be a PoolTransfer")
        for side in ("host", "device"):
            indices = _indices(transfer, side)
            if indices is not None:
                check_tensor(f"{side}_indices of transfer {transfer.name!s}", indices)


def _indices(transfer: PoolTransfer, side: Side) -> torch.Tensor | None:
    return transfer.host_indices if side == "host" else transfer.device_indices


def _set_indices(transfer: PoolTransfer, side: Side, indices: torch.Tensor | None, *, from_group: bool) -> None:
    if side == "host":
        transfer.host_indices, transfer.host_from_group = indices, from_group
    else:
        transfer.device_indices, transfer.device_from_group = indices, from_group


def _check_derived(
    derived: Sequence[tuple[PoolTransfer, PoolTransfer]], side: Side, owners: Sequence[PoolTransfer]
) -> None:
    """Raise where a derived transfer would be left without indices, or has some that are not its source's."""
    for transfer, source in derived:
        if _indices(source, side) is None and source not in owners:
            raise ValueError(
                f"transfer {transfer.name!s} derives its indices from {source.name!s}, whose {side} indices are None; "
                f"give primary_{side}_indices"
            )
        for each in ("host", "device"):
            own, theirs = _indices(transfer, each), _indices(source, each)
            about_to_change = each == side and source in owners
            if own is not None and own is not theirs and (theirs is not None or about_to_change):
                raise ValueError(
                    f"transfer {transfer.name!s} has {each}_indices and indices_from_pool={source.name!s}; a derived "
                    f"transfer has none of its own"
                )
