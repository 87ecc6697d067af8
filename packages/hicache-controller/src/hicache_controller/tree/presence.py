"""StoragePresence: what of a tree is in storage as far as is known, told by its backups and by the storage itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Keys that follow each other, and the key before them (None at a sequence's start).

    Attributes
    ----------
    first
        Where the run begins among the keys it was cut from.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None
    first: int = 0


class StoragePresence:
    """Keys that storage removed lately and, for events, all that it is known to have.

    A storage tells its removals on whatever thread notices them; they wait here until the tree's own thread takes them
    in. All else is for that thread alone.

    A removal that comes while the same page is being stored may be older or newer than that. It counts as newer: then a
    page is at worst stored again the next time it is used.

    Parameters
    ----------
    remember
        Whether to keep the key and the parent of every page in storage, which events need: about 120 bytes a page.
    """

    def __init__(self, *, remember: bool) -> None:
        self._remember = remember
        self._arrived: deque[bytes] = deque()
        self._gone: set[bytes] = set()
        self._parents: dict[str, dict[bytes, bytes | None]] = {}

    def note_removed(self, keys: Iterable[bytes]) -> None:
        """Note what storage has no longer; on any thread."""
        self._arrived.extend(keys)

    def take_removed(self) -> list[bytes]:
        """Take in what was noted since the last call; returns it."""
        if not self._arrived:
            return []
        removed = [self._arrived.popleft() for _ in range(len(self._arrived))]
        self._gone.update(removed)
        return removed

    def __len__(self) -> int:
        """Keys that were removed and not stored since."""
        return len(self._gone)

    def storing(self, keys: Iterable[bytes]) -> None:
        """Forget earlier removals of keys that are being stored, or that storage says it has."""
        if self._gone:
            self._gone.difference_update(keys)

    def lacks_any(self, keys: Iterable[bytes]) -> bool:
        """Whether any of some keys was removed, and not stored since."""
        return bool(self._gone) and not self._gone.isdisjoint(keys)

    def forget_removed(self, but: Collection[bytes] = ()) -> None:
        """Forget removals, as all pages of the tree were compared with them, but those of some keys."""
        self._gone.intersection_update(but)

    # For events

    def stored(self, pool: str, keys: Sequence[bytes], parent: bytes | None) -> list[Run]:
        """Remember pages of a pool that storage has; returns those that nobody was told of yet."""
        if not self._remember:
            return []
        known = self._parents.setdefault(pool, {})
        runs: list[Run] = []
        fresh: list[bytes] = []
        for at, key in enumerate(keys):
            if key not in known and key not in self._gone:
                known[key] = parent
                fresh.append(key)
            elif fresh:
                runs.append(Run(tuple(fresh), known[fresh[0]], at - len(fresh)))
                fresh = []
            parent = key
        if fresh:
            runs.append(Run(tuple(fresh), known[fresh[0]], len(keys) - len(fresh)))
        return runs

    def removed(self, keys: Iterable[bytes]) -> list[tuple[str, Run]]:
        """Forget pages of all pools that storage no longer has; returns those it was said to have, by pool."""
        wanted = list(dict.fromkeys(keys))
        found: list[tuple[str, Run]] = []
        for pool, known in self._parents.items():
            gone = {key: known.pop(key) for key in wanted if key in known}
            found += [(pool, run) for run in _chains(gone)]
        return found

    def forget_all(self) -> list[tuple[str, Run]]:
        """Forget a storage; returns what it was said to have."""
        self._arrived.clear()
        self._gone.clear()
        return self.removed([key for known in self._parents.values() for key in known])


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
