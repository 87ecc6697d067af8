"""Moves KV cache pages between device and host memory: staged and main transfer modules for CUDA, ROCm and CPU."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .public import *
else:
    from .lazy_names import names_from

    __getattr__ = names_from(__name__, "public")
