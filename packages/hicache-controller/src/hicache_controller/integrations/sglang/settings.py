"""Settings of the storage backend, as SGLang passes them on from its extra configuration; works without SGLang."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..storage_address import storage_address

SELECTS = ("backend_name", "module_path", "class_name", "interface_v1")
"""Keys of the extra configuration by which SGLang finds the backend, and calls it."""

PASSED_ON = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
"""Further keys that the extra configuration may have, which SGLang reads itself."""

MODULE, BACKEND = "hicache_controller.integrations.sglang", "HiCacheBackend"


@dataclass(frozen=True)
class SglangSettings:
    """Everything a user may set.

    Parameters
    ----------
    storage
        Where pages are kept: ``file:///directory``, ``mooncake://host:port``, or the name of another storage backend.
    storage_options
        Further options of the storage backend, such as ``capacity_bytes``.
    revision, weights_hash
        Which weights the model has; part of the identity of stored pages. One of them is needed, except for a model in
        a local directory, whose files say it.

    Raises
    ------
    TypeError, ValueError
        Naming the setting, its value and what is accepted.
    """

    storage: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    weights_hash: str | None = None

    def __post_init__(self) -> None:
        for name in ("storage", "revision", "weights_hash"):
            value = getattr(self, name)
            if (value is not None or name == "storage") and (not isinstance(value, str) or not value):
                raise TypeError(
                    f"{name} is {value!r}; accepted is a text" + ("" if name == "storage" else ", or nothing")
                )
        if not isinstance(self.storage_options, Mapping):
            raise TypeError(f"storage_options is {self.storage_options!r}; accepted are names with values")
        storage_address(self.storage)

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> SglangSettings:
        """Read SGLang's extra configuration.

        Raises
        ------
        TypeError, ValueError
            Also for a key that is not known, and where ``storage`` is missing.
        """
        names = [each.name for each in dataclasses.fields(cls)]
        unknown = sorted(set(extra_config) - {*names, *SELECTS, *PASSED_ON})
        if unknown:
            accepted = ", ".join((*names, *SELECTS, *PASSED_ON))
            raise ValueError(f"hicache-storage-backend-extra-config has {', '.join(unknown)}; accepted are {accepted}")
        if "storage" not in extra_config:
            raise ValueError("hicache-storage-backend-extra-config has no storage; it is needed, as file:///directory")
        return cls(**{name: extra_config[name] for name in names if name in extra_config})


def storage_backend_config(settings: SglangSettings) -> dict[str, Any]:
    """Return what ``--hicache-storage-backend-extra-config`` takes as JSON, with what differs from the defaults.

    Pages are moved without a copy in between (``interface_v1``), and each is stored with the key of the page before it,
    so that tails of prefixes leave a full storage before their heads.
    """
    given: dict[str, Any] = {"storage": settings.storage}
    if settings.storage_options:
        given["storage_options"] = dict(settings.storage_options)
    for name in ("revision", "weights_hash"):
        if getattr(settings, name) is not None:
            given[name] = getattr(settings, name)
    return {
        "backend_name": "hicache",
        "module_path": MODULE,
        "class_name": BACKEND,
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        **given,
    }
