"""Versions of vLLM and their hooks: an unknown version warns, a missing hook is named."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

if "HICACHE_VLLM" not in os.environ:  # there it must not hide that vLLM cannot be imported
    pytest.importorskip("vllm", reason="vLLM is not installed; `nox -s vllm` installs it")

from hicache_controller.integrations.vllm import surface


@dataclass
class Hooks:
    value: int

    def method(self) -> None: ...


def test_hooks_that_are_there_pass() -> None:
    surface.check_hooks({Hooks: ("value", "method")})


def test_a_missing_hook_is_an_error_that_names_it() -> None:
    with pytest.raises(ImportError, match=r"lacks \S*Hooks.gone, \S*Hooks.lost, which this connector uses"):
        surface.check_hooks({Hooks: ("value", "gone", "lost")})


@pytest.mark.parametrize("version", ["0.33.0", "1.2.3", "nightly"])
def test_an_unknown_version_warns_and_goes_on(version: str, caplog: pytest.LogCaptureFixture) -> None:
    surface.logger.addHandler(caplog.handler)  # vLLM's loggers pass nothing on
    try:
        surface.check_version(version)
    finally:
        surface.logger.removeHandler(caplog.handler)
    assert f"vLLM is {version}; this connector was tried with 0.26 to 0.32" in caplog.text


@pytest.mark.parametrize("version", ["0.26.0", "0.32.1", "0.29.0rc1+cpu"])
def test_versions_that_were_tried_say_nothing(version: str, caplog: pytest.LogCaptureFixture) -> None:
    surface.logger.addHandler(caplog.handler)
    try:
        surface.check_version(version)
    finally:
        surface.logger.removeHandler(caplog.handler)
    assert caplog.text == ""


def test_a_version_without_the_hooks_is_refused() -> None:
    with pytest.raises(ImportError, match=r"vLLM is 0.25.1; the connector needs 0.26 or newer"):
        surface.check_version("0.25.1")
