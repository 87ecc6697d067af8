"""Frames of the project's own code above each compiled call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_kernels import paths

PACKAGES = {"hicache_kernels", "hicache_pools", "hicache_controller"}
Chains = list[tuple[str, list[tuple[Path, str]]]]
"""Name of a compiled function, and file and name of each frame above its call, the innermost first."""


class Recorder:
    """A compiled module that notes the frames above each call of its functions."""

    def __init__(self, module: Any, chains: Chains) -> None:
        self._module = module
        self._chains = chains

    def __getitem__(self, name: str) -> Any:
        function = self._module[name]

        def call(*arguments: Any) -> Any:
            frame, frames = sys._getframe(1), []
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if not PACKAGES.isdisjoint(path.parts):
                    frames.append((path, frame.f_code.co_qualname))
                frame = frame.f_back
            self._chains.append((name, frames))
            return function(*arguments)

        return call


def recorded_chains(monkeypatch: pytest.MonkeyPatch) -> Chains:
    """Return a list that grows by the frames of every compiled call from now on."""
    found: Chains = []
    load = paths.load_module

    def recorded(name: str, device_type: str) -> Recorder:
        module = load(name, device_type)
        assert module is not None
        return Recorder(module, found)

    monkeypatch.setattr(paths, "load_module", recorded)
    return found
