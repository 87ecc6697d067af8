"""Fakes and helpers of the storage tests."""

import os

import pytest

from hicache_controller.storage import Fingerprint, mooncake, page_reader
from hicache_controller.storage.contract import BytePool
from hicache_controller.storage.mooncake import MooncakeStorage
from hicache_kernels.probe import load_outcome


@pytest.fixture(params=["compiled", "python"])
def reading(request, monkeypatch):
    """How a file storage reads: in one compiled call, or page by page as while there is no compiled module."""
    outcome = load_outcome("files", "cpu")
    if request.param == "python":
        monkeypatch.setattr(page_reader, "load_outcome_so_far", lambda name, device_type: None)
    elif outcome.module is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no compiled module: {outcome.reason}")
    return request.param


@pytest.fixture
def fake_pool():
    return BytePool


@pytest.fixture
def fingerprint():
    return Fingerprint(model="org/model", revision="abc")


@pytest.fixture
def fresh():
    """A fingerprint of its own, so that tests can share a master."""
    return Fingerprint("org/model", os.urandom(8).hex())


@pytest.fixture(scope="module")
def connection(shared_master):
    """A connection that tests share, as leaving a store takes Mooncake a second or two."""
    first = MooncakeStorage(
        fingerprint=Fingerprint("org/model", "shared"), master=shared_master.address, segment_bytes=32 << 20
    )
    assert first.wait_ready(10)
    close, first._client.close = first._client.close, lambda: None
    yield first._client
    close()


@pytest.fixture
def shared(monkeypatch, connection, shared_master):
    """Makes Mooncake storages on the shared connection."""
    monkeypatch.setattr(mooncake, "MooncakeClient", lambda *_, **__: connection)
    return lambda fingerprint: MooncakeStorage(fingerprint=fingerprint, master=shared_master.address)


@pytest.fixture
def new_keys():
    def make(count):
        return [os.urandom(16) for _ in range(count)]

    return make


@pytest.fixture
def chain():
    """The parents of keys that follow each other from a sequence's start."""

    def parents(keys):
        return [None, *keys[:-1]]

    return parents
