"""Host memory for hierarchical KV caches: extent allocation, host pools for every attention kind, and pool groups."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .public import *
else:
    from hicache_kernels.lazy_names import names_from

    __getattr__ = names_from(__name__, "public")
