"""Replay of a request trace against the real cache, every loaded byte checked.

===============  ======================================================================
module           holds
===============  ======================================================================
``plans``        which pools a model of each kind has, and what their rows look like
``options``      what to replay against, and what of it cannot work
``model``        the pools, groups and allocators of a replay
``payload``      the bytes used in place of computed KV
``rows``         filling device rows and checking them
``key_storage``  storage of keys alone, where no bytes move
``results``      what a replay saw
``runner``       serving the requests
===============  ======================================================================
"""

from typing import TYPE_CHECKING

from .options import STORAGES, ReplayError, ReplayOptions
from .plans import POOLS
from .results import PathCounts, PoolCounts, ReplayReport, VerificationError

if TYPE_CHECKING:
    from .runner import Replay
else:
    from hicache_kernels.lazy_names import names_from

    __getattr__ = names_from(__name__, "runner")

__all__ = [
    "POOLS",
    "STORAGES",
    "PathCounts",
    "PoolCounts",
    "Replay",
    "ReplayError",
    "ReplayOptions",
    "ReplayReport",
    "VerificationError",
]
