"""Orders KV cache transfers against compute, keeps the prefix tree and the storage tier; the hicache command line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .public import *
else:
    from hicache_kernels.lazy_names import names_from

    __getattr__ = names_from(__name__, "public")
