"""StoragePresence: what is known to be in storage, from the tree's backups and from what storage reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Keys that follow one another, and the key before them (None at the start of a sequence)."""

    keys: tuple[bytes, ...]
    parent: bytes | None


class StoragePresence:
    """Keys that storage removed lately and, for events, all that it is known to have; by pool.

    A storage reports removals on any thread; they are kept here until the tree's own thread asks for them. Everything
    else is for that thread alone.

    A removal that is reported while the same page is being stored may be older or newer than that. It counts as newer:
    at worst the page is stored again the next time it is used.

    Parameters
    ----------
    remember
        Whether to keep the key and the parent of every page in storage, which events need: about 120 bytes a page.
    """

    def __init__(self, *, remember: bool) -> None:
        self._remember = remember
        self._arrived: deque[tuple[str, Sequence[bytes]]] = deque()
        self._gone: dict[str, set[bytes]] = {}
        self._parents: dict[str, dict[bytes, bytes | None]] = {}

    def note_removed(self, keys: Sequence[bytes], pool: str) -> None:
        """Note what storage no longer has, under the pool's name there; on any thread."""
        self._arrived.append((pool, keys))

    @property
    def news(self) -> bool:
        """Whether anything was noted since the last call of :meth:`take_noted`."""
        return bool(self._arrived)

    def take_noted(self) -> dict[str, list[bytes]]:
        """Return what was noted since the last call, for :meth:`removed`."""
        noted: dict[str, list[bytes]] = {}
        for _ in range(len(self._arrived)):
            pool, keys = self._arrived.popleft()
            noted.setdefault(pool, []).extend(keys)
        return noted

    def __len__(self) -> int:
        """Parts of pages that were removed and not stored since."""
        return sum(map(len, self._gone.values()))

    def storing(self, pool: str, keys: Iterable[bytes]) -> None:
        """Forget earlier removals of a pool's pages that are being stored, or that storage says it has."""
        gone = self._gone.get(pool)
        if gone:
            gone.difference_update(keys)

    def lacks_any(self, pool: str, keys: Iterable[bytes]) -> bool:
        """Whether any of some pages of a pool was removed, and not stored since."""
        gone = self._gone.get(pool)
        return not gone.isdisjoint(keys) if gone else False

    def forget_removed(self, keep: Collection[bytes] = ()) -> None:
        """Forget removals except those of some keys, once all pages of the tree were compared with them."""
        for gone in self._gone.values():
            gone.intersection_update(keep)

    def removed(self, pool: str, keys: Iterable[bytes]) -> list[Run]:
        """Note pages of a pool that storage no longer has; returns those that were reported to be there."""
        keys = list(keys)
        self._gone.setdefault(pool, set()).update(keys)
        return self._forget(pool, keys)

    # For events

    def stored(self, pool: str, keys: Sequence[bytes], parent: bytes | None) -> list[Run]:
        """Remember pages of a pool that storage has; returns those that were not reported yet."""
        if not self._remember:
            return []
        known, gone = self._parents.setdefault(pool, {}), self._gone.get(pool, ())
        before = zip(keys, (parent, *keys), strict=False)
        fresh = {key: parent for key, parent in before if key not in known and key not in gone}
        known.update(fresh)
        return _chains(fresh)

    def forget_all(self) -> list[tuple[str, Run]]:
        """Forget a storage; returns what was reported to be there, by pool."""
        self._arrived.clear()
        self._gone.clear()
        return [(pool, run) for pool, known in self._parents.items() for run in self._forget(pool, list(known))]

    def _forget(self, pool: str, keys: Iterable[bytes]) -> list[Run]:
        known = self._parents.get(pool, {})
        return _chains({key: known.pop(key) for key in keys if key in known})


def _chains(parents: dict[bytes, bytes | None]) -> list[Run]:
    """Cut keys into runs in which each is the parent of the next."""
    child = {parent: key for key, parent in parents.items() if parent is not None and parent in parents}
    runs = []
    for key, parent in parents.items():
        if parent is not None and child.get(parent) == key:
            continue
        chain = [key]
        while chain[-1] in child:
            chain.append(child[chain[-1]])
        runs.append(Run(tuple(chain), parent))
    return runs
