"""A forked child gets an error that names the fork, never a hang, and leaves the parent's files and memory alone."""

import subprocess
import sys
import textwrap

import pytest
import torch
from tests.conftest import in_child

from hicache_controller import Fingerprint, UnifiedRadixCache
from hicache_controller.events import HostSignal

FINGERPRINT = Fingerprint("org/model", "abc")


@pytest.fixture
def parent(make_stack):
    """A stack with a tree that has a prefix on the host, and storage."""
    stack = make_stack(storage=True)
    stack.tree = UnifiedRadixCache(stack.controller, stack.allocator, page_size=stack.page_size)
    stack.page_keys = stack.keys(3)
    match = stack.tree.match_prefix(stack.page_keys)
    pages = stack.tree.alloc_device(3)
    stack.tree_rows = stack.compute(torch.from_numpy((pages[:, None] * 4 + [0, 1, 2, 3]).reshape(-1)))
    stack.tree.release(stack.tree.insert(match, pages).match)
    stack.tree.drain()
    stack.tree.evict_device(3)
    stack.host, stack.rows_of_host = stack.written(2)
    return stack


USES = {
    "load": lambda s: s.controller.load(s.host, node_id=1),
    "write": lambda s: s.controller.write(torch.arange(4), node_id=1),
    "start_writing": lambda s: s.controller.start_writing(),
    "poll_loads": lambda s: s.controller.poll_loads(wait=True),
    "evict_host": lambda s: s.controller.evict_host(s.host),
    "backup": lambda s: s.controller.backup(s.host, s.keys(2), node_id=1),
    "storage_exists": lambda s: s.controller.storage_exists(s.page_keys),
    "detach": lambda s: s.controller.detach_storage_backend(),
    "reset": lambda s: s.controller.reset(),
    "shutdown": lambda s: s.controller.shutdown(),
    "quota": lambda s: s.controller.load_block_quota,
    "match_prefix": lambda s: s.tree.match_prefix(s.page_keys),
    "poll": lambda s: s.tree.poll(wait=True),
    "tree_reset": lambda s: s.tree.reset(),
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child_that_uses_the_cache_gets_an_error_that_names_the_fork(parent, use):
    outcome = in_child(lambda: USES[use](parent))
    kind = "UnifiedRadixCache" if use in ("match_prefix", "poll", "tree_reset") else "HiCacheController"
    assert outcome.startswith(f"RuntimeError: this {kind} was made before a fork, and process ")
    match = parent.tree.load_back(parent.tree.match_prefix(parent.page_keys))
    slots = (parent.tree.device_page_numbers(match)[:, None] * 4 + [0, 1, 2, 3]).reshape(-1)
    assert parent.same(parent.rows(torch.from_numpy(slots)), parent.tree_rows)
    parent.tree.release(match)
    assert parent.same(parent.loaded(parent.host), parent.rows_of_host)


def test_parts_of_a_cache_refuse_in_a_forked_child_by_themselves(parent):
    controller = parent.controller
    engine, counter = controller.engine, controller.layer_done_counter
    worker, _ = engine._workers.values()
    for use in (
        lambda: engine.drain(),
        lambda: engine.close(1),
        lambda: worker.submit(None),
        lambda: counter.wait_until(0),
        lambda: parent.storage.batch_exists(parent.page_keys),
    ):
        assert "was made before a fork" in in_child(use)
    assert in_child(lambda: isinstance(controller, type(controller))) == "returned True"


def test_a_forked_child_does_not_wait_for_what_its_parent_moves(parent):
    gate = parent.host_pool.write_gate
    gate.close()
    parent.controller.write(parent.alloc(1), node_id=1)
    ack = parent.controller.start_writing()
    parent.storage.get_gate.close()
    slots = parent.group.alloc(4)
    operation = parent.controller.prefetch(slots, parent.keys(1), request_id="r")
    for wait in (ack.host_ready.synchronize, ack.device_released.wait, operation.wait):
        assert "is waited for was made before a fork" in in_child(wait)
    gate.open()
    parent.storage.get_gate.open()
    assert operation.wait() == 0
    assert parent.controller.poll_writes(wait=True)[0].error is None
    parent.controller.evict_host(slots)


def test_a_forked_child_makes_and_uses_a_cache_of_its_own(parent, make_stack):
    def use():
        stack = make_stack(storage=True)
        host, rows = stack.written(3)
        signals = [HostSignal() for _ in range(2)]
        signals[0].fire()
        assert signals[0].synchronize(0)
        assert not signals[1].synchronize(0)
        assert stack.same(stack.loaded(host), rows)
        assert "was made before a fork" in in_child(stack.controller.poll_loads)
        return stack.controller.shutdown()

    assert in_child(use) == "returned True"


def test_a_forked_child_that_drops_everything_and_ends_leaves_the_parents_files_and_memory_alone(tmp_path):
    script = """
        import gc, os, signal, sys
        import torch
        from hicache_controller import Fingerprint, HiCacheController, UnifiedRadixCache
        from hicache_controller.storage.file import FileStorage
        from hicache_pools import ExtentAllocator, HostPoolGroup, MHATokenToKVPool, MHATokenToKVPoolHost, PoolEntry

        k, v = ([torch.randint(0, 256, (64, 2, 8), dtype=torch.uint8)] for _ in "kv")
        device_pool = MHATokenToKVPool.from_buffers(k=k, v=v, page_size=4)
        host_pool = MHATokenToKVPoolHost(device_pool, 2, 0, page_size=4, allocator_type="shared", pin_memory=False)
        pages = ExtentAllocator(16, 4)
        entry = PoolEntry("kv", host_pool, device_pool, lambda layer: layer, device_alloc_fn=pages.alloc,
                          device_free_fn=pages.free)
        controller = HiCacheController(HostPoolGroup([entry]))
        storage = FileStorage(sys.argv[1], fingerprint=Fingerprint("org/model", "abc"))
        controller.attach_storage_backend(storage)
        tree = UnifiedRadixCache(controller, pages, page_size=4)
        device, rows = pages.alloc(32), None
        rows = [each[0][device].clone() for each in (k, v)]
        host = controller.write(device, node_id=1)
        controller.start_writing()
        assert controller.poll_writes(wait=True)[0].error is None
        keys = [bytes([n]) * 16 for n in range(8)]
        controller.backup(host, keys, node_id=1)
        assert controller.poll_backups(wait=True)[0].error is None
        before = sorted(name for _, _, names in os.walk(sys.argv[1]) for name in names)
        if os.fork() == 0:
            signal.alarm(60)
            del tree, controller, storage, entry, host_pool, device_pool
            gc.collect()
            sys.exit(0)
        assert os.wait()[1] == 0, "the child hung or failed"
        assert sorted(name for _, _, names in os.walk(sys.argv[1]) for name in names) == before
        pages.free(device)
        for each in (k, v):
            each[0].zero_()
        device = controller.load(host, node_id=2)
        controller.start_loading()
        assert controller.poll_loads(wait=True)[0].error is None
        assert all(torch.equal(each[0][device], row) for each, row in zip((k, v), rows))
        assert storage.batch_get(keys, host) == [True] * 8
        assert controller.shutdown()
        storage.close()
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script), tmp_path / "pages"],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, b"")
