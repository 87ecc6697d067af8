"""Fixtures of every layer; imports nothing but torch, so that each layer's tests run with only that layer installed."""

import os
import signal

import pytest
import torch

# A shell's background jobs and nohup ignore the interrupt, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def needs(condition: bool, reason: str) -> None:
    """Skip on a user's machine, fail in CI: a missing compiler or service must not hide there."""
    if not condition:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device on this machine")
    return torch.device("cuda")
