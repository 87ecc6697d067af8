"""A stack of several pools: an attention anchor with a packed draft, recurrent states, and a sidecar."""

import torch

from hicache_controller.hybrid import HybridCacheController, SidecarPoolSpec
from hicache_controller.storage_settings import StorageSettings
from hicache_pools.device_pools import MambaPool, MHATokenToKVPool
from hicache_pools.extents import ExtentAllocator
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import MambaPoolHost, MHATokenToKVPoolHost
from hicache_pools.pool_transfer import PoolTransfer

PAGE = 4
PAGES = 16
STATES = 6
ATTENTION, RECURRENT = {0: 0, 2: 1}, {1: 0, 3: 1}
"""Model layers of the two kinds, and the layers of their pools."""


class Failing:
    """Makes the next calls of a method fail."""

    def __init__(self, monkeypatch, pool, name):
        self.left = 0
        self.inner = getattr(pool, name)
        monkeypatch.setattr(pool, name, self)

    def __call__(self, *args, **kwargs):
        if self.left:
            self.left -= 1
            raise RuntimeError("injected")
        return self.inner(*args, **kwargs)


def random_layers(slots, heads, dim, layers=2):
    return [torch.randint(0, 256, (slots, heads, dim), dtype=torch.uint8) for _ in range(layers)]


class HybridStack:
    def __init__(self, *, states=STATES, host_states=STATES, **options):
        slots = PAGES * PAGE
        self.attention = MHATokenToKVPool.from_buffers(
            k=random_layers(slots, 2, 8), v=random_layers(slots, 2, 4), page_size=PAGE
        )
        self.draft = MHATokenToKVPool.from_buffers(
            k=random_layers(slots, 2, 8, 1), v=random_layers(slots, 2, 4, 1), page_size=PAGE
        )
        self.side = MHATokenToKVPool.from_buffers(
            k=random_layers(slots, 1, 8), v=random_layers(slots, 1, 8), page_size=PAGE
        )
        self.mamba = MambaPool.from_buffers(
            conv=[[torch.randint(0, 256, (states, 6), dtype=torch.uint8) for _ in range(2)]],
            temporal=[torch.randn(states, 4, 4) for _ in range(2)],
        )
        self.allocators = {"kv": ExtentAllocator(PAGES, PAGE), "mamba": ExtentAllocator(states)}
        self.hosts = {
            "kv": MHATokenToKVPoolHost(
                self.attention, 1, 0, PAGE, pin_memory=False, packed_draft_device_pools=(self.draft,)
            ),
            "mamba": MambaPoolHost(self.mamba, 1, 0, 1, pin_memory=False, pages=host_states),
            "side": MHATokenToKVPoolHost(self.side, 1, 0, PAGE, pin_memory=False, layout="page_first_direct"),
        }
        mappers = {"kv": ATTENTION.get, "side": ATTENTION.get, "mamba": RECURRENT.get}
        pools = {"kv": self.attention, "mamba": self.mamba, "side": self.side}
        self.group = HostPoolGroup(
            PoolEntry(
                name,
                self.hosts[name],
                pools[name],
                mappers[name],
                device_alloc_fn=self.allocators[name].alloc if name in self.allocators else None,
                device_free_fn=self.allocators[name].free if name in self.allocators else None,
                packed_draft_device_pools=(self.draft,) if name == "kv" else (),
            )
            for name in pools
        )
        options.setdefault("sidecars", [SidecarPoolSpec("side", "kv")])
        self.controller = HybridCacheController(
            self.group, storage=StorageSettings(retry_seconds=0, batch_pages=2, max_wait_seconds=30), **options
        )

    def tensors(self):
        anchor = [t for pool in (self.attention, self.draft, self.side) for c in pool.components for t in c.tensors]
        return anchor, [t for c in self.mamba.components for t in c.tensors]

    def compute(self, slots, states):
        anchor, recurrent = self.tensors()
        for tensors, rows in ((anchor, slots), (recurrent, states)):
            for tensor in tensors:
                fresh = torch.randint(0, 256, tensor[rows].shape)
                tensor[rows] = fresh.to(tensor.dtype)
        return self.rows(slots, states)

    def rows(self, slots, states):
        anchor, recurrent = self.tensors()
        return [t[slots].clone() for t in anchor], [t[states].clone() for t in recurrent]

    def written(self, pages=3, states=2, node_id=1):
        """Host slots and state slots of something written that left the device, and its rows."""
        slots = self.allocators["kv"].alloc(pages * PAGE)
        state_slots = self.allocators["mamba"].alloc(states)
        rows = self.compute(slots, state_slots)
        transfer = PoolTransfer("mamba", device_indices=state_slots)
        host = self.controller.write(slots, node_id=node_id, pool_transfers=[transfer])
        self.controller.start_writing()
        (ack,) = self.controller.poll_writes(wait=True)
        assert ack.error is None
        self.controller.evict_device(slots)
        self.controller.evict_device(state_slots, pool="mamba")
        self.compute(torch.arange(PAGES * PAGE), torch.arange(len(self.tensors()[1][0])))
        return host, transfer.host_indices, rows

    def loaded(self, host, states, node_id=1):
        transfer = PoolTransfer("mamba", host_indices=states)
        slots = self.controller.load(host, node_id=node_id, pool_transfers=[transfer])
        consumer = self.controller.start_loading()
        self.controller.layer_done_counter.set_consumer(consumer)
        self.controller.layer_done_counter.wait_until(self.controller.layer_num - 1)
        (ack,) = self.controller.poll_loads(wait=True)
        assert ack.error is None
        rows = self.rows(slots, transfer.device_indices)
        self.controller.evict_device(slots)
        self.controller.evict_device(transfer.device_indices, pool="mamba")
        return rows

    def used(self):
        return {
            "kv": PAGES - self.allocators["kv"].available_pages,
            "mamba": self.allocators["mamba"].page_num - self.allocators["mamba"].available_pages,
            **{
                f"host {name}": (pool.size - pool.available_size()) // pool.page_size
                for name, pool in self.hosts.items()
            },
        }


def used(kv=0, mamba=0, host_kv=0, host_mamba=0):
    return {"kv": kv, "mamba": mamba, "host kv": host_kv, "host mamba": host_mamba, "host side": 0}


def same(left, right):
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))
