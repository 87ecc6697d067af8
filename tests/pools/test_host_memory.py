"""Host buffers: contents, pinning in chunks, giving back in order, sharing."""

import contextlib
import gc
import os
import random
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hicache_pools.host_memory as host_memory_module
from hicache_pools.host_memory import HostBuffer, allocate_host_buffer, attach_host_buffer
from hicache_pools.memory_budget import HostMemoryBudgetError
from hicache_pools.registration import HostRegistrationError

MIB = 1 << 20
OS_PAGE = os.sysconf("SC_PAGESIZE")


class FakeRuntime:
    """Pins nothing, remembers everything, refuses the chunk that a test names."""

    def __init__(self, refuse: int | None = None) -> None:
        self.refuse = refuse
        self.pinned: dict[int, int] = {}
        self.registered: list[tuple[int, int]] = []
        self.pending = 0
        self.log: list[str] = []

    def register(self, address: int, nbytes: int) -> int:
        if len(self.registered) == self.refuse:
            self.pending = 2
            return 2
        # Like a GPU driver: whole OS pages, and none twice.
        assert address % OS_PAGE == 0
        assert all(address + nbytes <= a or a + n <= address for a, n in self.pinned.items())
        self.registered.append((address, nbytes))
        self.pinned[address] = nbytes
        self.log.append("register")
        return 0

    def unregister(self, address: int) -> int:
        self.log.append("unregister")
        if address not in self.pinned:
            self.pending = 1
            return 1
        del self.pinned[address]
        return 0

    def device_address(self, address: int) -> tuple[int, int]:
        assert address in self.pinned
        return 0, address

    def clear_error(self) -> None:
        self.pending = 0

    def describe(self, code: int) -> str:
        return f"fakeErrorMemoryAllocation ({code}): out of memory"


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@contextlib.contextmanager
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.mark.parametrize("allocator_type", ["default", "shared"])
@pytest.mark.parametrize("pin", [False, True])
def test_a_buffer_is_flat_zeroed_and_writable(allocator_type: str, pin: bool) -> None:
    nbytes = random.randrange(1, 3 * MIB)
    runtime = FakeRuntime()
    with allocate_host_buffer(nbytes, pin=pin, page_bytes=1, allocator_type=allocator_type, runtime=runtime) as buffer:
        assert buffer.tensor.shape == (nbytes,)
        assert buffer.tensor.dtype is torch.uint8
        assert not buffer.tensor.any()
        data = random_bytes(nbytes)
        buffer.tensor.copy_(data)
        assert torch.equal(buffer.tensor, data)
        assert buffer.tensor.data_ptr() % OS_PAGE == 0


@pytest.mark.parametrize("allocator_type", ["default", "shared"])
@pytest.mark.parametrize("huge_pages", ["off", "transparent"])
def test_every_byte_is_registered_once_and_the_cuts_are_the_boundaries(allocator_type: str, huge_pages: str) -> None:
    page_bytes = random.choice([1 << 12, 3 << 12, 5 << 14, 7 << 10])
    nbytes = page_bytes * (9 * MIB // page_bytes)
    runtime = FakeRuntime()
    with allocate_host_buffer(
        nbytes,
        page_bytes=page_bytes,
        chunk_bytes=MIB,
        runtime=runtime,
        allocator_type=allocator_type,
        huge_pages=huge_pages,
    ) as buffer:
        assert buffer.pinned
        assert "chunks" in buffer.reason
        address = buffer.tensor.data_ptr()
        ends = [a - address + n for a, n in runtime.registered]
        assert [a - address for a, _ in runtime.registered] == [0, *ends[:-1]]
        assert ends[-1] == nbytes
        assert tuple(ends[:-1]) == buffer.boundaries
        assert all(end % page_bytes == 0 for end in buffer.boundaries)
        assert all(n <= MIB for _, n in runtime.registered)
    assert runtime.pinned == {}


def test_a_refused_chunk_leaves_nothing_pinned_and_no_pending_error_and_says_why() -> None:
    for refuse in range(6):
        runtime = FakeRuntime(refuse)
        with pytest.raises(HostRegistrationError, match=r"fakeErrorMemoryAllocation \(2\): out of memory") as caught:
            allocate_host_buffer(6 * MIB, page_bytes=4096, chunk_bytes=MIB, runtime=runtime)
        assert (caught.value.code, caught.value.chunk, caught.value.chunks) == (2, refuse, 6)
        assert f"chunk {refuse + 1} of 6" in str(caught.value)
        assert len(runtime.registered) == refuse
        assert runtime.pinned == {}
        assert runtime.pending == 0


def test_an_interrupt_while_pinning_leaves_nothing_pinned() -> None:
    class Interrupted(FakeRuntime):
        def register(self, address: int, nbytes: int) -> int:
            if len(self.registered) == 2:
                raise KeyboardInterrupt
            return super().register(address, nbytes)

    runtime = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        allocate_host_buffer(4 * MIB, page_bytes=4096, chunk_bytes=MIB, runtime=runtime)
    assert runtime.pinned == {}


def test_a_refused_registration_gives_the_mapping_back() -> None:
    maps = Path("/proc/self/maps")
    before = len(maps.read_text().splitlines())
    for _ in range(50):
        with pytest.raises(HostRegistrationError):
            allocate_host_buffer(3 * MIB, page_bytes=4096, allocator_type="shared", runtime=FakeRuntime(0))
    gc.collect()
    assert len(maps.read_text().splitlines()) < before + 25


def test_asking_to_pin_without_a_gpu_gives_unpinned_memory_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_gpu(monkeypatch), allocate_host_buffer(MIB, pin=True, page_bytes=4096, chunk_bytes=65536) as buffer:
        assert not buffer.pinned
        assert "no CUDA or ROCm device" in buffer.reason
        assert buffer.boundaries == ()


def test_a_buffer_for_cpu_transfers_is_not_pinned() -> None:
    with allocate_host_buffer(MIB, page_bytes=4096, device=torch.device("cpu")) as buffer:
        assert not buffer.pinned
        assert "cpu" in buffer.reason


def test_a_buffer_that_was_not_to_be_pinned_says_so() -> None:
    with allocate_host_buffer(MIB, pin=False, page_bytes=4096, runtime=FakeRuntime()) as buffer:
        assert (buffer.pinned, buffer.reason) == (False, "pin is False")


def test_closing_drains_then_unpins_and_a_second_time_does_nothing() -> None:
    runtime = FakeRuntime()
    buffer = allocate_host_buffer(
        2 * MIB, page_bytes=4096, chunk_bytes=MIB, runtime=runtime, drain=lambda: runtime.log.append("drain")
    )
    assert not buffer.closed
    buffer.close()
    buffer.close()
    assert buffer.closed
    assert not buffer.pinned
    assert runtime.log == ["register", "register", "drain", "unregister", "unregister"]
    with pytest.raises(RuntimeError, match="closed"):
        _ = buffer.tensor


def test_a_drain_that_raises_leaves_the_buffer_open_and_pinned() -> None:
    runtime = FakeRuntime()
    buffer = allocate_host_buffer(MIB, page_bytes=4096, runtime=runtime)

    def fail() -> None:
        raise OSError("still in flight")

    buffer.set_drain(fail)
    with pytest.raises(OSError, match="still in flight"):
        buffer.close()
    assert buffer.pinned
    assert len(runtime.pinned) == 1
    buffer.tensor.fill_(3)
    buffer.set_drain(None)
    buffer.close()
    assert runtime.pinned == {}


def test_a_view_that_outlives_its_closed_buffer_reads_zeros_and_does_not_fault() -> None:
    buffer = allocate_host_buffer(4 * MIB, page_bytes=4096, runtime=FakeRuntime())
    view = buffer.tensor[MIB : 2 * MIB]
    view.fill_(9)
    buffer.close()
    assert not view.any()
    view.fill_(1)


def test_a_refusal_to_unpin_does_not_stop_the_other_chunks() -> None:
    runtime = FakeRuntime()
    buffer = allocate_host_buffer(3 * MIB, page_bytes=4096, chunk_bytes=MIB, runtime=runtime)
    del runtime.pinned[runtime.registered[1][0]]
    buffer.close()
    assert runtime.pinned == {}
    assert runtime.pending == 0


def test_memory_lives_as_long_as_any_tensor_shows_it_and_no_longer() -> None:
    runtime = FakeRuntime()
    tensor = allocate_host_buffer(MIB, page_bytes=4096, runtime=runtime).tensor
    view = tensor.view(torch.int32)[5:]
    data = torch.randint(-1000, 1000, view.shape, dtype=torch.int32)
    view.copy_(data)
    del tensor
    gc.collect()
    assert torch.equal(view, data)
    assert len(runtime.pinned) == 1
    del view
    gc.collect()
    assert runtime.pinned == {}


def test_a_forgotten_buffer_drains_before_it_unpins() -> None:
    runtime = FakeRuntime()
    buffer = allocate_host_buffer(MIB, page_bytes=4096, runtime=runtime)
    buffer.set_drain(lambda: runtime.log.append("drain"))
    del buffer
    gc.collect()
    assert runtime.log == ["register", "drain", "unregister"]


def test_a_forgotten_buffer_that_cannot_be_drained_stays_pinned_rather_than_go_under_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaked: list[object] = []
    monkeypatch.setattr(host_memory_module, "_leaked", leaked)
    runtime = FakeRuntime()
    buffer = allocate_host_buffer(MIB, page_bytes=4096, runtime=runtime)

    def fail() -> None:
        raise OSError("the device is lost")

    buffer.set_drain(fail)
    del buffer
    gc.collect()
    assert len(runtime.pinned) == len(leaked) == 1


def test_a_buffer_open_at_exit_is_drained_and_unpinned() -> None:
    program = """
        from hicache_pools.host_memory import allocate_host_buffer

        class Runtime:
            def register(self, address, nbytes): print("register"); return 0
            def unregister(self, address): print("unregister"); return 0
            def device_address(self, address): return 0, address

        buffer = allocate_host_buffer(1 << 20, page_bytes=4096, runtime=Runtime(), drain=lambda: print("drain"))
        view = buffer.tensor[7:]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["register", "drain", "unregister"], "")


def test_a_forked_child_does_not_unpin_what_its_parent_uses() -> None:
    runtime = FakeRuntime()
    buffer = allocate_host_buffer(MIB, page_bytes=4096, runtime=runtime)
    memory = weakref.ref(buffer._memory)
    buffer._memory.process = os.getpid() + 1  # what a child would see
    del buffer
    gc.collect()
    assert runtime.log == ["register"]
    assert memory() is None


@pytest.mark.parametrize("nbytes", [1 << 45, 1 << 62])
def test_the_budget_is_asked_before_boundaries_are_looked_for(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object, **__: object) -> tuple[int, ...]:
        raise AssertionError("that takes as long as there are chunks")

    monkeypatch.setattr(host_memory_module, "registration_boundaries", look)
    runtime = FakeRuntime()
    for pin in (True, False):
        with pytest.raises(HostMemoryBudgetError, match=f"asked for {nbytes} bytes"):
            allocate_host_buffer(nbytes, pin=pin, page_bytes=4096, chunk_bytes=MIB, runtime=runtime)
    assert runtime.log == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nbytes": 0}, "nbytes is 0"),
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"allocator_type": "heap"}, "heap"),
        ({"huge_pages": "gigantic"}, "huge_pages is 'gigantic'; accepted are off, "),
        ({"page_bytes": 4095, "chunk_bytes": 8192}, "chunk_bytes is 8192"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_a_bad_argument_is_named_and_nothing_is_pinned(arguments: dict[str, object], message: str) -> None:
    runtime = FakeRuntime()
    given = {"nbytes": MIB, "page_bytes": 4096, "runtime": runtime} | arguments
    with pytest.raises(ValueError, match=message):
        allocate_host_buffer(given.pop("nbytes"), **given)  # type: ignore[arg-type]
    assert runtime.log == []


def test_reserved_huge_pages_are_there_or_the_error_says_where_to_get_them() -> None:
    there = "HugePages_Free:        0" not in Path("/proc/meminfo").read_text()
    refused = pytest.raises(OSError, match=r"nr_hugepages|no huge pages")
    with contextlib.nullcontext() if there else refused:
        allocate_host_buffer(MIB, pin=False, page_bytes=4096, huge_pages="reserved").close()


# -- shared memory


def test_another_process_attaches_and_both_see_the_same_bytes() -> None:
    nbytes = random.randrange(MIB, 2 * MIB)
    data = random_bytes(nbytes)
    program = """
        import sys
        from hicache_pools.host_memory import attach_host_buffer

        with attach_host_buffer(sys.argv[1], page_bytes=1) as buffer:
            received = buffer.tensor.clone()
            buffer.tensor.copy_(received.flip(0))
        sys.stdout.buffer.write(received.numpy().tobytes())
    """
    with allocate_host_buffer(nbytes, pin=False, page_bytes=1, allocator_type="shared") as buffer:
        buffer.tensor.copy_(data)
        command = [sys.executable, "-c", textwrap.dedent(program), str(buffer.shared_name)]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == data.numpy().tobytes()
        assert torch.equal(buffer.tensor, data.flip(0))


def test_attached_memory_is_pinned_for_its_own_process_without_losing_its_contents() -> None:
    data = random_bytes(3 * MIB)
    with allocate_host_buffer(3 * MIB, pin=False, page_bytes=4096, allocator_type="shared") as buffer:
        buffer.tensor.copy_(data)
        runtime = FakeRuntime()
        attached = attach_host_buffer(str(buffer.shared_name), page_bytes=4096, chunk_bytes=MIB, runtime=runtime)
        assert attached.pinned
        assert attached.boundaries == (MIB, 2 * MIB)
        assert torch.equal(attached.tensor, data)
        attached.close()
        assert runtime.pinned == {}
        assert torch.equal(buffer.tensor, data)


def test_attached_memory_outlives_the_buffer_that_made_it() -> None:
    data = random_bytes(MIB)
    buffer = allocate_host_buffer(MIB, pin=False, page_bytes=4096, allocator_type="shared")
    buffer.tensor.copy_(data)
    attached = attach_host_buffer(str(buffer.shared_name), page_bytes=4096)
    buffer.close()
    assert torch.equal(attached.tensor, data)
    attached.close()


def test_a_closed_buffer_can_no_longer_be_attached_to() -> None:
    buffer = allocate_host_buffer(MIB, pin=False, page_bytes=4096, allocator_type="shared")
    name = str(buffer.shared_name)
    buffer.close()
    with pytest.raises(FileNotFoundError, match="gone"):
        attach_host_buffer(name, page_bytes=4096)


def test_a_descriptor_used_again_for_other_memory_is_not_mistaken_for_it() -> None:
    buffer = allocate_host_buffer(MIB, pin=False, page_bytes=4096, allocator_type="shared")
    name = str(buffer.shared_name)
    token = name.rsplit("-", 1)[1]
    other = name.replace(token, token[::-1] + "0")
    with pytest.raises(FileNotFoundError, match="gone"):
        attach_host_buffer(other, page_bytes=4096)
    buffer.close()


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "hicache-1-2", "hicache-1-2-ab/../x"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="shared_name"):
        attach_host_buffer(name, page_bytes=4096)


def test_private_memory_has_no_name() -> None:
    with allocate_host_buffer(MIB, pin=False, page_bytes=4096) as buffer:
        assert buffer.shared_name is None


def test_a_closed_shared_buffer_leaves_no_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    buffers: list[HostBuffer] = []
    for _ in range(8):
        buffer = allocate_host_buffer(65536, pin=False, page_bytes=4096, allocator_type="shared")
        buffers.append(attach_host_buffer(str(buffer.shared_name), page_bytes=4096))
        buffers.append(buffer)
    for buffer in buffers:
        buffer.close()
    buffers.clear()
    gc.collect()
    assert descriptors() == before
