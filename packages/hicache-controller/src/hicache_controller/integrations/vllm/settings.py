"""Settings of the connector, as vLLM passes them on in ``kv_connector_extra_config``; works without vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hicache_kernels.validation import finite, one_of, seconds, whole

from ..storage_address import storage_address

EVICTIONS = ("lru", "lfu", "slru")
"""What leaves the host first: the block used longest ago, or least often, or used once before all used again."""

PASSED_ON = ("self_describing_kv_events", "spec_module_path", "spec_name")
"""Further keys that ``kv_connector_extra_config`` may have, which vLLM reads itself."""

MODULE = "hicache_controller.integrations.vllm"
CONNECTOR = "HiCacheConnector"


@dataclass(frozen=True)
class VllmSettings:
    """Everything a user may set.

    Parameters
    ----------
    l2_gb
        Host memory of one engine, all of its workers together, in GB (10**9 bytes).
    eviction
        ``lru``, ``lfu`` or ``slru``.
    storage
        Where blocks are kept beyond the process: ``file:///directory``, ``mooncake://host:port``, or the name of
        another storage backend; None for nowhere.
    storage_options
        Further options of the storage backend, such as ``capacity_bytes``.
    storage_wait_seconds
        How long a request waits for storage, before what has not come is computed.
    revision, weights_hash
        Which weights the model has, where vLLM's own configuration does not say; part of the identity of stored blocks.
    l2_blocks
        Exact number of blocks on the host, instead of ``l2_gb``.
    offload_prompt_only
        Whether only blocks of prompts are kept. By default those of answers are too: the next turn of a chat has both.
    pin_memory
        Whether host memory is pinned where there is a GPU.
    min_load_tokens
        How many tokens a hit must at least have to be loaded; shorter ones are computed. None for what
        ``prefill_tokens_per_second`` and the bytes of a token say.
    prefill_tokens_per_second
        How fast the engine computes a prompt. The default is that of an 8B model on one H200 (8,192 tokens in 226 ms).

    Raises
    ------
    TypeError, ValueError
        Naming the setting, its value and what is accepted.
    """

    l2_gb: float = 0.0
    eviction: str = "lru"
    storage: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    storage_wait_seconds: float = 5.0
    revision: str | None = None
    weights_hash: str | None = None
    l2_blocks: int | None = None
    offload_prompt_only: bool = False
    pin_memory: bool = True
    min_load_tokens: int | None = None
    prefill_tokens_per_second: float = 36_000.0

    def __post_init__(self) -> None:
        finite("l2_gb", self.l2_gb)
        if self.l2_blocks is not None:
            whole("l2_blocks", self.l2_blocks)
        elif not self.l2_gb:
            raise ValueError("l2_gb is 0; the host memory of the engine in GB is needed, such as 64")
        if self.min_load_tokens is not None:
            whole("min_load_tokens", self.min_load_tokens)
        finite("prefill_tokens_per_second", self.prefill_tokens_per_second, above=True)
        one_of("eviction", self.eviction, EVICTIONS)
        seconds("storage_wait_seconds", self.storage_wait_seconds, above=True)
        for name in ("offload_prompt_only", "pin_memory"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; accepted are true and false")
        for name in ("storage", "revision", "weights_hash"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise TypeError(f"{name} is {value!r}; accepted is a text, or nothing")
        if not isinstance(self.storage_options, Mapping):
            raise TypeError(f"storage_options is {self.storage_options!r}; accepted are names with values")
        if self.storage_options and self.storage is None:
            raise ValueError(f"storage_options is {dict(self.storage_options)} without storage; give both")
        if self.storage is not None:
            storage_address(self.storage)

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> VllmSettings:
        """Read ``kv_connector_extra_config``.

        Raises
        ------
        TypeError, ValueError
            Also for a key that is not known.
        """
        names = [each.name for each in dataclasses.fields(cls)]
        unknown = sorted(set(extra_config) - {*names, *PASSED_ON})
        if unknown:
            accepted = ", ".join((*names, *PASSED_ON))
            raise ValueError(f"kv_connector_extra_config has {', '.join(unknown)}; accepted are {accepted}")
        return cls(**{name: extra_config[name] for name in names if name in extra_config})

    def blocks(self, block_bytes: int) -> int:
        """Return how many blocks the host keeps, of so many bytes over all workers.

        Raises
        ------
        ValueError
            Where there is not room for one.
        """
        whole("block_bytes", block_bytes)
        if self.l2_blocks is not None:
            return self.l2_blocks
        blocks = int(self.l2_gb * 1e9) // block_bytes
        if not blocks:
            raise ValueError(f"l2_gb is {self.l2_gb}; one block of this model has {block_bytes / 1e9:.6f} GB")
        return blocks


def kv_transfer_config(settings: VllmSettings) -> dict[str, Any]:
    """Return what ``vllm serve --kv-transfer-config`` takes as JSON, with what differs from the defaults.

    A block that cannot be loaded is computed: without ``recompute`` vLLM would fail its request.
    """
    extra = {
        each.name: getattr(settings, each.name)
        for each in dataclasses.fields(settings)
        if getattr(settings, each.name) != _default(each)
    }
    if "storage_options" in extra:
        extra["storage_options"] = dict(extra["storage_options"])
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _default(setting: dataclasses.Field[Any]) -> Any:
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return setting.default
