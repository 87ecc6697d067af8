"""What follows a page's bytes in a Mooncake object: a footer that says what they are and proves that they are whole.

The footer is 128 bytes, integers little-endian: magic ``HICACHEM``, uint32 format version, uint32 footer length, uint64
payload length, uint8 key length, uint8 parent length, 6 zero bytes, key padded to 32 bytes, parent padded to 32 bytes,
16 bytes of the pool's fingerprint, 16 bytes XXH3-128 of everything before.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from .page_file import Outcome

MAGIC = b"HICACHEM"
VERSION = 1
FOOTER_BYTES = 128

_FIELDS = struct.Struct("<8sIIQBB6x32s32s16s")
_CHECKSUM_BYTES = 16


def make_footer(views: Sequence[memoryview], *, key: bytes, parent: bytes | None, fingerprint: bytes) -> bytes:
    """Return the footer of the page whose bytes are in ``views``."""
    size = sum(view.nbytes for view in views)
    before = parent or b""
    head = _FIELDS.pack(MAGIC, VERSION, FOOTER_BYTES, size, len(key), len(before), key, before, fingerprint)
    return head + _checksum(views, head)


def check_footer(footer: bytes, views: Sequence[memoryview], *, key: bytes, fingerprint: bytes) -> Outcome:
    """Say whether the bytes in ``views`` are the page of ``key``, going by the footer that came with them."""
    head = footer[:-_CHECKSUM_BYTES]
    magic, version, _, size, key_length, _, padded_key, _, found = _FIELDS.unpack(head)
    if magic != MAGIC:
        return Outcome.DAMAGED
    if version != VERSION:
        return Outcome.OLD_FORMAT
    if _checksum(views, head) != footer[-_CHECKSUM_BYTES:]:
        return Outcome.DAMAGED
    expected = (key, fingerprint, sum(view.nbytes for view in views))
    return Outcome.HIT if (padded_key[:key_length], found, size) == expected else Outcome.FOREIGN


def _checksum(views: Sequence[memoryview], head: bytes) -> bytes:
    checksum = xxhash.xxh3_128()
    for view in views:
        checksum.update(view)
    checksum.update(head)
    return checksum.digest()
