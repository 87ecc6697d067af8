"""One rank of the agreement test; started by test_controller_ranks.py in a process of its own."""

from __future__ import annotations

import datetime
import hashlib
import json
import random
import sys

import torch
import torch.distributed

from hicache_controller.controller import HiCacheController
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_settings import StorageSettings
from hicache_pools.extents import ExtentAllocator
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import NullPoolHost

PAGES = 24


def key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def main(rank: int, port: int, rounds: int, mode: str) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=600),
    )
    allocator = ExtentAllocator(PAGES)
    pool = NullPoolHost(PAGES, 1)
    entry = PoolEntry(
        "kv", pool, None, lambda layer: layer, device_alloc_fn=allocator.alloc, device_free_fn=allocator.free
    )
    storage = MemoryStorage()
    controller = HiCacheController(
        HostPoolGroup([entry]),
        storage=StorageSettings(prefetch_policy="wait_complete", retry_seconds=0, batch_pages=2, max_wait_seconds=30),
        distributed_group=torch.distributed.group.WORLD,
        distributed_timeout=5 if mode == "dies" else 600,
    )
    controller.attach_storage_backend(storage)
    shared, own = random.Random(f"shared {port}"), random.Random(f"{port} {rank}")
    report = []
    for number in range(rounds):
        keys = [key(f"{number} {page}") for page in range(shared.randint(1, 8))]
        # Each rank has another part of the pages, with holes.
        scratch = controller.host_group.alloc(len(keys))
        present = [each for each in keys if own.random() < 0.8]
        if present:
            storage.batch_set(present, scratch[: len(present)])
        controller.evict_host(scratch)
        if mode == "dies" and rank == 1 and number == 3:
            return
        found = controller.storage_exists(keys)
        assert controller.storage_restorable_lengths(keys) == list(range(1, found + 1))
        host = controller.host_group.alloc(found) if found else None
        if host is not None and own.random() < 0.2:
            # This rank's allocation fails, the other's does not.
            controller.evict_host(host)
            host = None
        pages = 0
        if found:
            operation = controller.prefetch(host, keys[:found], request_id=str(number))
            while not controller.prefetch_ready(operation):
                pass
            pages = controller.finish_prefetch(operation)
            if host is not None:
                controller.evict_host(host[pages:]) if pages < found else None
        acks: list[list[int]] = []
        if pages and host is not None:
            controller.load(host[:pages], node_id=number)
            controller.start_loading()
            device = allocator.alloc(1)
            controller.write(device, node_id=number)
            controller.start_writing()
            controller.backup(host[:pages], keys[:pages], node_id=number)
            while len(acks) < 3:
                acks += [list(ack.node_ids) for ack in controller.poll_loads() if ack.error is None]
                acks += [list(ack.node_ids) for ack in controller.poll_writes() if ack.error is None]
                acks += [[ack.node_id, ack.stored_pages] for ack in controller.poll_backups()]
            controller.reset()
            allocator.clear()
        report.append([found, pages, acks, pool.available_size()])
    sys.stdout.write("\n" + json.dumps({"rounds": report, "broken": controller.agreement.broken}))
    controller.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
