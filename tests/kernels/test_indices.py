"""Indices as engines hand them over: inference tensors, memory shared with NumPy, extreme values, several threads."""

import random
import threading
from types import SimpleNamespace

import pytest
import torch

from hicache_kernels import PlaneTransfer, checks
from hicache_kernels.indices import IndexReader
from hicache_kernels.staging import StagingRing
from hicache_kernels.uploads import UploadPool

PATHS = ("staged", "direct")
EXTREMES = (2**63 - 8, -(2**63), 2**62, 2**32, 2**31, -(2**31), -8)


def now() -> None:
    """The compiled CPU modules are done when they return."""


@pytest.mark.parametrize("policy", PATHS)
def test_transfers_work_in_inference_mode(pools, compiled, policy):
    pool = pools.random_pool("page_first_direct", (64, 32))
    with torch.inference_mode():
        transfer = PlaneTransfer(pool.planes)
        host, device = pool.slots([3, 1]), pool.slots([0, 2])
        pool.check_write_back(host, device, transfer.write_back, now, policy=policy)
        for layer in range(3):
            pool.check_load(host, device, transfer.load, now, layer=layer, policy=policy)


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("which", ["host", "device"])
def test_indices_written_to_through_numpy_are_read_anew(pools, compiled, policy, which):
    pool = pools.random_pool("page_first")
    transfer = PlaneTransfer(pool.planes, policy=policy)
    indices = {"host": pool.slots([1, 2]), "device": pool.slots([3, 4])}
    transfer.load(*indices.values(), layer=0)
    indices[which].numpy()[:] = pool.slots([6, 0]).numpy()
    pool.check_load(*indices.values(), transfer.load, now, layer=1)
    indices[which].numpy()[-1] += 10**6
    before = [tensor.clone() for tensor in pool.rows]
    with pytest.raises((IndexError, ValueError), match=f"{which}_indices"):
        transfer.load(*indices.values(), layer=2)
    assert all(torch.equal(a, b) for a, b in zip(pool.rows, before, strict=True))


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("first", EXTREMES)
def test_the_ends_of_the_integers_are_out_of_range(pools, compiled, policy, page_size, first):
    pool = pools.random_pool("page_first", layers=1, page_size=page_size)
    good, bad = pool.slots([2]), torch.arange(page_size) + first + (7 if page_size == 1 and first > 0 else 0)
    transfer = PlaneTransfer(pool.planes, policy=policy)
    before = [tensor.clone() for tensor in (*pool.rows, *pool.host)]
    for call in (transfer.write_back, transfer.load):
        with pytest.raises(IndexError, match=r"host_indices contains slot .* slots go from 0 to"):
            call(bad, good)
        with pytest.raises(IndexError, match=r"device_indices contains slot .* slots go from 0 to"):
            call(good, bad)
    assert all(torch.equal(a, b) for a, b in zip((*pool.rows, *pool.host), before, strict=True))


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_the_two_sides_may_have_different_dtypes(pools, compiled, policy, dtypes):
    pool = pools.random_pool("layer_first")
    transfer = PlaneTransfer(pool.planes)
    host, device = pool.slots([7, 0, 1], dtypes[0]), pool.slots([8, 3, 1], dtypes[1])
    pool.check_write_back(host, device, transfer.write_back, now, policy=policy)
    pool.check_load(host, device, transfer.load, now, policy=policy)


@pytest.mark.parametrize("policy", PATHS)
def test_indices_at_odd_places_of_a_larger_tensor_are_read_from_their_start(pools, compiled, policy):
    pool = pools.random_pool("page_first")
    transfer = PlaneTransfer(pool.planes)
    for dtype in (torch.int64, torch.int32):
        host = torch.cat([torch.tensor([10**6], dtype=dtype), pool.slots([7, 0, 1], dtype)])[1:]
        device = torch.cat([torch.tensor([-3, -4, -5], dtype=dtype), pool.slots([8, 3, 1], dtype)])[3:]
        pool.check_write_back(host, device, transfer.write_back, now, policy=policy)
        pool.check_load(host, device, transfer.load, now, policy=policy)


@pytest.mark.parametrize("policy", PATHS)
def test_a_page_half_present_or_out_of_step_is_refused(pools, compiled, policy):
    pool = pools.random_pool("page_first")
    transfer = PlaneTransfer(pool.planes, policy=policy)
    good = pool.slots([1, 5])
    for damage in (
        [1, 0, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 4, 4, 5, 6, 7],
        [2, 3, 4, 5, 8, 9, 10, 11],
        [0, 0, 0, 0, 1, 1, 1, 1],
    ):
        for call in (transfer.write_back, transfer.load):
            with pytest.raises(ValueError, match=r"host_indices\[\d+:\d+\] .* is not one page"):
                call(torch.tensor(damage), good)


@pytest.mark.parametrize("policy", PATHS)
def test_threads_share_one_transfer_without_mixing_indices(pools, compiled, policy):
    pool = pools.random_pool("page_first_direct", (64, 16), pages=64)
    transfer = PlaneTransfer(pool.planes, ring=StagingRing("cpu", pages=3), policy=policy)
    shares = torch.randperm(64).view(4, 16)
    content = [tensor.clone() for tensor in pool.rows]
    failures = []

    def work(share):
        slots = pool.slots(share)
        for _ in range(30):
            order = torch.randperm(16)
            host, device = pool.slots(share[order]), pool.slots(share[torch.randperm(16)])
            transfer.write_back(host, device)
            for tensor in pool.rows:
                tensor[slots] = 0
            for layer in range(transfer.layers):
                transfer.load(host, device, layer=layer)
            if not all(torch.equal(a[slots], b[slots]) for a, b in zip(pool.rows, content, strict=True)):
                failures.append(share)

    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_capture_never_gets_the_uploads_of_an_earlier_call(monkeypatch):
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    reader = IndexReader(page_size=1, host_slots=8, device_slots=8, device=torch.device("cpu"), scan=None, upload=None)
    stream, host, device = object(), torch.tensor([1, 2]), torch.tensor([3, 4])
    assert reader.read(host, device, stream, keep=True) is reader.read(host, device, stream, keep=True)
    assert reader.read(host, device, stream) is not reader.read(host, device, stream)
    capturing = True
    with pytest.raises(ValueError, match="host_indices is on the CPU; under graph capture it must be on"):
        reader.read(host, device, stream, keep=True)


class Event:
    """An event that comes when a test says so."""

    def __init__(self):
        self.come = True

    def query(self):
        return self.come

    def record(self, stream):
        self.come = False


@pytest.fixture
def uploads(monkeypatch):
    """Uploads without a GPU: memory that is not pinned, events of the test's own."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: allocate(*size, **options))


def test_an_upload_is_taken_again_only_after_its_last_reader(uploads):
    pool = UploadPool(torch.device("cpu"))
    first = pool.take(10)
    first.event.record(None)
    pool.give_back(first)
    second = pool.take(10)
    assert second is not first
    first.event.come = True
    pool.give_back(second)
    assert pool.take(10) is first
    assert pool.take(10) is second


def test_an_upload_that_is_too_small_makes_room_for_a_larger_one(uploads):
    pool = UploadPool(torch.device("cpu"))
    small = pool.take(1)
    pool.give_back(small)
    count = small.pinned.numel() + 1
    large = pool.take(count)
    assert large is not small
    assert large.pinned.numel() >= count
    pool.give_back(large)
    assert pool.take(1) is large


def test_one_long_operation_makes_no_upload_for_every_short_one_after_it(uploads):
    pool = UploadPool(torch.device("cpu"))
    long = pool.take(1)
    long.event.record(None)
    pool.give_back(long)
    seen = set()
    for _ in range(50):
        short = pool.take(1)
        seen.add(id(short))
        pool.give_back(short)
    assert id(long) not in seen
    assert len(seen) == 1


def on_device(reader, monkeypatch, stream, *, capturing):
    monkeypatch.setattr(checks, "check_tensor", lambda name, tensor, kind: None)  # no list on meta is taken otherwise
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return lambda *lists: reader.read(*lists, stream, keep=True)


def test_what_a_graph_captured_serves_no_call_outside(monkeypatch):
    """Its widened copies have bytes while the graph runs alone. (Lists on ``meta`` act as those on a GPU.)"""
    device = torch.device("meta")
    reader = IndexReader(page_size=1, host_slots=9, device_slots=9, device=device, scan=None, upload=None)
    stream, host = object(), torch.empty(4, dtype=torch.int64, device=device)
    slots = torch.empty(4, dtype=torch.int32, device=device)
    captured = on_device(reader, monkeypatch, stream, capturing=True)(host, slots)
    assert captured.captured
    eager = on_device(reader, monkeypatch, stream, capturing=False)(host, slots)
    assert eager is not captured
    assert on_device(reader, monkeypatch, stream, capturing=False)(host, slots) is eager


def test_a_widened_copy_of_a_list_on_the_device_is_made_for_each_call(monkeypatch):
    """Torch can write to such a list between two layers, and the CPU does not see it."""
    device = torch.device("meta")
    reader = IndexReader(page_size=1, host_slots=9, device_slots=9, device=device, scan=None, upload=None)
    stream, host = object(), torch.arange(4)
    slots = torch.empty(4, dtype=torch.int32, device=device)
    indices = on_device(reader, monkeypatch, stream, capturing=False)(host, slots)
    first, second = reader.on_device(indices, stream, both=True), reader.on_device(indices, stream, both=True)
    assert first[1].dtype is second[1].dtype is torch.int64
    assert first[1] is not second[1]
    assert indices.device_slots is slots


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int64), (torch.int32, torch.int64), (torch.int32, torch.int32)])
def test_uploads_go_back_with_their_indices_and_not_before(uploads, compiled, dtypes):
    module = compiled("main")
    reader = IndexReader(
        page_size=1, host_slots=99, device_slots=99, device=torch.device("cpu"),
        scan=module["scan_indices"], upload=module["upload_indices"],
    )  # fmt: skip
    stream = SimpleNamespace(cuda_stream=0)
    host, device = (torch.randperm(99)[:7].to(dtype) for dtype in dtypes)
    indices = reader.read(host, device, stream)
    host_slots, device_slots = reader.on_device(indices, stream, both=True)
    assert torch.equal(host_slots, host.long())
    assert torch.equal(device_slots, device.long())
    assert reader.on_device(indices, stream, both=False)[1] is device_slots
    (upload,) = indices.uploads
    other = reader.read(device, host, stream)
    reader.on_device(other, stream, both=False)
    assert other.uploads[0] is not upload
    reader.done(indices, stream)
    del indices
    third = reader.read(host, device, stream)
    reader.on_device(third, stream, both=False)
    assert third.uploads[0] is not upload
    assert torch.equal(host_slots, host.long())
    upload.event.come = True
    fourth = reader.read(host, device, stream)
    reader.on_device(fourth, stream, both=False)
    assert fourth.uploads[0] is upload


def test_kept_indices_of_page_size_1_survive_their_callers_writes(compiled):
    module = compiled("main")
    reader = IndexReader(
        page_size=1, host_slots=9, device_slots=9, device=torch.device("cpu"),
        scan=module["scan_indices"], upload=module["upload_indices"],
    )  # fmt: skip
    host, device = torch.tensor([4, 2, 7]), torch.tensor([0, 1, 2])
    kept = reader.read(host, device, None, keep=True)
    host[1] = 5
    assert kept.pages.tolist() == [4, 2, 7]
    assert reader.read(host, device, None, keep=True).pages.tolist() == [4, 5, 7]


def test_an_upload_without_room_for_its_indices_is_refused(compiled):
    slots, room = torch.arange(4), torch.zeros(7, dtype=torch.int64)
    with pytest.raises(ValueError, match="8 indices; pinned has room for 7, on_device for 7"):
        compiled("staged")["upload_indices"](slots, slots, room, room.clone(), 0)


def test_an_operation_outlives_its_callers_tensors(pools, compiled):
    pool = pools.random_pool("page_first")
    transfer = PlaneTransfer(pool.planes)
    for _ in range(200):
        count = random.randint(1, 8)
        host, device = pool.slots(torch.randperm(8)[:count]), pool.slots(torch.randperm(9)[:count])
        transfer.load(host, device, layer=0, policy=random.choice(PATHS))
        del host, device
    host, device = pool.slots([1, 2, 6]), pool.slots([8, 0, 1])
    pool.check_load(host, device, transfer.load, now, layer=1)
