"""Page hashes: what a page of tokens is called in every tier, computed from the sequence start and the namespace.

The bytes that are hashed, so that another program can compute the same keys (XXH3 with 128 bits, seed 0, the digest in
its canonical, big-endian form; every integer little-endian):

- **root** = ``XXH3-128("hicache/page-hash/1" + newline + fields)``. ``fields`` is the concatenation, in this order and
  only for the fields that are set, of salt (tag byte ``S``), adapter (``A``) and modality (``M``), each as
  ``tag, uint64 length of the value in bytes, value``. Text values are UTF-8.
- **page** = ``XXH3-128(parent + tokens)``: the 16 bytes of the parent page's hash (of the root for the first page),
  then the page's token ids, each as an int64.

A hash therefore names a whole prefix, not the page alone. XXH3 is fast, not cryptographic: someone who may choose the
tokens can construct two prefixes of one name. Where tenants do not trust each other, give each a secret salt.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_kernels.validation import whole

HASH_BYTES = 16
"""Length of a page hash."""

_FORMAT = b"hicache/page-hash/1\n"


@dataclass(frozen=True, slots=True)
class Namespace:
    """What separates equal tokens whose KV differs or must not be shared.

    Parameters
    ----------
    salt
        A tenant's secret, or anything that must not share cache entries.
    adapter
        Name (with version) of the adapter that is applied, such as a LoRA.
    modality
        Digest of what placeholder tokens represent, such as an image.

    Notes
    -----
    ``None`` and an empty value are different namespaces, and so are equal values in different fields. A value that is
    neither text nor bytes is a TypeError: a number has no one way to be written.
    """

    salt: str | bytes | None = None
    adapter: str | bytes | None = None
    modality: str | bytes | None = None

    def __post_init__(self) -> None:
        for name in ("salt", "adapter", "modality"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, bytes)):
                raise TypeError(f"{name} is {value!r}; accepted are str, bytes and None")

    def root_hash(self) -> bytes:
        """Return the 16 bytes that a sequence's first page has for its parent."""
        parts = [_FORMAT]
        for tag, value in ((b"S", self.salt), (b"A", self.adapter), (b"M", self.modality)):
            if value is not None:
                raw = value.encode() if isinstance(value, str) else value
                parts += (tag, struct.pack("<Q", len(raw)), raw)
        return xxhash.xxh3_128_digest(b"".join(parts))


_NOTHING_SET = Namespace()


def page_hashes(
    tokens: npt.NDArray[np.int64] | npt.NDArray[np.int32],
    page_size: int,
    *,
    parent: bytes | None = None,
    namespace: Namespace | None = None,
) -> list[bytes]:
    """Return the chained hashes of the complete pages of a token sequence.

    Parameters
    ----------
    tokens
        Token ids, one-dimensional, int32 or int64; both give the same hashes. Tokens after the last complete page do
        not count.
    page_size
        Tokens a page.
    parent
        Hash of the page before ``tokens[0]``, to extend a sequence whose hashes are known; it already contains the
        namespace.
    namespace
        For a sequence from its start; ``None`` is the namespace with no field set.

    Returns
    -------
    list of bytes
        ``len(tokens) // page_size`` hashes of 16 bytes.

    Raises
    ------
    TypeError
        Where ``tokens`` is not an int32 or int64 array, or ``page_size`` is not a whole number.
    ValueError
        Where ``tokens`` is not one-dimensional, ``page_size`` is not positive, ``parent`` is not 16 bytes, or both
        ``parent`` and ``namespace`` are given.
    """
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind != "i" or tokens.dtype.itemsize not in (4, 8):
        given = tokens.dtype if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise TypeError(f"tokens is {given}; accepted is a numpy array of int32 or int64")
    if tokens.ndim != 1:
        raise ValueError(f"tokens has shape {tokens.shape}; accepted is one dimension")
    page_size = whole("page_size", page_size)
    if parent is not None and namespace is not None:
        raise ValueError("parent and namespace are both given; the parent's hash already contains its namespace")
    if parent is not None and len(parent) != HASH_BYTES:
        raise ValueError(f"parent has {len(parent)} bytes; a page hash has {HASH_BYTES}")

    digest = parent if parent is not None else (namespace or _NOTHING_SET).root_hash()
    pages = len(tokens) // page_size
    data = tokens[: pages * page_size].astype("<i8", copy=False).tobytes()
    step = page_size * 8
    hash_of = xxhash.xxh3_128_digest
    hashes = []
    for start in range(0, len(data), step):
        digest = hash_of(digest + data[start : start + step])
        hashes.append(digest)
    return hashes
