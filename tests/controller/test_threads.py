"""The thread that calls a controller: bound by the first call, moved by adopt_thread, checked by every call."""

import threading

import pytest

CALLS = {
    "write": lambda stack, host: stack.controller.write(stack.alloc(1), node_id=1),
    "start_writing": lambda stack, host: stack.controller.start_writing(),
    "poll_writes": lambda stack, host: stack.controller.poll_writes(),
    "load": lambda stack, host: stack.controller.load(host, node_id=1),
    "start_loading": lambda stack, host: stack.controller.start_loading(),
    "poll_loads": lambda stack, host: stack.controller.poll_loads(),
    "cancel_write": lambda stack, host: stack.controller.cancel_write(1),
    "cancel_load": lambda stack, host: stack.controller.cancel_load(1),
    "evict_device": lambda stack, host: stack.controller.evict_device(stack.alloc(1)),
    "evict_host": lambda stack, host: stack.controller.evict_host(host),
    "storage_exists": lambda stack, host: stack.controller.storage_exists(stack.keys(1)),
    "storage_restorable_lengths": lambda stack, host: stack.controller.storage_restorable_lengths(stack.keys(1)),
    "backup": lambda stack, host: stack.controller.backup(host, stack.keys(2), node_id=1),
    "cancel_backup": lambda stack, host: stack.controller.cancel_backup(1),
    "poll_backups": lambda stack, host: stack.controller.poll_backups(),
    "prefetch": lambda stack, host: stack.controller.prefetch(host, stack.keys(2), request_id="r"),
    "detach_storage_backend": lambda stack, host: stack.controller.detach_storage_backend(),
    "attach_storage_backend": lambda stack, host: stack.controller.attach_storage_backend(stack.storage),
    "add_entry": lambda stack, host: stack.controller.add_entry(stack.entry),
    "quiesce": lambda stack, host: stack.controller.quiesce(),
    "reset": lambda stack, host: stack.controller.reset(),
    "check_integrity": lambda stack, host: stack.controller.check_integrity(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_another_thread_is_refused_and_names_both(make_stack, in_thread, name):
    stack = make_stack(storage=True)
    host, _ = stack.written(2)
    used = stack.used()

    def call():
        with pytest.raises(RuntimeError, match=r"only one thread may: call adopt_thread\(\)") as raised:
            CALLS[name](stack, host)
        assert repr(threading.current_thread().name) in str(raised.value)
        assert repr(threading.main_thread().name) in str(raised.value)

    in_thread(call).join()
    assert stack.used()[1] == used[1]
    assert stack.controller.start_writing() is None
    assert stack.controller.start_loading() == -1


def test_making_a_controller_binds_no_thread_and_the_first_call_binds_its_own(make_stack, in_thread):
    stack = make_stack()
    in_thread(lambda: stack.written(1)).join()
    with pytest.raises(RuntimeError, match="adopt_thread"):
        stack.controller.poll_writes()
    stack.controller.adopt_thread()
    host, rows = stack.written(1)
    assert stack.same(stack.loaded(host), rows)


def test_another_thread_may_wait_for_layers_read_metrics_and_shut_down(make_stack, in_thread):
    stack = make_stack()
    host, _ = stack.written(2)
    stack.controller.load(host, node_id=1)
    counter, consumer = stack.controller.layer_done_counter, stack.controller.start_loading()

    def forward_pass():
        counter.set_consumer(consumer)
        for layer in range(3):
            counter.wait_until(layer)
        assert stack.controller.metrics.snapshot().total("transfer_operations") > 0

    in_thread(forward_pass).join()
    in_thread(lambda: stack.controller.shutdown(30)).join()
    assert [ack.node_ids for ack in stack.controller.poll_loads()] == [(1,)]


def test_a_thread_takes_over_only_between_calls(make_stack, in_thread):
    stack = make_stack()
    refused = []

    def alloc(slots):
        def adopt():
            with pytest.raises(RuntimeError, match="is in a call of"):
                stack.controller.adopt_thread()
            refused.append(slots)

        in_thread(adopt).join()
        return stack.allocator.alloc(slots)

    host, rows = stack.written(1)
    stack.entry.device_alloc_fn = alloc
    assert stack.same(stack.loaded(host), rows)
    assert refused == [4]
