"""HiCacheBackend: a storage of hicache as the storage backend of SGLang's hierarchical cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from .surface import logger  # isort: skip  first: it says what is missing

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from ...storage import Fingerprint, StorageBackendFactory
from ...storage import HiCacheStorage as Storage
from ..storage_address import storage_address
from ..weight_files import directory_hash
from .pages import FLAT, FlatPages, HostPages
from .settings import SglangSettings

ANCHOR = "kv"
MAX_TEXT_KEY = 64
"""Bytes of the longest key that is stored as it is."""


class HiCacheBackend(HiCacheStorage):
    """One rank's storage backend, which SGLang makes for ``--hicache-storage-backend dynamic``.

    Pages go straight between host pools and storage where the extra configuration has ``interface_v1``, and through a
    buffer otherwise. Pools that tensor-parallel ranks share (the latents of MLA) are stored once; all others, the
    recurrent states and the draft of such a model included, once a rank.

    Parameters
    ----------
    storage_config
        SGLang's description of model and rank, with the extra configuration of :class:`SglangSettings`.
    kwargs
        Ignored; SGLang passes it.

    Raises
    ------
    TypeError, ValueError
        For a setting that is missing, unknown or wrong, and where nothing says which weights the model has.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._settings = SglangSettings.of(extra)
        self._config = storage_config
        self._zero_copy = bool(extra.get("interface_v1", 0))
        self._weights = _weights(self._settings, storage_config.model_name)
        self._storages: dict[bool, Storage] = {}
        self._pools: dict[str, Any] = {}
        self._owners: dict[str, Storage] = {}
        self._flat: FlatPages | None = None
        self._anchor = ANCHOR if self._zero_copy else FLAT

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Make the anchor known, whose pages the calls without a pool move."""
        super().register_mem_pool_host(mem_pool_host)
        if self._zero_copy:
            self._register(ANCHOR, mem_pool_host)
        elif self._flat is None:
            self._owners[FLAT] = self._storage(sharded=not self._config.is_mla_model)
            self._flat = FlatPages(mem_pool_host, self._owners[FLAT])

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName | str) -> None:
        """Make another pool known by its name; the anchor's name is that of the pool that is known already."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != ANCHOR or self._zero_copy:
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        known = self._pools.get(name)
        if known is pool:
            return
        if known is not None:
            raise ValueError(f"host_pool_name is {name!r}; another pool is registered under it")
        sharded = not self._config.is_mla_model or name == PoolName.MAMBA or isinstance(pool, MHATokenToKVPoolHost)
        try:
            pages = HostPages(pool, has_bytes=not isinstance(pool, LogicalHostPool))
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise ValueError(
                f"pool {name} ({type(pool).__name__}, layout {pool.layout}) cannot be stored: {error}"
            ) from error
        storage = self._storage(sharded=sharded)
        storage.register_mem_pool_host(pages, name)
        self._pools[name], self._owners[name] = pool, storage
        if sharded and self._config.is_mla_model and self._config.tp_rank and name != PoolName.MAMBA:
            logger.warning(
                "pool %s is sharded over ranks, and SGLang lets only rank 0 of a model with MLA store it: rank %d will "
                "find nothing of it, so prefixes are not found in storage",
                name,
                self._config.tp_rank,
            )

    def _storage(self, *, sharded: bool) -> Storage:
        """Return the storage of this rank's own pages, or of those that its group shares; open it when first needed."""
        if sharded not in self._storages:
            backend, options = storage_address(self._settings.storage)
            options |= {"fingerprint": self._fingerprint(sharded), **self._settings.storage_options}
            self._storages[sharded] = StorageBackendFactory.create(backend, **options)
        return self._storages[sharded]

    def _fingerprint(self, sharded: bool) -> Fingerprint:
        config = self._config
        parts = {
            "engine": "sglang",
            "context_parallel": f"{config.attn_cp_rank} of {config.attn_cp_size}",
            "decode_context_parallel": f"{config.dcp_rank} of {config.dcp_size}, pages of {config.logical_page_size}",
        }
        revision, weights_hash = self._weights
        return Fingerprint(
            str(config.model_name),
            revision=revision,
            weights_hash=weights_hash,
            tp_rank=config.tp_rank if sharded else 0,
            tp_size=config.tp_size if sharded else 1,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            extra=tuple(sorted(parts.items())),
        )

    # Lookups

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading keys have a page of the anchor."""
        return self._exists(_names(keys), self._anchor)

    def exists(self, key: str) -> bool:
        """Return whether the anchor's page of a key is there."""
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the prefixes of which every pool has what its hit policy asks for, with one lookup a pool.

        Raises
        ------
        ValueError
            For a hit policy that is neither all pages nor trailing pages.
        """
        names = _names(keys)
        pages = self._exists(names, self._anchor)
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        restorable = np.ones(pages, dtype=bool)
        for transfer in pool_transfers or ():
            if not restorable.any():
                break
            good = self._restorable(transfer, names[:pages])
            if good.any():
                hits[transfer.name] = int(np.flatnonzero(good)[-1]) + 1
            restorable &= good
        lengths: list[int] = (np.flatnonzero(restorable) + 1).tolist()
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _exists(self, names: list[bytes], pool: str) -> int:
        return self._owners[pool].batch_exists(names, name=pool) if pool in self._owners else 0

    def _restorable(self, transfer: PoolTransfer, names: list[bytes]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each prefix, by its last page, whether a pool has what it asks for."""
        name = str(transfer.name)
        lengths = np.arange(1, len(names) + 1)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return lengths <= self._exists(names, name)
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            raise ValueError(
                f"pool {name} has hit policy {transfer.hit_policy}; accepted are all_pages and trailing_pages"
            )
        if name not in self._owners:
            return np.zeros(len(names), dtype=bool)
        present = np.array(self._owners[name].batch_exists_each(names, name=name), dtype=bool)
        window = max(1, len(transfer.keys or ()))
        # The run of present pages that ends here is as long as the window, or as the prefix.
        last_absent = np.maximum.accumulate(np.where(present, 0, lengths)) if len(names) else lengths
        return lengths - last_absent >= np.minimum(window, lengths)

    # Host pages

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill host pages of the anchor; return for each key whether its page is there."""
        return self._owners[ANCHOR].batch_get(_names(keys), host_indices.cpu(), name=ANCHOR)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store host pages of the anchor; return for each key whether its page is stored.

        Where SGLang passes the keys before these, a page whose predecessor is not stored is refused: nothing could find
        it.
        """
        names = _names(keys)
        parents: list[bytes | None] | None = None
        if extra_info is not None and extra_info.prefix_keys is not None:
            before = _names(extra_info.prefix_keys[-1:])
            parents = [before[0] if before else None, *names[:-1]]
        return self._owners[ANCHOR].batch_set(names, host_indices.cpu(), parents=parents, name=ANCHOR)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        """Fill host pages of several pools; return for each pool and key whether its page is there."""
        return self._move(transfers, lambda storage: storage.batch_get)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[Any, list[bool]]:
        """Store host pages of several pools; return for each pool and key whether its page is stored."""
        return self._move(transfers, lambda storage: storage.batch_set)

    def _move(
        self, transfers: Sequence[PoolTransfer], call: Callable[[Storage], Callable[..., list[bool]]]
    ) -> dict[Any, list[bool]]:
        results: dict[Any, list[bool]] = {}
        for transfer in transfers:
            name, keys, indices = str(transfer.name), list(transfer.keys or ()), transfer.host_indices
            page_size = int(self._pools[name].page_size) if name in self._pools else 0
            if not page_size or indices is None or indices.numel() != len(keys) * page_size:
                given = "no" if indices is None else indices.numel()
                logger.error(
                    "pool %s has %s indices for %d keys of %d slots; nothing is moved",
                    name,
                    given,
                    len(keys),
                    page_size,
                )
                results[transfer.name] = [False] * len(keys)
                continue
            results[transfer.name] = call(self._owners[name])(_names(keys), indices.cpu(), name=name)
        return results

    # Tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill a tensor with the anchor's flat page of a key and return it; None where that is not there."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill tensors with flat pages of the anchor; return each, or None where its page is not there."""
        return self._flat_pages().load(_names(keys), _tensors("target_locations", target_locations, keys))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page of the anchor; return whether it is stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages of the anchor; return whether all are stored."""
        return all(self._flat_pages().store(_names(keys), _tensors("values", values, keys)))

    def _flat_pages(self) -> FlatPages:
        if self._flat is None:
            raise RuntimeError(
                "pages are moved where they lie, as interface_v1 is set; tensors are accepted without it, once "
                "register_mem_pool_host was called"
            )
        return self._flat

    # End

    def clear(self) -> bool:
        """Remove every page of this model and rank; return True, as SGLang asks for it."""
        for storage in self._storages.values():
            storage.clear()
        return True

    def close(self) -> None:
        """Close the storages; calls after it raise RuntimeError. Idempotent."""
        for storage in self._storages.values():
            storage.close()


def _weights(settings: SglangSettings, model: str | None) -> tuple[str | None, str | None]:
    """Return revision and hash of the weights, from the settings or from the model's directory."""
    if settings.revision or settings.weights_hash:
        return settings.revision, settings.weights_hash
    found = directory_hash(model) if model else None
    if found is None:
        raise ValueError(
            f"nothing says which weights {model!r} has; add revision or weights_hash to the extra configuration"
        )
    return None, found


def _names(keys: Sequence[str]) -> list[bytes]:
    return [_name(key) for key in keys]


def _name(key: str) -> bytes:
    """Return the key of a page in storage: the bytes of a hash, a short text as it is, or the hash of a long one."""
    if len(key) == MAX_TEXT_KEY:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    text = key.encode()
    return text if len(text) <= MAX_TEXT_KEY else hashlib.sha256(text).digest()


def _tensors(name: str, given: Any, keys: Sequence[str]) -> list[torch.Tensor]:
    tensors = list(given or ())
    if len(tensors) != len(keys) or not all(isinstance(each, torch.Tensor) for each in tensors):
        kinds = ", ".join(sorted({type(each).__name__ for each in tensors})) or "nothing"
        raise ValueError(f"{name} has {len(tensors)} of {kinds} for {len(keys)} keys; accepted is a tensor a key")
    return tensors
