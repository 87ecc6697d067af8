"""Fixtures of every layer; imports nothing but torch, so that each layer's tests run with only that layer installed."""

import os
import signal
import warnings
from collections.abc import Callable

import pytest
import torch

# A shell's background jobs and nohup ignore the interrupt, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Several workers give theirs the width of a terminal, and the command lines would keep it for good.
os.environ.pop("COLUMNS", None)


def needs(condition: bool, reason: str) -> None:
    """Skip on a user's machine, fail in CI: a missing compiler or service must not hide there."""
    if not condition:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device on this machine")
    return torch.device("cuda")


def in_child(function: Callable[[], object]) -> str:
    """Report what a function returns, or raises, in a forked child; SIGALRM ends one that hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks of a process with threads are what is tried
        child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            outcome = f"returned {function()}"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(writing, outcome.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        outcome = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child hung"
    return outcome
