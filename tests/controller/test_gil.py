"""While bytes move, other Python threads run: copies and file I/O give the GIL up."""

import os
import threading

import pytest
import torch
from tests.conftest import needs
from tests.gil import Counting

from hicache_controller.storage import FileStorage, Fingerprint, page_reader
from hicache_kernels.probe import load_outcome
from hicache_pools.device_pools import MHATokenToKVPool
from hicache_pools.host_pools import MHATokenToKVPoolHost

PAGES, PAGE_SIZE = 64, 16


@pytest.fixture
def pool():
    device_pool = MHATokenToKVPool(PAGES * PAGE_SIZE, PAGE_SIZE, torch.bfloat16, 8, 128, 16, "cpu")
    host_pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, PAGE_SIZE, pin_memory=False)
    yield host_pool
    host_pool.destroy()


def test_counting_sees_who_keeps_the_gil():
    """The measure itself: a sort keeps the GIL, a wait does not."""
    numbers = list(range(200_000))
    with Counting() as others:
        assert others.most_in_one_call(lambda: sorted(numbers), attempts=20) <= 1
        assert others.most_in_one_call(lambda: threading.Event().wait(0.01)) > 100


def test_compiled_copies_run_without_the_gil(pool):
    needs(pool.capabilities().direct, "no compiled copies here: " + pool.capabilities().reason)
    slots = torch.arange(PAGES * PAGE_SIZE)
    with Counting() as others:
        assert others.most_in_one_call(lambda: pool.backup_from_device_all_layer(None, slots, slots)) > 100
        assert others.most_in_one_call(lambda: pool.load_to_device_all_layer(None, slots, slots)) > 100


@pytest.mark.parametrize("compiled", [False, True])
def test_file_storage_reads_and_writes_without_the_gil(pool, tmp_path, monkeypatch, compiled):
    outcome = load_outcome("files", "cpu")
    if compiled:
        needs(outcome.module is not None, f"no compiled module: {outcome.reason}")
    else:
        monkeypatch.setattr(page_reader, "load_outcome_so_far", lambda name, device_type: None)
    storage = FileStorage(tmp_path, fingerprint=Fingerprint("model", "1"), threads=1)
    storage.register_mem_pool_host(pool)
    slots = torch.arange(PAGES * PAGE_SIZE)[: 16 * PAGE_SIZE]
    stored = []

    def store():
        stored[:] = [os.urandom(16) for _ in range(16)]
        assert all(storage.batch_set(stored, slots))

    # A page takes about ten short system calls apart from those that move bytes.
    enough = 16 * 25
    with Counting() as others:
        assert others.most_in_one_call(store, enough) > enough
        assert others.most_in_one_call(lambda: storage.batch_get(stored, slots), enough) > enough
    storage.close()
