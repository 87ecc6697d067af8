"""Fingerprints: which weights is required, and every field counts."""

import dataclasses

import pytest

from hicache_controller.storage import Fingerprint


@dataclasses.dataclass(frozen=True)
class Geometry:
    layout: str = "page_first"
    page_size: int = 64
    components: tuple[tuple[str, int], ...] = (("k", 4),)


BASE = {"model": "m", "revision": "1", "tp_size": 4, "pp_size": 4}
CHANGES = [
    {"model": "n"},
    {"revision": "2"},
    {"revision": None, "weights_hash": "1"},
    {"weights_hash": "1"},
    {"tp_rank": 1},
    {"tp_size": 8},
    {"pp_rank": 1},
    {"pp_size": 8},
    {"extra": (("a", "b"),)},
    {"extra": (("a,b", ""),)},
]


def test_every_field_counts():
    prints = [Fingerprint(**(BASE | change)) for change in ({}, *CHANGES)]
    assert len({p.digest() for p in prints}) == len(prints)
    geometries = [Geometry(), Geometry(layout="layer_first"), Geometry(page_size=1), Geometry(components=(("k", 8),))]
    assert len({p.pool_digest(g) for p in prints for g in geometries}) == len(prints) * len(geometries)
    assert Fingerprint(**BASE).digest() == Fingerprint(**BASE).digest()
    assert Fingerprint(**BASE).digest().hex() == "b9c77d6093bfddb96f9757aa169d19e1"


def test_which_weights_has_to_be_said():
    with pytest.raises(ValueError, match="revision and weights_hash are both missing"):
        Fingerprint("m")
    with pytest.raises(ValueError, match="model is ''"):
        Fingerprint("", revision="1")
    with pytest.raises(ValueError, match=r"tp_rank is 4; accepted are 0 to tp_size - 1 = 3"):
        Fingerprint("m", "1", tp_rank=4, tp_size=4)
    with pytest.raises(ValueError, match="pp_rank is -1"):
        Fingerprint("m", "1", pp_rank=-1)
    with pytest.raises(TypeError, match="geometry is None"):
        Fingerprint("m", "1").pool_digest(None)
