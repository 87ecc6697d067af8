"""Host buffers on a GPU machine: really pinned, really undone, never freed under a copy."""

import contextlib
import gc
import itertools
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hicache_kernels import jit_kernel, pointer_table
from hicache_kernels.host_ranges import kernel_address
from hicache_kernels.probe import load_module
from hicache_kernels.spec import module_device_type
from hicache_pools import HostMemoryOptions, MHATokenToKVPool, MHATokenToKVPoolHost
from hicache_pools.gpu_runtime import GpuRuntime
from hicache_pools.host_memory import allocate_host_buffer
from hicache_pools.registration import HostRegistrationError

pytestmark = pytest.mark.gpu

MIB = 1 << 20


class RefusingRuntime(GpuRuntime):
    """The real runtime, made to fail at chunk ``refuse`` by pinning that chunk twice."""

    def __init__(self, refuse: int) -> None:
        super().__init__()
        self.refuse = refuse
        self.addresses: list[int] = []

    def register(self, address: int, nbytes: int) -> int:
        if len(self.addresses) == self.refuse:
            assert super().register(address, nbytes) == 0
            code = super().register(address, nbytes)
            # Only the pinning the caller knows of is its to undo; the pending error stays for it to clear.
            assert super().unregister(address) == 0
            return code
        self.addresses.append(address)
        return super().register(address, nbytes)

    def pending_error(self) -> int:
        return int(self._last_error())


@pytest.mark.parametrize("allocator_type", ["default", "shared"])
@pytest.mark.parametrize("huge_pages", ["off", "transparent"])
def test_pinned_memory_copies_both_ways_bit_for_bit(gpu: torch.device, allocator_type: str, huge_pages: str) -> None:
    with allocate_host_buffer(
        48 * MIB,
        page_bytes=3 * MIB,
        chunk_bytes=16 * MIB,
        device=gpu,
        allocator_type=allocator_type,
        huge_pages=huge_pages,
    ) as buffer:
        assert buffer.pinned
        assert buffer.boundaries == (15 * MIB, 30 * MIB, 45 * MIB)
        ends = (0, *buffer.boundaries, buffer.nbytes)
        data = torch.randint(0, 256, (buffer.nbytes,), dtype=torch.uint8, device=gpu)
        back = torch.empty_like(data)
        for start, end in itertools.pairwise(ends):
            chunk = buffer.tensor[start:end]
            assert chunk.is_pinned()
            chunk.copy_(data[start:end], non_blocking=True)
            back[start:end].copy_(chunk, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffer.tensor, data.cpu())
        assert torch.equal(back, data)


@pytest.mark.parametrize("refuse", [0, 1, 3])
def test_a_refused_chunk_leaves_nothing_pinned_and_no_pending_error(gpu: torch.device, refuse: int) -> None:
    torch.zeros(1, device=gpu)
    runtime = RefusingRuntime(refuse)
    with pytest.raises(HostRegistrationError, match=f"chunk {refuse + 1} of 4") as caught:
        allocate_host_buffer(4 * MIB, page_bytes=4096, chunk_bytes=MIB, device=gpu, runtime=runtime)
    assert caught.value.code != 0
    assert runtime.pending_error() == 0
    assert len(runtime.addresses) == refuse
    for address in runtime.addresses:
        assert runtime.unregister(address) != 0, "it was still pinned"
        runtime.clear_error()
    assert torch.ones(4, device=gpu).sum().item() == 4
    with allocate_host_buffer(4 * MIB, page_bytes=4096, chunk_bytes=MIB, device=gpu) as buffer:
        assert buffer.tensor.is_pinned()


def test_closing_unpins(gpu: torch.device) -> None:
    buffer = allocate_host_buffer(MIB, page_bytes=4096, device=gpu)
    view = buffer.tensor[:4096]
    assert view.is_pinned()
    buffer.close()
    assert not view.is_pinned()


@pytest.mark.parametrize("way", ["close", "forget"])
def test_memory_is_not_given_back_under_a_copy(gpu: torch.device, way: str) -> None:
    data = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8, device=gpu)
    buffer = allocate_host_buffer(64 * MIB, page_bytes=4096, device=gpu)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        buffer.tensor.copy_(data, non_blocking=True)
        done.record(stream)
    assert not done.query()
    if way == "close":
        buffer.close()
    else:
        del buffer
        gc.collect()
    assert done.query()
    torch.cuda.synchronize()


def test_the_node_is_the_one_sysfs_tells_for_the_gpu(gpu: torch.device) -> None:
    address = GpuRuntime().pci_address(torch.cuda.current_device())
    file = Path("/sys/bus/pci/devices") / address / "numa_node"
    found = int(file.read_text()) if file.exists() else -1
    with allocate_host_buffer(MIB, page_bytes=4096, device=gpu) as buffer:
        assert buffer.numa_node in ({None} if found < 0 else {found, None})


def test_an_address_of_no_device_is_an_error_and_leaves_none_pending(gpu: torch.device) -> None:
    torch.zeros(1, device=gpu)
    runtime = RefusingRuntime(0)
    with pytest.raises(RuntimeError, match="device 1000"):
        runtime.pci_address(1000)
    assert runtime.pending_error() == 0


def test_another_process_pins_shared_memory_and_copies_into_it(gpu: torch.device) -> None:
    value = random.randrange(1, 256)
    program = """
        import sys
        import torch
        torch.cuda.init()  # torch tells nothing about memory before
        from hicache_pools.host_memory import attach_host_buffer

        with attach_host_buffer(sys.argv[1], page_bytes=4096, chunk_bytes=1 << 20) as buffer:
            assert buffer.pinned and buffer.tensor.is_pinned(), buffer.reason
            for start in range(0, buffer.nbytes, 1 << 20):
                source = torch.full((1 << 20,), int(sys.argv[2]), dtype=torch.uint8, device="cuda")
                buffer.tensor[start : start + (1 << 20)].copy_(source, non_blocking=True)
    """
    with allocate_host_buffer(4 * MIB, page_bytes=4096, device=gpu, allocator_type="shared") as buffer:
        command = [sys.executable, "-c", textwrap.dedent(program), str(buffer.shared_name), str(value)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert bool((buffer.tensor == value).all())


def test_a_process_that_ends_with_pinned_memory_and_a_copy_in_flight_ends_well(gpu: torch.device) -> None:
    program = """
        import torch
        from hicache_pools.host_memory import allocate_host_buffer

        buffer = allocate_host_buffer(64 << 20, page_bytes=4096)
        source = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(100_000_000)
        buffer.tensor.copy_(source, non_blocking=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


class OwnAddresses(GpuRuntime):
    """The real runtime; writes down the device address it gave for each registered address."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, int] = {}

    def device_address(self, address: int) -> tuple[int, int]:
        code, found = super().device_address(address)
        self.given[address] = found
        return code, found


@pytest.mark.parametrize("policy", ["direct", "staged"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_registered_memory_moves_by_the_device_address_of_each_chunk(
    gpu: torch.device, layout: str, policy: str
) -> None:
    device_pool = MHATokenToKVPool(4096, 16, torch.bfloat16, 4, 64, 2, gpu)
    for tensor in (*device_pool.k_buffer, *device_pool.v_buffer):
        tensor.copy_(torch.randn(tensor.shape, device=gpu))
    before = [tensor.clone() for tensor in (*device_pool.k_buffer, *device_pool.v_buffer)]
    runtime = OwnAddresses()
    options = HostMemoryOptions(runtime=runtime, chunk_bytes=MIB)
    host = MHATokenToKVPoolHost(device_pool, 1.0, 0, layout=layout, transfer_policy=policy, memory_options=options)
    try:
        ranges = host.host_buffer.ranges
        assert len(ranges) > 1
        assert runtime.given == {each.address: each.device_address for each in ranges}
        slots = (torch.randperm(256)[:, None] * 16 + torch.arange(16)).flatten()
        assert host.backup_from_device_all_layer(device_pool, slots, slots).path == policy
        torch.cuda.synchronize()
        pages = host.page_num
        kept = torch.stack([host.read_page(page) for page in range(pages)])
        for tensor in (*device_pool.k_buffer, *device_pool.v_buffer):
            tensor.zero_()
        assert host.load_to_device_all_layer(device_pool, slots, slots).path == policy
        torch.cuda.synchronize()
        for tensor, old in zip((*device_pool.k_buffer, *device_pool.v_buffer), before, strict=True):
            assert torch.equal(tensor, old)
        assert torch.equal(torch.stack([host.read_page(page) for page in range(pages)]), kept)
    finally:
        host.destroy()


@pytest.mark.parametrize("pinned_by", ["torch", "pools"])
def test_the_runtime_finds_bytes_inside_pinned_memory_too(gpu: torch.device, pinned_by: str) -> None:
    module = load_module("main", module_device_type(gpu))
    assert module is not None
    with contextlib.ExitStack() as stack:
        if pinned_by == "torch":
            whole = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
        else:
            whole = stack.enter_context(allocate_host_buffer(MIB, page_bytes=4096, device=gpu)).tensor
        start = module["device_address"](whole.data_ptr())
        for offset in (1, 4096, 12345, MIB - 1):
            assert module["device_address"](whole.data_ptr() + offset) == start + offset
            assert kernel_address("whole", whole[offset - offset % 16 :], 16) == start + offset - offset % 16


def test_rows_of_pinned_memory_move_through_caches_and_tables(gpu: torch.device) -> None:
    rows = torch.randint(0, 256, (2, 256, 64), dtype=torch.uint8, device=gpu)
    host = torch.zeros((2, 256, 64), dtype=torch.uint8, pin_memory=True)
    order = torch.randperm(256)
    for layer in range(2):
        jit_kernel.transfer_hicache_one_layer_mla(host[layer], order, rows[layer], order)
    torch.cuda.synchronize()
    assert torch.equal(host, rows.cpu())
    back = torch.zeros_like(rows)
    tables = [pointer_table(list(each), device=gpu) for each in (back, host)]
    jit_kernel.transfer_hicache_all_layer_mla(
        tables[0], order, tables[1], order, cache_src_stride_bytes=64, cache_dst_stride_bytes=64
    )
    torch.cuda.synchronize()
    assert torch.equal(back, rows)
