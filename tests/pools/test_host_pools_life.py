"""The life of a host pool: destroyed, dropped, forked, ended with its process, used from many threads."""

import gc
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from hicache_pools import HostPoolGroup, PoolEntry, PoolTransfer


def test_a_destroyed_pool_says_so_and_can_be_destroyed_again(bench, case_name):
    device_pool, pool = bench.make(case_name)
    slots = torch.arange(pool.size)
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    pool.destroy()
    pool.destroy()
    for use in (
        lambda: pool.alloc(pool.page_size),
        lambda: pool.alloc_pages(1),
        lambda: pool.backup_from_device_all_layer(device_pool, slots, slots),
        lambda: pool.load_to_device_per_layer(device_pool, slots, slots, 0),
        lambda: pool.load_to_device_all_layer(device_pool, slots, slots),
        lambda: pool.read_page(0),
        lambda: pool.page_memory(0),
        lambda: pool.write_page(0, torch.zeros(pool.page_bytes, dtype=torch.uint8)),
        lambda: pool.buffer,
        lambda: pool.transfer,
        lambda: pool.capabilities(),
        lambda: pool.component_view(pool.geometry.components[0].name),
    ):
        with pytest.raises(RuntimeError, match=f"this {type(pool).__name__} has been destroyed"):
            use()


class Event:
    """An event that is done once a test says so."""

    def __init__(self):
        self.done = threading.Event()

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        assert self.done.wait(30)


def test_destroy_waits_for_transfers_in_flight(bench, monkeypatch):
    from dataclasses import replace

    device_pool, pool = bench.make("mha")
    slots = torch.arange(pool.size)
    released, ready = Event(), Event()
    write_back = pool.transfer.write_back
    monkeypatch.setattr(
        pool.transfer,
        "write_back",
        lambda *args, **options: replace(write_back(*args, **options), device_released=released, host_ready=ready),
    )
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    buffer = pool.buffer
    expected = buffer.clone()
    destroyed = threading.Event()
    thread = threading.Thread(target=lambda: (pool.destroy(), destroyed.set()))
    thread.start()
    released.done.set()
    while not pool._gate.closed:
        pass
    assert not destroyed.is_set()
    assert torch.equal(buffer, expected)
    ready.done.set()
    thread.join(30)
    assert destroyed.is_set()


def test_destroy_waits_for_a_call_under_way(bench, monkeypatch):
    device_pool, pool = bench.make("mha")
    slots = torch.arange(pool.size)
    inside, go_on = threading.Event(), threading.Event()
    write_back = pool.transfer.write_back

    def slow(*args, **options):
        inside.set()
        assert go_on.wait(30)
        return write_back(*args, **options)

    monkeypatch.setattr(pool.transfer, "write_back", slow)
    results = []
    writer = threading.Thread(
        target=lambda: results.append(pool.backup_from_device_all_layer(device_pool, slots, slots))
    )
    writer.start()
    assert inside.wait(30)
    destroyer = threading.Thread(target=pool.destroy)
    destroyer.start()
    while not pool._gate.closed:
        pass
    assert destroyer.is_alive()
    go_on.set()
    for thread in (writer, destroyer):
        thread.join(30)
        assert not thread.is_alive()
    assert results[0].bytes == pool.page_num * pool.page_bytes


def test_results_that_are_done_are_not_kept(bench, monkeypatch):
    from dataclasses import replace

    device_pool, pool = bench.make("mha")
    slots = torch.arange(pool.size)
    event = Event()
    event.done.set()
    write_back = pool.transfer.write_back
    monkeypatch.setattr(
        pool.transfer, "write_back", lambda *args, **options: replace(write_back(*args, **options), host_ready=event)
    )
    for _ in range(20):
        pool.backup_from_device_all_layer(device_pool, slots, slots)
    assert len(pool._gate._results) == 1


def test_a_pool_that_is_dropped_gives_its_memory_back(bench):
    import weakref

    _, pool = bench.make("mha")
    memory = weakref.ref(pool.host_buffer)
    del pool
    gc.collect()
    assert memory() is None


def test_eight_threads_move_pages_of_one_pool_without_mixing_them(bench, case_name):
    device_pool, pool = bench.make(case_name, pages=16)
    before = bench.cases[case_name].rows(device_pool)
    errors = []

    def move(thread):
        try:
            pages = torch.tensor([2 * thread, 2 * thread + 1])
            slots = bench.slots(pages, pool.page_size)
            for _ in range(10):
                host = pool.alloc(2 * pool.page_size)
                pool.backup_from_device_all_layer(device_pool, host, slots)
                for layer in range(pool.layer_num):
                    pool.load_to_device_per_layer(device_pool, host, slots, layer)
                pool.free(host)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=move, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert bench.same(bench.cases[case_name].rows(device_pool), before)
    assert pool.available_size() == pool.size


def test_a_pool_that_cannot_be_finished_gives_its_memory_back(bench, monkeypatch):
    import hicache_pools.host_pools.base as base

    made = []
    allocate = base.allocate_pool_buffer
    monkeypatch.setattr(base, "allocate_pool_buffer", lambda *a, **o: made.append(allocate(*a, **o)) or made[-1])
    monkeypatch.setattr(base, "pool_staging", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        bench.make("mha")
    assert [buffer.closed for buffer in made] == [True]


def use_until_destroyed(group, device_pool, started, errors):
    """Take, move, write, resolve and give back, until the pool refuses; keeps what it refused with."""
    pool = group.get_pool()
    device_slots = torch.arange(pool.page_size)
    started.wait()
    try:
        while True:
            host_slots = group.alloc(pool.page_size)
            if host_slots is None:
                continue
            pool.backup_from_device_all_layer(device_pool, host_slots, device_slots)
            pool.load_to_device_per_layer(device_pool, host_slots, device_slots, 1)
            page = int(host_slots[0]) // pool.page_size
            pool.write_page(page, pool.read_page(page))
            transfers = [PoolTransfer("kv", device_indices=device_slots)]
            if group.resolve_host_transfers(transfers) is not None:
                group.release_transfers(transfers)
            group.free(host_slots)
    except Exception as error:
        errors.append(error)


def test_three_threads_destroy_a_pool_that_eight_use_and_none_sees_half_of_it(bench):
    for _ in range(10):
        device_pool, pool = bench.make("mha", pages=16)
        group = HostPoolGroup([PoolEntry("kv", pool, device_pool, lambda layer: layer)])
        started, errors = threading.Barrier(9), []
        users = [
            threading.Thread(target=use_until_destroyed, args=(group, device_pool, started, errors), daemon=True)
            for _ in range(8)
        ]
        for thread in users:
            thread.start()
        started.wait()
        destroyers = [threading.Thread(target=pool.destroy, daemon=True) for _ in range(3)]
        for thread in destroyers:
            thread.start()
        for thread in (*destroyers, *users):
            thread.join(30)
            assert not thread.is_alive()
        assert len(errors) == 8, errors
        assert all("has been destroyed" in str(error) for error in errors), errors


def test_a_forked_child_destroys_its_copy_and_leaves_the_parents_pool_alone():
    run_to_its_end(
        """
        import os, signal, threading

        class Runtime:
            def register(self, address, nbytes): return 0
            def unregister(self, address): print("unregister", os.getpid() == parent, flush=True); return 0
            def device_address(self, address): return 0, address

        def try_it(allocator_type):
            options = HostMemoryOptions(runtime=Runtime())
            pool = MHATokenToKVPoolHost(
                device_pool, 1.0, 0, 16, allocator_type=allocator_type, memory_options=options
            )
            slots = torch.arange(64)
            inside, go_on = threading.Event(), threading.Event()
            write_back = pool.transfer.write_back

            def slow(*args, **options):
                inside.set()
                go_on.wait()
                return write_back(*args, **options)

            pool.transfer.write_back = slow
            writer = threading.Thread(target=lambda: pool.backup_from_device_all_layer(device_pool, slots, slots))
            writer.start()
            inside.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # A child that waits for its parent's thread would wait for ever.
                pool.destroy()
                pool.destroy()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            go_on.set()
            writer.join()
            assert torch.equal(pool.k_data_refs[1], device_pool.k_buffer[1])
            pool.destroy()

        parent = os.getpid()
        try_it("default")
        try_it("shared")
        """,
        expected=["unregister", "True"] * 2,
    )


def test_a_process_ends_well_while_a_thread_of_it_moves_pages():
    run_to_its_end(
        """
        import threading

        pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16)
        slots, moved = torch.arange(64), threading.Event()

        def move():
            try:
                while True:
                    pool.backup_from_device_all_layer(device_pool, slots, slots)
                    moved.set()
            except RuntimeError as error:
                assert "has been destroyed" in str(error)

        threads = [threading.Thread(target=move, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        moved.wait()
        """,
        expected=[],
    )


def run_to_its_end(program, expected):
    """Run a program with a device pool of ones in a process of its own; it ends with 0 and prints what is expected."""
    start = """
        import torch
        from hicache_pools import HostMemoryOptions, MHATokenToKVPool, MHATokenToKVPoolHost

        device_pool = MHATokenToKVPool(64, 16, torch.float32, 2, 8, 2)
        for tensor in device_pool.k_buffer + device_pool.v_buffer:
            tensor.fill_(1)
    """
    code = textwrap.dedent(start) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, expected), done.stderr


def test_a_call_that_an_interrupt_ends_does_not_keep_its_thread_from_destroying_the_pool(bench):
    device_pool, pool = bench.make("mha")
    slots = torch.arange(pool.size)
    gate = pool._gate
    gate.__enter__()  # as where an interrupt comes before the call is inside
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    gate.__enter__()
    pool.destroy()
    assert pool._gate.closed
