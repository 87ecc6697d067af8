"""Page keys of a token sequence: hashed once, extended as tokens come, and compared as one run of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache_kernels.validation import whole

from ..hashing import HASH_BYTES, Namespace, page_hashes

KEY_BYTES = HASH_BYTES
"""Length of a page key."""

Tokens = npt.NDArray[np.int64]


class SequenceKeys:
    """Page keys of a growing token sequence.

    Only complete pages have keys; tokens after them wait for :meth:`extend`. The keys are those of
    :func:`hicache_controller.hashing.page_hashes` on the whole sequence, however it was cut.

    Parameters
    ----------
    page_size
        Tokens a page.
    tokens
        int32 or int64 ``[n]``, the beginning of the sequence.
    namespace
        What separates equal tokens; see :class:`hicache_controller.hashing.Namespace`.
    """

    def __init__(
        self,
        page_size: int,
        tokens: npt.NDArray[np.int64] | npt.NDArray[np.int32] | None = None,
        *,
        namespace: Namespace | None = None,
    ) -> None:
        self.page_size = whole("page_size", page_size)
        self.namespace = namespace
        self.hashes: list[bytes] = []
        self._pages: list[Tokens] = []
        self._rest: Tokens = np.empty(0, np.int64)
        if tokens is not None:
            self.extend(tokens)

    def __len__(self) -> int:
        """Complete pages."""
        return len(self.hashes)

    @property
    def token_count(self) -> int:
        """All tokens, including those after the last complete page."""
        return len(self.hashes) * self.page_size + len(self._rest)

    def extend(self, tokens: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> int:
        """Append tokens and hash the pages they complete; returns how many pages those are.

        Raises
        ------
        TypeError, ValueError
            As :func:`hicache_controller.hashing.page_hashes`; nothing was appended.
        """
        parent = self.hashes[-1] if self.hashes else None
        namespace = self.namespace if parent is None else None
        page_hashes(tokens[:0], self.page_size, parent=parent, namespace=namespace)
        joined = np.concatenate((self._rest, tokens.astype(np.int64, copy=False)))
        fresh = page_hashes(joined, self.page_size, parent=parent, namespace=namespace)
        whole = len(fresh) * self.page_size
        if fresh:
            self._pages.append(joined[:whole])
        self._rest = joined[whole:].copy()
        self.hashes += fresh
        return len(fresh)

    def tokens(self) -> Tokens:
        """Tokens of the complete pages, int64 ``[len(self) * page_size]``."""
        if len(self._pages) > 1:
            self._pages = [np.concatenate(self._pages)]
        return self._pages[0] if self._pages else np.empty(0, np.int64)


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Join page keys to one run of bytes; ValueError unless each has :data:`KEY_BYTES`."""
    blob = b"".join(keys)
    if not {KEY_BYTES}.issuperset(map(len, keys)):
        raise ValueError(f"keys hold {len(blob)} bytes for {len(keys)} pages; {KEY_BYTES} bytes a page are needed")
    return blob


def own_tokens(tokens: Tokens) -> Tokens:
    """Copy tokens for a node: a view would keep all tokens of its request in memory. Listeners cannot write to them."""
    copied = tokens.copy()
    copied.flags.writeable = False
    return copied


def key_list(blob: bytes) -> list[bytes]:
    """Cut a run of bytes into page keys."""
    return [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]


def common_pages(left: bytes, right: bytes) -> int:
    """Leading pages two key runs share; keys are chained, so one comparison answers for all before it."""
    low, high = 0, min(len(left), len(right)) // KEY_BYTES
    while low < high:
        middle = (low + high) // 2
        at = slice(middle * KEY_BYTES, (middle + 1) * KEY_BYTES)
        if left[at] == right[at]:
            low = middle + 1
        else:
            high = middle
    return low
