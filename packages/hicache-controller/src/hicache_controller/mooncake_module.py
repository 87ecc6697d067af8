"""Importing Mooncake, whose wheel needs libraries that only the system can bring."""

from __future__ import annotations

import importlib
from typing import Any

SYSTEM_PACKAGES = ("libibverbs1", "librdmacm1", "libnuma1")
"""Of Debian and Ubuntu."""


def import_mooncake() -> Any:
    """Return the module ``mooncake.store``.

    Raises
    ------
    ImportError
        Naming what to install, where Mooncake or a library it needs is missing.
    """
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ImportError(
            f"Mooncake cannot be imported ({error}): install hicache-controller[mooncake] and the system's packages "
            f"{' '.join(SYSTEM_PACKAGES)}"
        ) from error
