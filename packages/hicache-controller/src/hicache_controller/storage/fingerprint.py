"""What a stored page's bytes mean: the model, the rank and the format, as one digest that keys and pages carry."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import xxhash

from hicache_kernels.validation import whole

DIGEST_BYTES = 16
"""Length of a fingerprint's digest."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Model and rank whose KV a storage keeps; two fingerprints never see each other's pages.

    Parameters
    ----------
    model
        The model's id, such as its path on a hub.
    revision, weights_hash
        Which weights: a revision of the model id, a hash of the weights, or both. One is required.
    tp_rank, tp_size, pp_rank, pp_size
        Place in the tensor and pipeline parallel groups.
    extra
        Anything else that changes KV bytes, such as a rope scaling or a quantization, as pairs of names and values.

    Raises
    ------
    ValueError
        Where the model is empty, neither ``revision`` nor ``weights_hash`` is given, or a rank is not in its group.
    """

    model: str
    revision: str | None = None
    weights_hash: str | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError(f"model is {self.model!r}; it must name the model whose KV is stored")
        if not self.revision and not self.weights_hash:
            raise ValueError(
                "revision and weights_hash are both missing; give one, or KV of other weights of "
                f"{self.model!r} would be taken for this model's"
            )
        for group in ("tp", "pp"):
            size = whole(f"{group}_size", getattr(self, f"{group}_size"))
            rank = whole(f"{group}_rank", getattr(self, f"{group}_rank"), least=0)
            # As plain integers: the digest is that of their text.
            object.__setattr__(self, f"{group}_size", size)
            object.__setattr__(self, f"{group}_rank", rank)
            if rank >= size:
                raise ValueError(f"{group}_rank is {rank}; accepted are 0 to {group}_size - 1 = {size - 1}")

    def digest(self) -> bytes:
        """Return the 16 bytes that identify model and rank."""
        return _digest("model", dataclasses.asdict(self))

    def pool_digest(self, geometry: Any) -> bytes:
        """Return the 16 bytes that identify model, rank and the format of one pool's pages.

        Parameters
        ----------
        geometry
            The pool's ``geometry``: a dataclass of its layout, dtypes, page size, components and layers.

        Raises
        ------
        TypeError
            Where ``geometry`` is not a dataclass instance.
        """
        if not dataclasses.is_dataclass(geometry) or isinstance(geometry, type):
            raise TypeError(f"geometry is {geometry!r}; accepted is a dataclass instance that describes a pool's pages")
        return _digest("pool", {"model": dataclasses.asdict(self), "geometry": dataclasses.asdict(geometry)})


def _digest(kind: str, fields: dict[str, Any]) -> bytes:
    text = json.dumps([kind, fields], sort_keys=True, separators=(",", ":"), default=str)
    return xxhash.xxh3_128_digest(text.encode())
