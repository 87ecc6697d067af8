"""Transfers that fail: their acks, what follows them, and what is logged."""

import itertools
import logging

import pytest

from hicache_controller import layer_done
from hicache_controller.events import COMPLETED, HostSignal
from hicache_controller.layer_done import LayerDoneCounter
from hicache_controller.operations import SourceFailedError


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_failed_write_gives_its_host_slots_back_and_tells(make_stack, synchronous):
    stack = make_stack(synchronous=synchronous)
    device = stack.alloc(4)
    rows = stack.compute(device)
    stack.host_pool.write_gate.failures = 1
    stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert "injected" in str(ack.error)
    assert ack.device_released.query()
    assert ack.host_ready.query()
    assert stack.used() == (4, 0)
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    assert stack.controller.poll_writes(wait=True)[0].error is None
    assert stack.same(stack.loaded(host), rows)
    assert stack.controller.metrics.snapshot().total("transfer_failures", direction="write_back") == 1


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_load_that_fails_in_the_middle_is_not_marked_loaded(make_stack, layer, synchronous):
    stack = make_stack(synchronous=synchronous)
    host, rows = stack.written(4)
    stack.host_pool.load_gates[layer].failures = 1
    stack.controller.load(host, node_id=1)
    counter = stack.controller.layer_done_counter
    counter.set_consumer(stack.controller.start_loading())
    with pytest.raises(RuntimeError, match=r"layer 2 failed: injected"):
        counter.wait_until(2)
    (ack,) = stack.controller.poll_loads(wait=True)
    assert "injected" in str(ack.error)
    assert stack.used() == (0, 4)
    with pytest.raises(RuntimeError, match=r"layer 0 failed: injected"):
        counter.wait_until(0)
    assert stack.same(stack.loaded(host), rows)


def test_failed_loads_are_reported_until_reset_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(layer_done, "_MAX_FAILURES", 3)
    counter = LayerDoneCounter(1)
    consumers = [counter.register([COMPLETED], lambda: None) for _ in range(6)]
    for consumer in consumers:
        counter.forget(consumer, None if consumer in (1, 4) else RuntimeError(f"reason {consumer}"))
    for consumer in (2, 3, 5):
        counter.set_consumer([4, consumer])
        with pytest.raises(RuntimeError, match=f"layer 0 failed: reason {consumer}"):
            counter.wait_until(0)
    counter.set_consumer(4)
    counter.wait_until(0)
    counter.set_consumer(0)
    with pytest.raises(RuntimeError, match="load 0 of layer 0 is too old to tell"):
        counter.wait_until(0)
    counter.reset()
    counter.set_consumer(consumers)
    counter.wait_until(0)


def test_a_submission_that_fails_is_an_ack_with_an_error(make_stack, monkeypatch):
    stack = make_stack()
    host, rows = stack.written(2)

    def broken(*args, **kwargs):
        raise MemoryError("no room for a pointer table")

    with monkeypatch.context() as patch:
        patch.setattr(stack.controller.engine, "submit", broken)
        stack.controller.load(host, node_id=1)
        counter = stack.controller.layer_done_counter
        counter.set_consumer(stack.controller.start_loading())
        with pytest.raises(RuntimeError, match="no room"):
            counter.wait_until(0)
        assert isinstance(stack.controller.poll_loads()[0].error, MemoryError)
        device = stack.alloc(1)
        stack.controller.write(device, node_id=2)
        assert isinstance(stack.controller.start_writing().error, MemoryError)
        assert isinstance(stack.controller.poll_writes()[0].error, MemoryError)
    assert stack.used() == (1, 2)
    assert stack.same(stack.loaded(host), rows)


@pytest.mark.parametrize("direction", ["write", "load"])
def test_what_cannot_be_queued_takes_no_slots(make_stack, monkeypatch, direction):
    stack = make_stack()
    controller = stack.controller
    host, _ = stack.written(2)
    device = stack.alloc(2)
    used = stack.used()

    class Broken(list):
        """A list that cannot grow."""

        def append(self, operation):
            raise MemoryError("injected")

    monkeypatch.setattr(controller._writes if direction == "write" else controller._loads, "waiting", Broken())
    with pytest.raises(MemoryError, match="injected"):
        controller.write(device, node_id=1) if direction == "write" else controller.load(host, node_id=1)
    monkeypatch.undo()
    assert stack.used() == used
    assert controller.start_writing() is None
    assert controller.start_loading() == -1
    controller.check_integrity()


@pytest.mark.parametrize("known", [False, True], ids=["while_it_waits", "when_it_is_queued"])
def test_a_load_after_a_write_that_fails_fails_too(make_stack, known):
    stack = make_stack()
    device = stack.alloc(2)
    gate = stack.host_pool.write_gate
    gate.failures = 1
    gate.close()
    host = stack.controller.write(device, node_id=1)
    ack = stack.controller.start_writing()
    if known:
        gate.open()
        ack.host_ready.synchronize()
        stack.controller.engine.reap()
    target = stack.controller.load(host, node_id=2)
    before = stack.rows(target)
    counter = stack.controller.layer_done_counter
    counter.set_consumer(stack.controller.start_loading())
    gate.open()
    with pytest.raises(RuntimeError, match="write-back of its bytes failed: injected"):
        counter.wait_until(0)
    assert [ack.error is None for ack in stack.controller.poll_writes(wait=True)] == [False]
    (ack,) = stack.controller.poll_loads(wait=True)
    assert isinstance(ack.error, SourceFailedError)
    assert "injected" in str(ack.error)
    assert stack.same(stack.rows(target), before)
    assert stack.used() == (2, 0)


def test_a_load_after_a_write_that_is_cancelled_fails(make_stack):
    stack = make_stack()
    gate = stack.host_pool.write_gate
    gate.close()
    stack.controller.write(stack.alloc(1), node_id=0)
    stack.controller.start_writing()
    gate.wait_entered()
    host = stack.controller.write(stack.alloc(2), node_id=1)
    stack.controller.start_writing()
    stack.controller.load(host, node_id=2)
    stack.controller.start_loading()
    assert stack.controller.cancel_write(1)
    gate.open()
    (ack,) = stack.controller.poll_loads(wait=True)
    assert "the write was cancelled" in str(ack.error)


@pytest.mark.parametrize("known", [False, True], ids=["while_it_waits", "when_it_is_queued"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_backup_after_a_write_that_fails_stores_nothing(make_stack, synchronous, known):
    stack = make_stack(storage=True, synchronous=synchronous)
    stack.host_pool.write_gate.failures = 1
    host, keys = stack.controller.write(stack.alloc(2), node_id=1), stack.keys(2)
    if known:
        stack.controller.start_writing().host_ready.synchronize()
        stack.controller.engine.reap()
    stack.controller.backup(host, keys, node_id=3)
    (ack,) = stack.controller.poll_backups(wait=True)
    assert ack.node_id == 3
    assert ack.stored_pages == 0
    assert "write-back of its bytes failed: injected" in str(ack.error)
    assert "injected" in str(stack.controller.poll_writes(wait=True)[0].error)
    assert stack.controller.storage_exists(keys) == 0


def test_a_write_after_a_load_that_fails_fails_too(make_stack):
    stack = make_stack()
    host, _ = stack.written(2)
    gate = stack.host_pool.load_gates[1]
    gate.failures = 1
    gate.close()
    device = stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    other = stack.alloc(1)
    rows = stack.compute(other)
    stack.controller.write(device, node_id=2)
    stack.controller.start_writing()
    kept = stack.controller.write(other, node_id=3)
    stack.controller.start_writing()
    gate.open()
    assert "injected" in str(stack.controller.poll_loads(wait=True)[0].error)
    acks = []
    while len(acks) < 2:
        acks += stack.controller.poll_writes(wait=True)
    assert "load of its bytes failed: injected" in str(acks[0].error)
    assert acks[1].error is None
    assert stack.same(stack.loaded(kept), rows)


def test_what_overwrites_the_slots_of_a_failed_transfer_is_not_its_reader(make_stack):
    stack = make_stack(storage=True)
    host, _ = stack.written(2)
    keys = stack.keys(2)
    stack.controller.backup(host, keys, node_id=0)
    assert stack.controller.poll_backups(wait=True)[0].error is None
    stack.controller.evict_host(host)
    gate = stack.host_pool.write_gate
    gate.failures = 1
    gate.close()
    slots = stack.controller.write(stack.alloc(2), node_id=1)
    stack.controller.start_writing()
    operation = stack.controller.prefetch(slots, keys, request_id="a")
    gate.open()
    assert operation.wait() in (0, 1, 2)
    assert operation.error is None
    assert stack.controller.poll_writes(wait=True)[0].error is not None


def test_the_first_failure_of_each_direction_and_kind_is_a_warning(make_stack, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="hicache_controller.failure_log")
    stack = make_stack()
    host, _ = stack.written(1)
    device = stack.alloc(1)

    def write():
        stack.controller.write(device, node_id=1)
        stack.controller.start_writing()
        assert stack.controller.poll_writes(wait=True)[0].error is not None

    def load():
        stack.controller.load(host, node_id=2)
        stack.controller.start_loading()
        assert stack.controller.poll_loads(wait=True)[0].error is not None

    def broken(*args, **kwargs):
        raise MemoryError("no room for a pointer table")

    stack.host_pool.write_gate.failures = stack.host_pool.load_gates[0].failures = 3
    for _ in range(3):
        write()
        load()
    with monkeypatch.context() as patch:
        patch.setattr(stack.controller.engine, "submit", broken)
        write()
        write()
    logged = [(record.levelname, record.getMessage().partition(";")[0]) for record in caplog.records]
    injected = [f"a {direction} failed with InjectedError('injected')" for direction in ("write-back", "load")]
    assert logged == [
        *(("WARNING", message) for message in injected),
        *(("DEBUG", message) for message in injected * 2),
        ("WARNING", "a write-back failed with MemoryError('no room for a pointer table')"),
        ("DEBUG", "a write-back failed with MemoryError('no room for a pointer table')"),
    ]
    assert all(record.exc_info for record in caplog.records)


def test_cancelled_transfers_are_no_failures_to_log(make_stack, caplog):
    stack = make_stack()
    gate = stack.host_pool.write_gate
    gate.close()
    for node in (1, 2):
        stack.controller.write(stack.alloc(1), node_id=node)
        stack.controller.start_writing()
    gate.wait_entered()
    assert stack.controller.cancel_write(2)
    gate.open()
    stack.controller.engine.drain()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Raising:
    """A callback that raises once, at its nth call, and does its work at the others."""

    def __init__(self, function, nth=1):
        self.function, self.left = function, nth

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("injected by the engine")
        return self.function(*args)


def test_a_poll_that_waits_goes_on_past_what_was_cancelled(make_stack, monkeypatch):
    stack = make_stack()
    controller, gate, ready = stack.controller, stack.host_pool.write_gate, HostSignal()
    gate.close()
    controller.write(stack.alloc(1), node_id=1)
    controller.start_writing()
    gate.wait_entered()
    controller.write(stack.alloc(1), node_id=2, ready_event=ready)
    controller.start_writing()
    assert controller.cancel_write(1)
    release = controller.engine.release

    def released(handle):
        ready.fire()
        release(handle)

    monkeypatch.setattr(controller.engine, "release", released)
    gate.open()
    assert [ack.node_ids for ack in controller.poll_writes(wait=True)] == [(2,)]


@pytest.mark.parametrize("merged", [False, True])
def test_a_poll_takes_everything_in_though_giving_slots_back_raises(make_stack, merged):
    stack = make_stack()
    controller, free = stack.controller, stack.allocator.free
    hosts = [stack.written(1)[0] for _ in range(3)]
    stack.host_pool.load_gates[0].failures = 4 if merged else 3  # all at once, then each by itself
    for node, host in enumerate(hosts):
        controller.load(host, node_id=node)
        if not merged:
            controller.start_loading()
    controller.start_loading()
    controller.engine.drain()
    stack.entry.device_free_fn = Raising(free)
    with pytest.raises(MemoryError, match="injected by the engine"):
        controller.poll_loads()
    assert not controller.engine.in_flight
    assert stack.used() == (1, 3)
    acks = controller.poll_loads()
    assert [node for ack in acks for node in ack.node_ids] == [0, 1, 2]
    assert all("injected" in str(ack.error) for ack in acks)
    assert controller.poll_loads() == []


@pytest.mark.parametrize("raising", [False, True])
def test_a_rank_on_which_giving_slots_back_raises_asks_the_others_as_often(make_stack, monkeypatch, raising):
    stack = make_stack()
    controller = stack.controller
    asked = []

    class OneAtATime:
        """Another rank, on which one operation more is done each time."""

        needed = True

        def smallest(self, values):
            asked.append(len(values))
            return [min(value, 1) for value in values]

    monkeypatch.setattr(controller._loads, "_agreement", OneAtATime())
    hosts = [stack.written(1)[0] for _ in range(2)]
    devices = []
    for node, host in enumerate(hosts):
        devices.append(controller.load(host, node_id=node))
        controller.start_loading()
    controller.engine.drain()
    assert controller.cancel_load(0)
    if raising:
        stack.entry.device_free_fn = Raising(stack.allocator.free)
        with pytest.raises(MemoryError):
            controller.poll_loads(wait=True)
    else:
        assert [ack.node_ids for ack in controller.poll_loads(wait=True)] == [(1,)]
    assert asked == [1, 1, 1, 1]
    assert [ack.node_ids for ack in controller.poll_loads(wait=True)] == ([(1,)] if raising else [])
    assert asked == [1, 1, 1, 1]
    controller.evict_device(devices[1])


def test_a_shutdown_in_which_giving_slots_back_raises_ends_all_the_same(make_stack):
    stack = make_stack()
    controller, workers = stack.controller, stack.controller.engine._workers.values()
    hosts = [stack.written(1)[0] for _ in range(2)]
    for node, host in enumerate(hosts):
        controller.load(host, node_id=node)
    stack.entry.device_free_fn = Raising(stack.allocator.free)
    with pytest.raises(MemoryError, match="injected by the engine"):
        controller.shutdown(30)
    assert not any(worker._thread.is_alive() for worker in workers)
    assert stack.used() == (1, 2)
    assert controller.shutdown(30)


def test_a_shutdown_tells_again_that_something_has_not_ended(make_stack):
    stack = make_stack()
    controller, gate = stack.controller, stack.host_pool.write_gate
    gate.close()
    controller.write(stack.alloc(1), node_id=1)
    controller.start_writing()
    gate.wait_entered()
    assert not controller.shutdown(0.01)
    assert not controller.shutdown(0.01)
    gate.open()
    assert controller.shutdown(30)
    assert controller.shutdown(30)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_write_that_fails_does_not_fail_those_it_was_merged_with(make_stack, synchronous, bad):
    stack = make_stack(synchronous=synchronous)
    devices = [stack.alloc(pages) for pages in (2, 1, 3)]
    rows = [stack.compute(device) for device in devices]
    hosts = [stack.controller.write(device, node_id=node) for node, device in enumerate(devices)]
    stack.host_pool.bad = {int(hosts[bad][-1])}
    stack.controller.start_writing()
    acks = []
    while sum(len(ack.node_ids) for ack in acks) < 3:
        acks += stack.controller.poll_writes(wait=True)
    good = [node for node in range(3) if node != bad]
    assert {ack.node_ids: str(ack.error) for ack in acks} == {tuple(good): "None", (bad,): "these slots are bad"}
    assert stack.used() == (6, 6 - len(hosts[bad]) // stack.page_size)
    stack.host_pool.bad = set()
    for node in good:
        assert stack.same(stack.loaded(hosts[node]), rows[node])
    with pytest.raises(ValueError, match="free already"):
        stack.controller.load(hosts[bad], node_id=9)
    assert stack.controller.metrics.snapshot().total("transfer_failures", direction="write_back") == 1


def test_merged_writes_that_had_to_be_repeated_are_counted(make_stack, monkeypatch):
    stack = make_stack()
    devices = [stack.alloc(pages) for pages in (2, 1)]
    rows = [stack.compute(device) for device in devices]
    hosts = [stack.controller.write(device, node_id=node) for node, device in enumerate(devices)]
    write_back, calls = stack.host_pool.backup_from_device_all_layer, itertools.count()

    def fails_once(*arguments, **options):
        if next(calls) == 0:
            raise RuntimeError("only now")
        return write_back(*arguments, **options)

    monkeypatch.setattr(stack.host_pool, "backup_from_device_all_layer", fails_once)
    stack.controller.start_writing()
    assert [ack.error for ack in stack.controller.poll_writes(wait=True)] == [None]
    for host, expected in zip(hosts, rows, strict=True):
        assert stack.same(stack.loaded(host), expected)
    assert stack.controller.metrics.snapshot().total("transfer_failures", direction="write_back") == 1


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_load_that_fails_does_not_fail_those_it_was_merged_with(make_stack, synchronous, layer):
    stack = make_stack(synchronous=synchronous)
    written = [stack.written(pages) for pages in (1, 2, 3)]
    stack.host_pool.bad, stack.host_pool.bad_from = set(written[1][0].tolist()), layer
    devices = [stack.controller.load(host, node_id=node) for node, (host, _) in enumerate(written)]
    counter = stack.controller.layer_done_counter
    counter.set_consumer(stack.controller.start_loading())
    # The consumer is that of all three, so it is not for the forward pass to say whose rows are there.
    with pytest.raises(RuntimeError, match="layer 2 failed: these slots are bad"):
        counter.wait_until(2)
    acks = stack.controller.poll_loads(wait=True)
    assert {ack.node_ids: str(ack.error) for ack in acks} == {(0, 2): "None", (1,): "these slots are bad"}
    assert stack.used() == (4, 6)
    for node in (0, 2):
        assert stack.same(stack.rows(devices[node]), written[node][1])


@pytest.mark.parametrize("known", [False, True], ids=["while_it_waits", "when_it_is_queued"])
def test_of_merged_loads_those_fail_whose_write_has_failed(make_stack, known):
    stack = make_stack(storage=True)
    gate = stack.host_pool.write_gate
    gate.close()
    devices = [stack.alloc(2), stack.alloc(1)]
    rows = [stack.compute(device) for device in devices]
    good, bad = (stack.controller.write(device, node_id=node) for node, device in enumerate(devices))
    stack.host_pool.bad = set(bad.tolist())
    ack = stack.controller.start_writing()
    if known:
        gate.open()
        ack.host_ready.synchronize()
    targets = [stack.controller.load(host, node_id=node) for node, host in ((2, bad), (3, good))]
    stack.controller.start_loading()
    keys = stack.keys(3)
    stack.controller.backup(good, keys[:2], node_id=4)
    stack.controller.backup(bad, keys[2:], node_id=5)
    gate.open()
    acks = stack.controller.poll_loads(wait=True)
    assert {ack.node_ids: type(ack.error) for ack in acks} == {(2,): SourceFailedError, (3,): type(None)}
    assert stack.same(stack.rows(targets[1]), rows[0])
    stored = []
    while len(stored) < 2:
        stored += stack.controller.poll_backups(wait=True)
    assert [(ack.node_id, ack.stored_pages, type(ack.error)) for ack in stored] == [
        (4, 2, type(None)),
        (5, 0, SourceFailedError),
    ]
    assert {ack.node_ids: ack.error is None for ack in stack.controller.poll_writes()} == {(0,): True, (1,): False}


def test_an_operation_that_cannot_be_started_does_not_fail_those_it_was_merged_with(make_stack, monkeypatch):
    stack = make_stack()
    devices = [stack.alloc(1) for _ in range(3)]
    rows = [stack.compute(device) for device in devices]
    hosts = [stack.controller.write(device, node_id=node) for node, device in enumerate(devices)]
    make = stack.controller._plan.transfers

    def broken(operation):
        if operation.node_ids == (0,):
            raise ValueError("released meanwhile")
        return make(operation)

    with monkeypatch.context() as patch:
        patch.setattr(stack.controller._plan, "transfers", broken)
        stack.controller.start_writing()
    acks = stack.controller.poll_writes(wait=True)
    assert {ack.node_ids: str(ack.error) for ack in acks} == {(0,): "released meanwhile", (1, 2): "None"}
    assert stack.used() == (3, 2)
    for node in (1, 2):
        assert stack.same(stack.loaded(hosts[node]), rows[node])


@pytest.mark.parametrize("parts", [2, 3], ids=["as_many", "more"])
def test_what_fails_on_another_rank_fails_alone_if_the_ranks_merged_as_many(make_stack, monkeypatch, parts):
    stack = make_stack()
    controller = stack.controller
    hosts = [stack.written(1)[0] for _ in range(2)]

    class OtherRank:
        """Another rank, on which the second of its ``parts`` loads has failed."""

        needed = True

        def __init__(self):
            self.others = iter(([1], [0], [parts, -parts], [1, 0]))

        def smallest(self, values):
            return [min(pair) for pair in zip(values, next(self.others), strict=True)]

    monkeypatch.setattr(controller._loads, "_agreement", OtherRank())
    for node, host in enumerate(hosts):
        controller.load(host, node_id=node)
    controller.start_loading()
    controller.engine.drain()
    acks = controller.poll_loads()
    elsewhere = "the transfer failed on another rank"
    if parts == 2:
        assert {ack.node_ids: str(ack.error) for ack in acks} == {(0,): "None", (1,): elsewhere}
        assert stack.used() == (1, 2)
    else:
        assert {ack.node_ids: str(ack.error) for ack in acks} == {(0, 1): elsewhere}
        assert stack.used() == (0, 2)
