"""Fakes and helpers of the storage tests."""

import os
from dataclasses import dataclass

import pytest
import torch

from hicache_controller.storage import Fingerprint, mooncake, page_reader
from hicache_controller.storage.mooncake import MooncakeStorage
from hicache_kernels.probe import load_outcome


@dataclass(frozen=True)
class FakeGeometry:
    layout: str = "page_first"
    dtypes: tuple[str, ...] = ("uint8",)
    page_size: int = 4
    components: tuple[tuple[str, int], ...] = (("k", 64), ("v", 64))
    layers: int = 2


class FakePool:
    """A host pool of flat bytes; a page is cut into ``parts`` pieces that lie apart, as in layer_first."""

    def __init__(self, pages=64, page_size=4, page_bytes=1024, parts=1, **geometry):
        self.page_num = pages
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.geometry = FakeGeometry(page_size=page_size, **geometry)
        self.parts = parts
        self.buffer = torch.zeros(pages * page_bytes, dtype=torch.uint8)
        self._memory = memoryview(self.buffer.numpy())

    def page_memory(self, page):
        size = self.page_bytes // self.parts
        starts = ((part * self.page_num + page) * size for part in range(self.parts))
        return tuple(self._memory[start : start + size] for start in starts)

    def fill(self, pages):
        """Fresh random bytes in each page; returns them."""
        contents = []
        for page in pages:
            for view in self.page_memory(page):
                view[:] = os.urandom(len(view))
            contents.append(self.read(page))
        return contents

    def read(self, page):
        return b"".join(self.page_memory(page))

    def slots(self, pages):
        rows = torch.as_tensor(list(pages), dtype=torch.int64)[:, None] * self.page_size
        return (rows + torch.arange(self.page_size)).flatten()


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
    return FakePool


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
    monkeypatch.setattr(mooncake, "MooncakeClient", lambda settings, clock: connection)
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
