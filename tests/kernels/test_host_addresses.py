"""Host memory whose device address is another one: kernels go by that, copies and the CPU by the host's, on every path.

Here the device address shows memory of its own, as no machine does: so what went by the wrong one is seen in the bytes.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from hicache_kernels import HostLayout, PlaneTransfer, jit_kernel, jit_kernel_reference, pointer_table, reference
from hicache_kernels.host_ranges import HostRange, add_host_ranges, kernel_address, remove_host_ranges


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


class TwoSided:
    """Memory of the device side of a host buffer, where ``cuts`` (with 0) begin registrations of their own."""

    def __init__(self, host: torch.Tensor, cuts: Sequence[int] = (0,), gaps: Sequence[int] = (0,)) -> None:
        whole = random_bytes(host.nbytes + sum(gaps) + 16)
        start = -whole.data_ptr() % 16 + host.data_ptr() % 16
        self.memory = whole[start:]
        self.host = host.view(-1).view(torch.uint8)
        self.ranges: list[HostRange] = []
        self.places: list[tuple[int, int, int]] = []
        place = 0
        for begin, end, gap in zip(cuts, (*cuts[1:], host.nbytes), gaps, strict=True):
            place += gap
            self.ranges.append(HostRange(host.data_ptr() + begin, end - begin, self.memory.data_ptr() + place))
            self.places.append((begin, end, place))
            place += end - begin

    def device(self) -> torch.Tensor:
        """What kernels see in place of the host buffer, copied."""
        return torch.cat([self.memory[place : place + end - begin] for begin, end, place in self.places])

    def set_device(self, data: torch.Tensor) -> None:
        for begin, end, place in self.places:
            self.memory[place : place + end - begin] = data.view(-1).view(torch.uint8)[begin:end]


@contextlib.contextmanager
def registered(*sides: TwoSided) -> Iterator[None]:
    ranges = [each for side in sides for each in side.ranges]
    add_host_ranges(ranges)
    try:
        yield
    finally:
        remove_host_ranges(ranges)


@pytest.fixture
def pool_of(pools, compiled):
    def make(layout, **options):
        pool = pools.random_pool(layout, (64, 48), layers=3, page_size=4, pages=8, **options)
        for buffer in pool.host:
            buffer.random_(0, 256)
        return pool

    return make


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("policy", ["direct", "staged", "reference"])
def test_a_write_back_goes_to_the_device_address_by_kernels_and_to_the_hosts_by_copies(
    pool_of, layout, separate, policy
):
    pool = pool_of(layout, separate=separate)
    sides = [TwoSided(buffer) for buffer in pool.host]
    hosts, devices = [b.clone() for b in pool.host], [side.device() for side in sides]
    host, device = pool.slots(torch.randperm(8)[:5]), pool.slots(torch.randperm(9)[:5])
    with registered(*sides):
        assert PlaneTransfer(pool.planes).write_back(host, device, policy=policy).path == policy
    after = [side.device() for side in sides]
    if policy != "direct":
        assert all(torch.equal(a, b) for a, b in zip(after, devices, strict=True))
        after = [b.clone() for b in pool.host]
        for buffer, old in zip(pool.host, hosts, strict=True):
            buffer.copy_(old)
    else:
        assert all(torch.equal(a, b) for a, b in zip(pool.host, hosts, strict=True))
        for buffer, old in zip(pool.host, devices, strict=True):
            buffer.copy_(old)
    reference.write_back(pool.planes, host, device)
    assert all(torch.equal(a, b) for a, b in zip(pool.host, after, strict=True))


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("policy", ["direct", "staged", "reference"])
def test_a_load_comes_from_the_device_address_by_kernels_and_from_the_hosts_by_copies(
    pool_of, layout, separate, layer, policy
):
    pool = pool_of(layout, separate=separate)
    sides = [TwoSided(buffer) for buffer in pool.host]
    host, device = pool.slots(torch.randperm(8)[:5]), pool.slots(torch.randperm(9)[:5])
    before = [t.clone() for t in pool.rows]
    with registered(*sides):
        assert PlaneTransfer(pool.planes).load(host, device, layer=layer, policy=policy).path == policy
    found = [t.clone() for t in pool.rows]
    for tensor, old in zip(pool.rows, before, strict=True):
        tensor.copy_(old)
    if policy == "direct":
        for buffer, side in zip(pool.host, sides, strict=True):
            buffer.copy_(side.device())
    reference.load(pool.planes, host, device, layer)
    assert all(torch.equal(a, b) for a, b in zip(pool.rows, found, strict=True))


@pytest.mark.parametrize("runs", [True, False])
def test_copies_between_runs_go_by_the_hosts_address(pools, compiled, runs):
    pool = pools.random_pool("page_first_direct", (64 << 10,), layers=2, page_size=16, pages=4)
    side = TwoSided(pool.host[0])
    unseen = side.device()
    order = torch.arange(4) if runs else torch.randperm(4)
    with registered(side):
        transfer = PlaneTransfer(pool.planes)
        pool.check_write_back(pool.slots(order), pool.slots(order), transfer.write_back, int, policy="staged")
        pool.check_load(pool.slots(order), pool.slots(order), transfer.load, int, policy="staged")
    assert torch.equal(side.device(), unseen)


def test_registrations_at_unequal_distances_leave_the_staged_path_and_say_why_there_is_no_direct_one(pool_of):
    pool = pool_of("page_first")
    (buffer,) = pool.host
    half = pool.planes[0].host.strides.page * 4
    host, device = pool.slots([1, 6]), pool.slots([0, 3])
    with registered(TwoSided(buffer, (0, half), (0, 48))):
        transfer = PlaneTransfer(pool.planes, boundaries=(half,))
        capabilities = transfer.capabilities()
        assert (capabilities.direct, capabilities.staged) == (False, True)
        assert "the host buffer of plane component0" in capabilities.reason
        assert "2 distances" in capabilities.reason
        assert "chunk_bytes" in capabilities.reason
        pool.check_write_back(host, device, transfer.write_back, int)
        pool.check_load(host, device, transfer.load, int)
    with registered(side := TwoSided(buffer, (0, half), (0, 0))):
        transfer = PlaneTransfer(pool.planes, boundaries=(half,))
        assert transfer.capabilities().direct
        buffer.copy_(side.device())
        transfer.write_back(host, device, policy="direct")
        reference.write_back(pool.planes, host, device)
        assert torch.equal(buffer, side.device())


def test_planes_that_each_lie_in_one_registration_may_have_distances_of_their_own(pool_of):
    pool = pool_of("layer_first")
    (buffer,) = pool.host
    cut = pool.planes[1].host.strides.offset
    side = TwoSided(buffer, (0, cut), (0, 32))
    buffer.copy_(side.device())
    host, device = pool.slots([5, 2]), pool.slots([7, 8])
    with registered(side):
        PlaneTransfer(pool.planes, boundaries=(cut,)).write_back(host, device, policy="direct")
    reference.write_back(pool.planes, host, device)
    assert torch.equal(buffer, side.device())


def test_memory_that_is_registered_in_part_is_refused(pool_of):
    pool = pool_of("page_first")
    (buffer,) = pool.host
    side = TwoSided(buffer, (0, buffer.numel() // 2), (0, 0))
    add_host_ranges(side.ranges[:1])
    try:
        assert "are registered" in PlaneTransfer(pool.planes).capabilities().reason
    finally:
        remove_host_ranges(side.ranges)


@pytest.mark.parametrize("way", ["caches", "tables"])
@pytest.mark.parametrize("to_host", [True, False])
def test_calls_of_the_existing_surface_go_by_the_device_address(compiled, way, to_host):
    layers = [random_bytes(12, 32) for _ in range(2)]
    cache = [random_bytes(12, 32) for _ in range(2)]
    sides = [TwoSided(tensor) for tensor in cache]
    hosts, devices = [t.clone() for t in cache], [side.device().view(12, 32) for side in sides]
    here, there = torch.randperm(12)[:7], torch.randperm(12)[:7]
    with registered(*sides):
        pair = (cache, here, layers, there) if to_host else (layers, there, cache, here)
        to, to_indices, of, of_indices = pair
        if way == "caches":
            for a, b in zip(to, of, strict=True):
                jit_kernel.transfer_hicache_one_layer_mla(a, to_indices, b, of_indices)
        else:
            tables = [pointer_table(each) for each in (to, of)]
            jit_kernel.transfer_hicache_all_layer_mla(
                tables[0], to_indices, tables[1], of_indices, cache_src_stride_bytes=32, cache_dst_stride_bytes=32
            )
    assert all(torch.equal(a, b) for a, b in zip(cache, hosts, strict=True))
    for layer, side, device in zip(layers, sides, devices, strict=True):
        if to_host:
            device[here] = layer[there]
            assert torch.equal(side.device().view(12, 32), device)
        else:
            assert torch.equal(layer[there], device[here])


@pytest.mark.parametrize("calls", [jit_kernel, jit_kernel_reference], ids=["compiled", "torch"])
def test_staged_calls_copy_to_the_hosts_address(compiled, calls):
    layers, staging, dst = [random_bytes(16, 32) for _ in range(3)], random_bytes(8, 3, 32), random_bytes(16, 3, 32)
    side = TwoSided(dst, (0, 96 * 5), (0, 16))  # copies do not mind several registrations
    unseen = side.device()
    pages = torch.randperm(4)
    slots = (pages[:, None] * 4 + torch.arange(4)).flatten()
    with registered(side):
        calls.transfer_hicache_all_layer_mla_staged_lf_pf(
            pointer_table(layers), torch.arange(16), slots, staging, dst, page_size=4
        )
    assert torch.equal(side.device(), unseen)
    assert torch.equal(dst[slots], torch.stack(layers, 1))


def test_plain_torch_goes_by_the_hosts_address() -> None:
    cache, layer = random_bytes(8, 16), random_bytes(8, 16)
    side = TwoSided(cache)
    unseen = side.device()
    with registered(side):
        tables = [pointer_table([each]) for each in (cache, layer)]
        jit_kernel_reference.transfer_hicache_all_layer_mla(
            tables[0], torch.arange(8), tables[1], torch.arange(8), cache_src_stride_bytes=16, cache_dst_stride_bytes=16
        )
    assert torch.equal(cache, layer)
    assert torch.equal(side.device(), unseen)


def test_a_table_made_before_its_memory_was_registered_is_refused(compiled) -> None:
    cache, layer = random_bytes(8, 16), random_bytes(8, 16)
    table, other = pointer_table([cache]), pointer_table([layer])
    with registered(TwoSided(cache)), pytest.raises(ValueError, match="ptr_src was made before"):
        jit_kernel.transfer_hicache_all_layer_mla(
            other, torch.arange(8), table, torch.arange(8), cache_src_stride_bytes=16, cache_dst_stride_bytes=16
        )


def test_addresses_inside_a_range_are_found_and_those_next_to_it_are_the_tensors_own() -> None:
    whole = random_bytes(64 * 16)
    inner = whole[16 * 16 : 48 * 16]
    side = TwoSided(inner)
    with registered(side):
        start = random.randrange(0, 31) * 16
        distance = side.ranges[0].device_address - inner.data_ptr()
        assert kernel_address("x", inner[start:], 16) == inner[start:].data_ptr() + distance
        assert kernel_address("x", whole, 16 * 16) == whole.data_ptr()
        assert kernel_address("x", whole[48 * 16 :], 16) == whole[48 * 16 :].data_ptr()
        for start, size in ((15, 2), (47, 2), (0, 64)):
            with pytest.raises(ValueError, match=f"x: .* of its {size * 16} bytes are registered"):
                kernel_address("x", whole[start * 16 :], size * 16)
    assert kernel_address("x", inner, 16) == inner.data_ptr()


def test_a_range_whose_addresses_do_not_lie_alike_is_refused_and_nothing_is_remembered() -> None:
    whole = random_bytes(64)
    right = HostRange(whole.data_ptr(), 64, whole.data_ptr() + 32)
    with pytest.raises(ValueError, match="multiple of 16"):
        add_host_ranges([right, HostRange(right.address + 64, 64, right.address + 4)])
    assert kernel_address("x", whole, 64) == whole.data_ptr()


def test_memory_that_is_registered_again_has_its_new_device_address() -> None:
    whole = random_bytes(96)
    old = HostRange(whole.data_ptr() + 32, 64, whole.data_ptr() - 128)
    new = HostRange(whole.data_ptr(), 64, whole.data_ptr() + 160)
    add_host_ranges([old])
    add_host_ranges([new])
    try:
        assert kernel_address("x", whole, 64) == new.device_address
        assert kernel_address("x", whole[64:], 32) == whole[64:].data_ptr()
    finally:
        remove_host_ranges([new, old])
