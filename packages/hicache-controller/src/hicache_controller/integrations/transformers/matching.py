"""Finds, for every sequence of a batch, the longest prefix that the tiers hold and the whole batch can use."""

from __future__ import annotations

from collections.abc import Sequence

from ...hashing import Namespace
from ...tree import SequenceKeys, UnifiedRadixCache
from .past import Hit
from .rows import Row
from .tiers import STORAGE_WAIT_SECONDS, Tiers

STORAGE_STEP_BYTES = 1 << 30
"""What is fetched from storage at a time; one piece loads while the next is fetched. The forward pass hides the load
of the last piece, 20 ms for so many bytes, and smaller pieces cost more than they hide: on a GPU host, the forward pass
began 54 ms after a prompt of 1 GiB in one piece, 66 in two and 64 in three."""


def match_rows(tiers: Tiers, rows: Sequence[Row], namespace: Namespace | None) -> tuple[int, list[Hit]]:
    """Match and pin a prefix of every sequence, start to load it, and say how many columns of the batch it fills.

    transformers keeps one length for the whole batch, so what is used of each sequence ends at the same column: the
    smallest that any of them reaches. At least one token of every prompt is left to compute.

    Returns
    -------
    tuple
        Columns (padding included) that need no computing, and a :class:`Hit` for each sequence. Each row has its match,
        on the device or being loaded, and in ``taken`` the tokens that are used.
    """
    tree = tiers.tree
    keys = [SequenceKeys(tiers.page_size, row.tokens, namespace=namespace) for row in rows]
    # More than the device holds need not come from storage.
    room = tree.device_allocator.page_num
    usable = [min((row.length - 1) // tiers.page_size, room) for row in rows]
    if tiers.windowed and len({row.pad for row in rows}) > 1:
        # Windows and states exist at page boundaries alone, and there is no column where every sequence has one.
        usable = [0] * len(rows)
    hits: list[Hit] = []
    try:
        for row, key, limit in zip(rows, keys, usable, strict=True):
            hits.append(_find(tiers, row, key, limit, namespace, load=len(rows) == 1))
        columns = _common_columns(tiers, rows, keys, namespace)
        for row, key in zip(rows, keys, strict=True):
            _shorten(tree, tiers, row, key, max(0, columns - row.pad), namespace)
            if row.match is not None:
                row.match = tree.load_back(row.match, wait=False)
        # A device without room for all of them gives shorter matches.
        columns = _common_columns(tiers, rows, keys, namespace)
        for row in rows:
            row.taken = max(0, columns - row.pad)
    except BaseException:
        release_rows(tree, rows)
        raise
    return columns, [Hit(row.taken, hit.device, hit.host, hit.storage) for row, hit in zip(rows, hits, strict=True)]


def _find(tiers: Tiers, row: Row, key: SequenceKeys, limit: int, namespace: Namespace | None, *, load: bool) -> Hit:
    """Match a sequence in all tiers; with ``load``, what has come from storage is loaded while more of it comes."""
    tree, size = tiers.tree, tiers.page_size
    row.match = match = tree.match_prefix(key.hashes[:limit], namespace=namespace)
    device, host = match.device_pages, match.host_pages
    if not load or tiers.windowed:
        row.match = tree.prefetch(match, timeout=STORAGE_WAIT_SECONDS)
    elif tiers.controller.has_storage:
        page_bytes = int(tiers.controller.storage_host_pool.page_bytes)
        step = max(1, STORAGE_STEP_BYTES // page_bytes)
        end = match.pages
        while row.match.pages == end < limit:
            end = min(end + step, limit)
            following = tree.match_prefix(key.hashes[:end], namespace=namespace)
            try:
                coming = tree.start_prefetch(following)
                try:
                    row.match = tree.load_back(row.match, wait=False)
                finally:
                    following = tree.finish_prefetch(coming, wait=True, timeout=STORAGE_WAIT_SECONDS)
            except BaseException:
                tree.release(following)
                raise
            before, row.match = row.match, following
            tree.release(before)
    if tiers.windowed:
        row.shared = tree.known_pages(key.hashes[:limit]) * size
    return Hit(0, device * size, host * size, (row.match.pages - device - host) * size)


def release_rows(tree: UnifiedRadixCache, rows: Sequence[Row]) -> None:
    """Unpin the matches of all rows."""
    for row in rows:
        if row.match is not None:
            match, row.match = row.match, None
            tree.release(match)


def _common_columns(
    tiers: Tiers, rows: Sequence[Row], keys: Sequence[SequenceKeys], namespace: Namespace | None
) -> int:
    size = tiers.page_size
    while True:
        columns = min(row.pad + (row.match.pages if row.match is not None else 0) * size for row in rows)
        longest = max(row.pad for row in rows)
        if not any(columns > row.pad for row in rows):
            return 0
        if not tiers.windowed:
            return columns
        # Pads are equal here, so columns end on a page boundary; every sequence must be restorable at that very one.
        before = columns
        for row, key in zip(rows, keys, strict=True):
            _shorten(tiers.tree, tiers, row, key, columns - longest, namespace)
        columns = min(row.pad + (row.match.pages if row.match is not None else 0) * size for row in rows)
        if columns == before:
            return columns


def _shorten(
    tree: UnifiedRadixCache, tiers: Tiers, row: Row, key: SequenceKeys, tokens: int, namespace: Namespace | None
) -> None:
    """Cut a row's match to the pages that hold its first ``tokens`` tokens."""
    pages = -(-tokens // tiers.page_size)
    if row.match is not None and row.match.pages > pages:
        match, row.match = row.match, None
        row.match = tree.match_prefix(key.hashes[:pages], namespace=namespace)
        tree.release(match)
