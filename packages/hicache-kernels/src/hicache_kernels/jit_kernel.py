"""The call surface that engines already use for such kernels, so that they switch to this package by an import.

Names and keywords are those of the calls. The compiled modules do the work, or plain torch where none is to be had.
``unroll`` is accepted and ignored, ``block_quota`` caps the CTAs, and ``page_size`` promises that each ``page_size``
indices name neighbouring, aligned slots on both sides. Device work is queued on the current stream.
"""

from __future__ import annotations

import functools
import logging
import numbers

import torch

from . import row_copy, row_sets
from .probe import unavailable_reason
from .rows import DIRECT_ALIGNMENT, STAGED_ALIGNMENT
from .spec import module_device_type

logger = logging.getLogger(__name__)


def transfer_hicache_one_layer(
    k_cache_dst: torch.Tensor,
    v_cache_dst: torch.Tensor,
    indices_dst: torch.Tensor,
    k_cache_src: torch.Tensor,
    v_cache_src: torch.Tensor,
    indices_src: torch.Tensor,
    *,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """Copy rows of one layer's K and V: ``cache_dst[indices_dst[i]] = cache_src[indices_src[i]]``.

    Parameters
    ----------
    k_cache_dst, v_cache_dst, k_cache_src, v_cache_src
        Caches of one element size, viewed as ``[slots, element_dim]``; rows are dense, at any distance from each other.
        On the device or in host memory, which a GPU reads and writes in place where it is pinned.
    indices_dst, indices_src
        int32 or int64 row numbers ``[n]``, on the CPU or the device.
    element_dim
        Elements of a row; the last dimension of ``k_cache_dst`` by default.
    unroll
        Ignored.
    block_quota
        Most CTAs the copy may hold.
    page_size
        Indices that name a page; ``n`` is a multiple of it.

    Raises
    ------
    TypeError, ValueError
        For a dtype, shape, stride, device or CPU-side index that does not fit, naming the tensor.
    """
    row_copy.copy_rows(
        row_sets.cache_rows({"k_cache_dst": k_cache_dst, "v_cache_dst": v_cache_dst}, element_dim),
        indices_dst,
        row_sets.cache_rows(
            {"k_cache_src": k_cache_src, "v_cache_src": v_cache_src},
            k_cache_dst.shape[-1] if element_dim is None else element_dim,
        ),
        indices_src,
        block_quota=block_quota,
        page_size=page_size,
    )


def transfer_hicache_one_layer_mla(
    cache_dst: torch.Tensor,
    indices_dst: torch.Tensor,
    cache_src: torch.Tensor,
    indices_src: torch.Tensor,
    *,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """Copy rows of one layer's latent cache; parameters and errors as in :func:`transfer_hicache_one_layer`."""
    row_copy.copy_rows(
        row_sets.cache_rows({"cache_dst": cache_dst}, element_dim),
        indices_dst,
        row_sets.cache_rows({"cache_src": cache_src}, cache_dst.shape[-1] if element_dim is None else element_dim),
        indices_src,
        block_quota=block_quota,
        page_size=page_size,
    )


def transfer_hicache_all_layer(
    k_ptr_dst: torch.Tensor,
    v_ptr_dst: torch.Tensor,
    indices_dst: torch.Tensor,
    k_ptr_src: torch.Tensor,
    v_ptr_src: torch.Tensor,
    indices_src: torch.Tensor,
    *,
    kv_cache_src_stride_bytes: int,
    kv_cache_dst_stride_bytes: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """Copy rows of every layer's K and V, which tables of layer addresses name.

    Parameters
    ----------
    k_ptr_dst, v_ptr_dst, k_ptr_src, v_ptr_src
        uint64 or int64 ``[layers]``: address of row 0 of each layer, the one that kernels take. Tables of
        :func:`hicache_kernels.pointer_table` remember their tensors, so that ranges are checked and plain
        torch can follow them; any other table needs a compiled module.
    indices_dst, indices_src
        int32 or int64 row numbers ``[n]``, on the CPU or the device.
    kv_cache_src_stride_bytes, kv_cache_dst_stride_bytes
        Bytes between rows.
    element_size
        Bytes of a row; by default the strides, which are then equal.
    unroll, block_quota, page_size
        As in :func:`transfer_hicache_one_layer`.

    Raises
    ------
    TypeError, ValueError
        For a dtype, shape, stride, device or CPU-side index that does not fit, naming the tensor.
    RuntimeError
        For a foreign table where no compiled module is to be had.
    """
    size = _element_size(
        element_size,
        kv_cache_src_stride_bytes=kv_cache_src_stride_bytes,
        kv_cache_dst_stride_bytes=kv_cache_dst_stride_bytes,
    )
    row_copy.copy_rows(
        row_sets.table_rows({"k_ptr_dst": k_ptr_dst, "v_ptr_dst": v_ptr_dst}, kv_cache_dst_stride_bytes, size),
        indices_dst,
        row_sets.table_rows({"k_ptr_src": k_ptr_src, "v_ptr_src": v_ptr_src}, kv_cache_src_stride_bytes, size),
        indices_src,
        block_quota=block_quota,
        page_size=page_size,
    )


def transfer_hicache_all_layer_mla(
    ptr_dst: torch.Tensor,
    indices_dst: torch.Tensor,
    ptr_src: torch.Tensor,
    indices_src: torch.Tensor,
    *,
    cache_src_stride_bytes: int,
    cache_dst_stride_bytes: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """Copy rows of every layer's latent cache; parameters and errors as in :func:`transfer_hicache_all_layer`."""
    size = _element_size(
        element_size, cache_src_stride_bytes=cache_src_stride_bytes, cache_dst_stride_bytes=cache_dst_stride_bytes
    )
    row_copy.copy_rows(
        row_sets.table_rows({"ptr_dst": ptr_dst}, cache_dst_stride_bytes, size),
        indices_dst,
        row_sets.table_rows({"ptr_src": ptr_src}, cache_src_stride_bytes, size),
        indices_src,
        block_quota=block_quota,
        page_size=page_size,
    )


def transfer_hicache_all_layer_staged_lf_pf(
    k_ptr_src: torch.Tensor,
    v_ptr_src: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    staging_k: torch.Tensor,
    staging_v: torch.Tensor,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    *,
    page_size: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """Write pages of layer-first device rows to page-first host buffers, through staging memory and the copy engine.

    Parameters
    ----------
    k_ptr_src, v_ptr_src
        Tables of the device layers, as in :func:`transfer_hicache_all_layer`; rows are dense.
    src_indices
        int32 or int64 slot indices ``[n]`` of whole pages.
    dst_indices
        int64 slot indices ``[n]`` on the CPU, of whole, aligned pages.
    staging_k, staging_v
        Device memory ``[slots, layers, ...]``; more pages than fit are moved in chunks.
    dst_k, dst_v
        Host buffers ``[slots, layers, ...]``; an element is dense, slots and layers may have any stride.
    page_size
        Slots of a page.
    element_size
        Bytes of an element; those of ``staging_k[0, 0]`` by default.
    unroll, block_quota
        As in :func:`transfer_hicache_one_layer`.

    Raises
    ------
    TypeError, ValueError
        For a dtype, shape, stride, device or index that does not fit, naming the tensor.
    RuntimeError
        For a foreign table where no compiled module is to be had.
    """
    row_copy.stage_pages(
        {"k_ptr_src": k_ptr_src, "v_ptr_src": v_ptr_src},
        src_indices,
        dst_indices,
        {"staging_k": staging_k, "staging_v": staging_v},
        {"dst_k": dst_k, "dst_v": dst_v},
        page_size=page_size,
        element_size=element_size,
        block_quota=block_quota,
    )


def transfer_hicache_all_layer_mla_staged_lf_pf(
    ptr_src: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    staging: torch.Tensor,
    dst: torch.Tensor,
    *,
    page_size: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """Write pages of one latent cache; as :func:`transfer_hicache_all_layer_staged_lf_pf`."""
    row_copy.stage_pages(
        {"ptr_src": ptr_src},
        src_indices,
        dst_indices,
        {"staging": staging},
        {"dst": dst},
        page_size=page_size,
        element_size=element_size,
        block_quota=block_quota,
    )


def can_use_hicache_jit_kernel(
    *,
    element_size: int,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> bool:
    """Whether the main module moves rows of ``element_size`` bytes here; where not, the reason is logged.

    Any positive multiple of 4 will do. The module is built or loaded by the first call that gets this far; this never
    raises.
    """
    return _can_use("main", element_size, DIRECT_ALIGNMENT)


def can_use_write_back_jit_kernel(
    *, element_size: int, unroll: int | None = None, block_quota: int | None = None
) -> bool:
    """Whether the staged module moves rows of ``element_size`` bytes here; where not, the reason is logged.

    Any positive multiple of 16 will do. The module is built or loaded by the first call that gets this far; this never
    raises.
    """
    return _can_use("staged", element_size, STAGED_ALIGNMENT)


def _can_use(module: str, element_size: int, alignment: int) -> bool:
    # Asked by engines about values they have not looked at: what is no whole number is a refusal too.
    whole = isinstance(element_size, numbers.Integral)
    if not whole or element_size <= 0 or element_size % alignment:
        _log_refusal(module, repr(element_size) if not whole else str(element_size), alignment)
        return False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The loader logs the reason, once.
    return unavailable_reason(module, module_device_type(device)) is None


@functools.cache
def _log_refusal(module: str, element_size: str, alignment: int) -> None:
    logger.warning(
        "the %s module cannot move rows of %s bytes: they must be a positive multiple of %d",
        module,
        element_size,
        alignment,
    )


def _element_size(given: int | None, **strides: int) -> int:
    if given is not None:
        return given
    (source, source_stride), (destination, destination_stride) = strides.items()
    if source_stride != destination_stride:
        raise ValueError(
            f"element_size is missing, and {source} {source_stride} differs from {destination} {destination_stride}; "
            "without element_size they must be equal"
        )
    return source_stride
