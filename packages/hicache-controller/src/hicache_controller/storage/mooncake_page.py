"""What follows a page's bytes in a Mooncake object: a footer that says what they are and proves that they are whole.

The footer is that of a page's file (see :mod:`.page_file`) with the magic ``HICACHEM``.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from .page_file import FIELDS, UNCHECKED_BYTES, VERSION, Outcome, footer_head

MAGIC = b"HICACHEM"


def make_footer(views: Sequence[memoryview], *, key: bytes, parent: bytes | None, fingerprint: bytes) -> bytes:
    """Return the footer of the page whose bytes are in ``views``."""
    size = sum(view.nbytes for view in views)
    head = footer_head(MAGIC, size=size, key=key, parent=parent, fingerprint=fingerprint)
    return head + _checksum(views, head)


def check_footer(footer: bytes, views: Sequence[memoryview], *, key: bytes, fingerprint: bytes) -> Outcome:
    """Say whether the bytes in ``views`` are the page of ``key``, going by the footer that came with them."""
    head = footer[:-UNCHECKED_BYTES]
    padded_key, magic, version, _, size, key_length, _, _, found = FIELDS.unpack(head)
    if magic != MAGIC:
        return Outcome.DAMAGED
    if version != VERSION:
        return Outcome.OLD_FORMAT
    if _checksum(views, head) != footer[-UNCHECKED_BYTES:]:
        return Outcome.DAMAGED
    expected = (key, fingerprint, sum(view.nbytes for view in views))
    return Outcome.HIT if (padded_key[:key_length], found, size) == expected else Outcome.FOREIGN


def _checksum(views: Sequence[memoryview], head: bytes) -> bytes:
    checksum = xxhash.xxh3_128()
    for view in views:
        checksum.update(view)
    checksum.update(head)
    return checksum.digest()
