"""What several modules here need: a stack of pools, allocator and controller with gates, and a Mooncake master."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import needs
from tests.controller.hybrid_stack import HybridStack

from hicache_controller.controller import HiCacheController
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_settings import StorageSettings
from hicache_pools.device_pools import MHATokenToKVPool
from hicache_pools.extents import ExtentAllocator
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import MHATokenToKVPoolHost

LAYERS = 3
PAGE_SIZE = 4
WAIT_SECONDS = 30


class InjectedError(RuntimeError):
    """A fault a test asked for."""


class Gate:
    """Lets callers through while it is open, tells when one has come, and makes the next ``failures`` calls fail."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Event()
        self.failures = 0
        self.calls = 0

    def close(self) -> None:
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_entered(self) -> None:
        if not self.entered.wait(WAIT_SECONDS):
            raise TimeoutError("nobody came to the gate")

    def __call__(self) -> None:
        self.entered.set()
        if not self._open.wait(WAIT_SECONDS):
            raise TimeoutError("the gate was never opened")
        self.calls += 1
        if self.failures:
            self.failures -= 1
            raise InjectedError("injected")


class GatedHost(MHATokenToKVPoolHost):
    """A host pool with a gate before each write-back, and before each layer of a load.

    Attributes
    ----------
    bad
        Host slots of which no write-back, and no load from layer ``bad_from`` on, succeeds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.write_gate = Gate()
        self.load_gates = [Gate() for _ in range(LAYERS)]
        self.bad: set[int] = set()
        self.bad_from = 0
        super().__init__(*args, **kwargs)

    def backup_from_device_all_layer(self, device_pool: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
        self.write_gate()
        self._check(host_indices)
        return super().backup_from_device_all_layer(device_pool, host_indices, *args, **kwargs)

    def load_to_device_per_layer(
        self, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.load_gates[layer_id]()
        if layer_id >= self.bad_from:
            self._check(host_indices)
        return super().load_to_device_per_layer(device_pool, host_indices, device_indices, layer_id, *args, **kwargs)

    def _check(self, host_indices: torch.Tensor) -> None:
        if not self.bad.isdisjoint(host_indices.tolist()):
            raise InjectedError("these slots are bad")


class GatedStorage(MemoryStorage):
    """A memory backend with gates before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.exists_gate, self.get_gate, self.set_gate = Gate(), Gate(), Gate()

    def batch_exists(self, *args: Any, **kwargs: Any) -> int:
        self.exists_gate()
        return super().batch_exists(*args, **kwargs)

    def batch_get(self, *args: Any, **kwargs: Any) -> list[bool]:
        self.get_gate()
        return super().batch_get(*args, **kwargs)

    def batch_set(self, *args: Any, **kwargs: Any) -> list[bool]:
        self.set_gate()
        return super().batch_set(*args, **kwargs)


class Stack:
    """One MHA pool with random rows, its host pool, the engine's allocator, and a controller."""

    def __init__(
        self,
        *,
        device_pages: int = 32,
        host_pages: int = 32,
        layout: str = "page_first",
        storage: bool = False,
        storage_settings: StorageSettings | None = None,
        controller: type[HiCacheController] = HiCacheController,
        **options: Any,
    ) -> None:
        slots = device_pages * PAGE_SIZE
        self.page_size = PAGE_SIZE
        self.k = [torch.randint(0, 256, (slots, 2, 8), dtype=torch.uint8) for _ in range(LAYERS)]
        self.v = [torch.randint(0, 256, (slots, 2, 4), dtype=torch.uint8) for _ in range(LAYERS)]
        self.device_pool = MHATokenToKVPool.from_buffers(k=self.k, v=self.v, page_size=PAGE_SIZE)
        self.host_pool = GatedHost(self.device_pool, 0, 0, PAGE_SIZE, layout, False, pages=host_pages)
        self.allocator = ExtentAllocator(device_pages, PAGE_SIZE)
        self.entry = PoolEntry(
            "kv",
            self.host_pool,
            self.device_pool,
            lambda layer: layer,
            device_alloc_fn=self.allocator.alloc,
            device_free_fn=self.allocator.free,
        )
        self.group = HostPoolGroup([self.entry])
        self.controller = controller(self.group, storage=storage_settings, **options)
        self.wait_at_most(WAIT_SECONDS)  # on a machine that is busy
        self.storage = GatedStorage()
        if storage:
            self.controller.attach_storage_backend(self.storage)

    @property
    def gates(self) -> list[Gate]:
        storage = self.storage
        return [
            self.host_pool.write_gate,
            *self.host_pool.load_gates,
            storage.exists_gate,
            storage.get_gate,
            storage.set_gate,
        ]

    def wait_at_most(self, seconds: float) -> None:
        """Set how long calls wait for storage."""
        storage = self.controller.storage
        storage.settings = dataclasses.replace(storage.settings, max_wait_seconds=seconds)

    def alloc(self, pages: int) -> torch.Tensor:
        slots = self.allocator.alloc(pages * PAGE_SIZE)
        if slots is None:
            raise RuntimeError("the test needs more device pages")
        return slots

    def compute(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Fill device rows with fresh random bytes and return them."""
        for buffer in (*self.k, *self.v):
            buffer[slots] = torch.randint(0, 256, (len(slots), *buffer.shape[1:]), dtype=torch.uint8)
        return self.rows(slots)

    def rows(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[slots].clone() for buffer in (*self.k, *self.v)]

    def written(self, pages: int, node_id: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Host slots of pages that were written back and left the device, and the bytes of their rows."""
        device = self.alloc(pages)
        rows = self.compute(device)
        host = self.controller.write(device, node_id=node_id)
        if host is None:
            raise RuntimeError("the test needs more host pages")
        self.controller.start_writing()
        (ack,) = self.controller.poll_writes(wait=True)
        if ack.error is not None:
            raise ack.error
        self.controller.evict_device(device)
        return host, rows

    def stored(self, pages: int, node_id: int = 0) -> tuple[list[bytes], list[torch.Tensor]]:
        """Keys of pages that are in storage and nowhere else, and the bytes of their rows."""
        host, rows = self.written(pages)
        keys = self.keys(pages)
        self.controller.backup(host, keys, parents=[None, *keys[:-1]], node_id=node_id)
        acks: list[Any] = []
        while not acks:  # a storage with a short timeout is not waited for twice
            acks = self.controller.poll_backups(wait=True)
        assert [(ack.stored_pages, ack.error) for ack in acks] == [(pages, None)]
        self.controller.evict_host(host)
        self.host_pool.buffer.random_(0, 256)
        return keys, rows

    def loaded(self, host: torch.Tensor, node_id: int = 0) -> list[torch.Tensor]:
        """Rows of host slots, by way of the device."""
        device = self.controller.load(host, node_id=node_id)
        if device is None:
            raise RuntimeError("the test needs more device pages")
        self.controller.start_loading()
        (ack,) = self.controller.poll_loads(wait=True)
        if ack.error is not None:
            raise ack.error
        rows = self.rows(device)
        self.controller.evict_device(device)
        return rows

    def keys(self, pages: int) -> list[bytes]:
        return [secrets.token_bytes(16) for _ in range(pages)]

    @staticmethod
    def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

    def used(self) -> tuple[int, int]:
        """Device and host pages that are not free."""
        return (
            self.allocator.page_num - self.allocator.available_pages,
            self.host_pool.page_num - self.host_pool.available_size() // PAGE_SIZE,
        )

    def check_integrity(self) -> None:
        self.controller.check_integrity()
        self.allocator.check_integrity()
        self.host_pool.allocator.check_integrity()


@pytest.fixture
def make_stack() -> Iterator[Callable[..., Stack]]:
    """Make stacks; at the end every gate is opened, every controller shut down, and its integrity is checked."""
    made: list[Stack] = []

    def make(**options: Any) -> Stack:
        stack = Stack(**options)
        made.append(stack)
        return stack

    yield make
    for stack in made:
        for gate in stack.gates:
            gate.open()
        assert stack.controller.shutdown(WAIT_SECONDS)
        stack.check_integrity()


@pytest.fixture
def make_hybrid() -> Iterator[Callable[..., HybridStack]]:
    made = []

    def make(**options):
        made.append(HybridStack(**options))
        return made[-1]

    yield make
    for stack in made:
        assert stack.controller.shutdown(30)
        stack.controller.check_integrity()


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Run a function on a thread that is joined at the end, and whose exception is raised there."""
    running: list[tuple[threading.Thread, list[BaseException]]] = []

    def start(function: Callable[[], object]) -> threading.Thread:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        running.append((thread, errors))
        return thread

    yield start
    for thread, errors in running:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        if errors:
            raise errors[0]


@pytest.fixture
def interrupted_at() -> Iterator[Callable[[Callable[[], object], int], bool]]:
    """Call a function with Ctrl-C at its nth line of this project; tells whether it came."""

    def call(function: Callable[[], object], nth: int) -> bool:
        lines = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if "hicache" not in frame.f_code.co_filename:
                return None
            if event == "line":
                lines += 1
                if lines == nth:
                    os.kill(os.getpid(), signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    before = signal.getsignal(signal.SIGINT)
    gc.collect()
    gc.disable()  # a finalizer of another test's objects would swallow the interrupt
    try:
        yield call
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)  # an interrupt may have kept the handler of a block in its place


class Master:
    """A real mooncake_master on loopback, at ports of its own."""

    def __init__(self, binary: Path) -> None:
        self.binary = binary
        with socket.socket() as rpc, socket.socket() as metrics:
            rpc.bind(("127.0.0.1", 0))
            metrics.bind(("127.0.0.1", 0))
            self.port, self.metrics = rpc.getsockname()[1], metrics.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Master:
        ports = [f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", f"--metrics_port={self.metrics}"]
        others = ["--metrics_host=127.0.0.1", "--rpc_thread_num=2", "--logtostderr"]
        self.process = subprocess.Popen(
            [self.binary, *ports, *others], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            assert self.process.poll() is None, "mooncake_master ended"
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return self
            except ConnectionRefusedError:
                pass

    def stop(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def mooncake_master() -> Path:
    """Path of the program."""
    for library in ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1"):
        try:
            ctypes.CDLL(library)
        except OSError:
            needs(False, f"{library} is not installed, which Mooncake needs")
    found = importlib.util.find_spec("mooncake")
    needs(found is not None, "a mooncake-transfer-engine wheel is not installed")
    path = Path(found.submodule_search_locations[0]) / "mooncake_master"
    needs(os.access(path, os.X_OK), f"{path} is not there or not executable")
    return path


@pytest.fixture(scope="module")
def shared_master(mooncake_master: Path) -> Iterator[Master]:
    """One that runs, for all tests of a module."""
    master = Master(mooncake_master).start()
    yield master
    master.kill()


@pytest.fixture
def own_master(mooncake_master: Path) -> Iterator[Master]:
    """One that the test starts."""
    master = Master(mooncake_master)
    yield master
    master.kill()
