"""Puts compiled modules into the wheel, where the environment names their directory."""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES_VARIABLE = "HICACHE_KERNELS_WHEEL_MODULES"


class ModulesHook(BuildHookInterface[Any]):
    """Makes a platform wheel of the directory ``HICACHE_KERNELS_WHEEL_MODULES``, whose name is the platform tag.

    Without it the wheel is for any platform, and modules are built on first use.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the modules, their records and their licences."""
        given = os.environ.get(MODULES_VARIABLE)
        if not given or self.target_name != "wheel":
            return
        modules = Path(given).resolve()
        if not any(modules.glob("*.so")):
            raise FileNotFoundError(f"{MODULES_VARIABLE} is {given!r}, a directory without modules")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{modules.name}"
        build_data["force_include"][str(modules)] = "hicache_kernels/modules"
