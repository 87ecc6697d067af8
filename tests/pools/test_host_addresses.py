"""Pinned memory of a pool with another device address: kernels go by that, everything else by the host's."""

import ctypes
import os

import pytest
import torch

from hicache_kernels.host_ranges import kernel_address
from hicache_pools import HostMemoryOptions, MHATokenToKVPool, MHATokenToKVPoolHost, allocate_host_buffer
from hicache_pools.registration import HostRegistrationError

CHUNK = 1 << 16


class OtherAddresses:
    """Pins nothing; kernels find a chunk in memory of its own, its bytes ``gap`` after the chunk before."""

    def __init__(self, gap: int = 0, refuse: int | None = None) -> None:
        self.gap = gap
        self.refuse = refuse
        self.memory = torch.randint(0, 256, (1 << 22,), dtype=torch.uint8)
        self.pinned: dict[int, int] = {}
        self.used = -self.memory.data_ptr() % 4096
        self.pending = 0

    def register(self, address: int, nbytes: int) -> int:
        self.pinned[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def device_address(self, address: int) -> tuple[int, int]:
        if len(self.pinned) - 1 == self.refuse:
            self.pending = 1
            return 1, 0
        place = self.used
        self.used += self.pinned[address] + self.gap
        return 0, self.memory.data_ptr() + place

    def clear_error(self) -> None:
        self.pending = 0

    def describe(self, code: int) -> str:
        return f"no device address ({code})"


def make(layout: str, runtime: OtherAddresses, policy: str) -> tuple[MHATokenToKVPool, MHATokenToKVPoolHost]:
    device_pool = MHATokenToKVPool(512, 16, torch.uint8, 4, 32, 2)
    for tensor in (*device_pool.k_buffer, *device_pool.v_buffer):
        tensor.random_(0, 256)
    options = HostMemoryOptions(runtime=runtime, chunk_bytes=CHUNK)
    return device_pool, MHATokenToKVPoolHost(
        device_pool, 1.0, 0, 16, layout, transfer_policy=policy, memory_options=options
    )


def seen_by_kernels(pool: MHATokenToKVPoolHost, runtime: OtherAddresses) -> torch.Tensor:
    """Pool's memory at the device's addresses, copied."""
    start = runtime.memory.data_ptr()
    places = [(each.device_address - start, each.nbytes) for each in pool.host_buffer.ranges]
    return torch.cat([runtime.memory[place : place + nbytes] for place, nbytes in places])[: pool.buffer.numel()]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("policy", ["direct", "staged"])
def test_transfers_of_a_pool_mix_no_addresses(layout: str, policy: str) -> None:
    runtime = OtherAddresses()
    device_pool, pool = make(layout, runtime, policy)
    assert len(pool.host_buffer.ranges) > 1
    slots = (torch.randperm(32)[:9, None] * 16 + torch.arange(16)).flatten()
    hosts, kernels = pool.buffer.clone(), seen_by_kernels(pool, runtime)
    result = pool.backup_from_device_all_layer(device_pool, slots, slots)
    assert result.path == policy
    kept = [t.clone() for t in (*device_pool.k_buffer, *device_pool.v_buffer)]
    written, unseen = pool.buffer.clone(), seen_by_kernels(pool, runtime)
    if policy == "direct":
        written, unseen, hosts, kernels = unseen, written, kernels, hosts
    assert torch.equal(unseen, kernels)
    assert not torch.equal(written, hosts)
    pool.buffer.random_(0, 256) if policy == "direct" else runtime.memory.random_(0, 256)
    for tensor in (*device_pool.k_buffer, *device_pool.v_buffer):
        tensor[slots] = 0
    pool.load_to_device_all_layer(device_pool, slots, slots)
    for tensor, old in zip((*device_pool.k_buffer, *device_pool.v_buffer), kept, strict=True):
        assert torch.equal(tensor, old)
    pool.destroy()
    assert runtime.pinned == {}


def test_chunks_at_unequal_distances_leave_the_staged_path_and_the_reason() -> None:
    runtime = OtherAddresses(gap=4096)
    device_pool, pool = make("page_first", runtime, "auto")
    assert (pool.can_use_jit, pool.can_use_write_back_jit) == (False, True)
    assert "distances from the host addresses" in pool.capabilities().reason
    slots = torch.arange(512)
    unseen = seen_by_kernels(pool, runtime)
    assert pool.backup_from_device_all_layer(device_pool, slots, slots).path == "staged"
    assert torch.equal(seen_by_kernels(pool, runtime), unseen)
    assert torch.equal(pool.k_buffer[:, 1], device_pool.k_buffer[1])


def test_a_buffer_shows_both_addresses_of_each_registration_until_it_is_closed() -> None:
    runtime = OtherAddresses(gap=64)
    with allocate_host_buffer(3 * CHUNK, page_bytes=4096, chunk_bytes=CHUNK, runtime=runtime) as buffer:
        tensor = buffer.tensor
        starts = [tensor.data_ptr() + cut for cut in (0, *buffer.boundaries)]
        assert [(each.address, each.nbytes) for each in buffer.ranges] == [(start, CHUNK) for start in starts]
        assert len({each.device_address - each.address for each in buffer.ranges}) == 3
        for number, each in enumerate(buffer.ranges):
            chunk = tensor[number * CHUNK :]
            assert kernel_address("chunk", chunk, CHUNK) == each.device_address
        with pytest.raises(ValueError, match=r"whole: .* at 3 distances"):
            kernel_address("whole", tensor, tensor.nbytes)
    assert buffer.ranges == ()
    assert kernel_address("whole", tensor, tensor.nbytes) == tensor.data_ptr()


def test_memory_without_a_device_address_is_not_pinned_at_all() -> None:
    for refuse in range(3):
        runtime = OtherAddresses(refuse=refuse)
        with pytest.raises(HostRegistrationError, match=rf"chunk {refuse + 1} of 3.*no device address"):
            allocate_host_buffer(3 * CHUNK, page_bytes=4096, chunk_bytes=CHUNK, runtime=runtime)
        assert (runtime.pinned, runtime.pending) == ({}, 0)


@pytest.mark.parametrize("way", ["close", "forget"])
def test_a_forked_child_forgets_the_device_addresses_of_what_it_drops(way: str) -> None:
    buffer = allocate_host_buffer(CHUNK, page_bytes=4096, runtime=OtherAddresses())
    tensor = buffer.tensor
    child = os.fork()
    if not child:
        try:
            address = tensor.data_ptr()
            if way == "close":
                buffer.close()
            else:
                del tensor, buffer
            show = torch.frombuffer((ctypes.c_uint8 * 16).from_address(address), dtype=torch.uint8)
            os._exit(0 if kernel_address("x", show, 16) == address else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kernel_address("x", tensor, 16) != tensor.data_ptr()
    buffer.close()
