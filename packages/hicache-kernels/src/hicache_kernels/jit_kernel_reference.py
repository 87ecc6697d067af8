"""The calls of :mod:`hicache_kernels.jit_kernel` in plain torch: their oracle, and what engines' own tests patch in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from . import jit_kernel
from .row_copy import plain_torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _in_plain_torch(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    @functools.wraps(call)
    def run(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        with plain_torch():
            return call(*arguments, **keywords)

    return run


transfer_hicache_one_layer = _in_plain_torch(jit_kernel.transfer_hicache_one_layer)
transfer_hicache_one_layer_mla = _in_plain_torch(jit_kernel.transfer_hicache_one_layer_mla)
transfer_hicache_all_layer = _in_plain_torch(jit_kernel.transfer_hicache_all_layer)
transfer_hicache_all_layer_mla = _in_plain_torch(jit_kernel.transfer_hicache_all_layer_mla)
transfer_hicache_all_layer_staged_lf_pf = _in_plain_torch(jit_kernel.transfer_hicache_all_layer_staged_lf_pf)
transfer_hicache_all_layer_mla_staged_lf_pf = _in_plain_torch(jit_kernel.transfer_hicache_all_layer_mla_staged_lf_pf)
