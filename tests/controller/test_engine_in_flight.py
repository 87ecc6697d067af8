"""Slots in flight against a plain model, and the events under them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_controller.devices import CpuDevice, HostClock
from hicache_controller.events import COMPLETED, HostSignal, StreamSignal, wait_until_done
from hicache_controller.in_flight import Access, InFlight, PageUse, PoolSide, pages_of
from hicache_kernels import TransferResult

SIDES = [PoolSide("a", "host"), PoolSide("a", "device"), PoolSide("b", "host")]
uses = st.builds(
    lambda side, access, pages: PageUse(
        side, access, None if pages is None else np.array(sorted(pages), dtype=np.int64)
    ),
    st.sampled_from(SIDES),
    st.sampled_from(Access),
    st.none() | st.sets(st.integers(0, 20), max_size=6),
)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(uses, max_size=3)), max_size=12),
    uses,
    st.sets(st.sampled_from(Access), min_size=1),
)
def test_users_are_those_of_a_plain_model(steps, question, accesses):
    tracked: InFlight[int] = InFlight()
    model: dict[int, list[PageUse]] = {}
    for owner, owned in steps:
        if owner in model:
            tracked.remove(owner)
            del model[owner]
        else:
            tracked.add(owner, owned)
            model[owner] = owned
        tracked.check_integrity()

    def meets(use):
        if use.side != question.side or use.access not in accesses:
            return False
        if use.pages is None or question.pages is None:
            # What is not known may be anything, but nothing meets an operation without slots.
            other = question if use.pages is None else use
            return other.pages is None or len(other.pages) > 0
        return bool(set(use.pages.tolist()) & set(question.pages.tolist()))

    assert tracked.users(question, accesses) == [owner for owner, owned in model.items() if any(map(meets, owned))]
    if question.pages is not None:
        busy = [
            any(
                use.side == question.side and (use.pages is None or page in use.pages)
                for owned in model.values()
                for use in owned
            )
            for page in question.pages.tolist()
        ]
        assert tracked.busy(question.side, question.pages).tolist() == busy


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 5), st.sampled_from([torch.int64, torch.int32]))
def test_pages_of_slots_are_each_page_once(slots, page_size, dtype):
    pages = pages_of(torch.tensor(slots, dtype=dtype), page_size)
    if page_size == 1:
        assert sorted(pages.tolist()) == sorted(slots)
    else:
        assert sorted(pages.tolist()) == sorted({slot // page_size for slot in slots})


def test_whole_pages_keep_their_order():
    pages = torch.randperm(9)
    slots = (pages[:, None] * 4 + torch.arange(4)).reshape(-1)
    assert pages_of(slots, 4).tolist() == pages.tolist()


def test_an_operation_is_tracked_once():
    tracked: InFlight[str] = InFlight()
    tracked.add("a", [])
    with pytest.raises(ValueError, match="in flight already"):
        tracked.add("a", [])
    tracked.remove("b")
    assert tracked.owners() == ["a"]


def test_what_the_cpu_moves_itself_is_not_queued_inline(make_stack):
    stack = make_stack(queue_inline=True)
    gate = stack.host_pool.write_gate
    gate.close()
    stack.controller.write(stack.alloc(1), node_id=1)
    stack.controller.start_writing()
    gate.open()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert ack.error is None


def test_a_load_of_one_pool_can_be_one_call_with_an_event_a_layer(make_stack, monkeypatch):
    """What CUDA pools do, here with events that stand for those of the copy stream."""
    stack = make_stack()
    host, rows = stack.written(4)
    events = [HostSignal() for _ in range(3)]

    def load_all(device_pool, host_indices, device_indices, io_backend, *, layer_events):
        assert layer_events
        for layer in range(3):
            stack.host_pool.load_to_device_per_layer(device_pool, host_indices, device_indices, layer, io_backend)
        return TransferResult("staged", "", 0, 0, None, None, 0, tuple(events))

    monkeypatch.setattr(CpuDevice, "loads_whole_pools", True)
    monkeypatch.setattr(stack.host_pool, "load_to_device_all_layer", load_all)
    fired = []
    fire = HostSignal.fire

    def record(self, after=None):
        fired.append(after)
        fire(self)

    monkeypatch.setattr(HostSignal, "fire", record)
    device = stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    (ack,) = stack.controller.poll_loads(wait=True)
    assert ack.error is None
    assert fired[:3] == [(event,) for event in events]
    assert stack.same(stack.rows(device), rows)


class FakeCudaEvent:
    def __init__(self):
        self.come, self.waited = False, []

    def query(self):
        return self.come

    def wait(self, stream=None):
        self.waited.append(stream)

    def synchronize(self):
        self.come = True


def test_a_stream_signal_stands_for_the_events_it_was_first_fired_with():
    signal, events, late = StreamSignal(), [FakeCudaEvent(), FakeCudaEvent()], FakeCudaEvent()
    assert not signal.query()
    signal.fire(events)
    signal.fire([late])
    assert not signal.query()
    signal.wait()
    signal.wait("a stream")
    assert [event.waited for event in (*events, late)] == [[None, "a stream"]] * 2 + [[]]
    events[0].come = True
    assert not signal.query()
    signal.synchronize()
    assert signal.query()


def test_a_stream_signal_that_nobody_has_fired_holds_its_waiters(in_thread):
    signal, event = StreamSignal(), FakeCudaEvent()
    waiter = in_thread(signal.wait)
    waiter.join(0.05)
    assert waiter.is_alive()
    signal.fire([event])
    waiter.join()
    assert event.waited == [None]


def test_waiting_with_a_limit_tells_whether_the_event_has_come():
    event = FakeCudaEvent()
    assert not wait_until_done(event, 0)
    event.come = True
    assert wait_until_done(event, 0)
    assert wait_until_done(COMPLETED, 0)
    assert not wait_until_done(HostSignal(), 0)


def test_an_interrupted_submission_gives_its_slots_back_by_way_of_the_ack(make_stack, monkeypatch):
    stack = make_stack()
    device = stack.alloc(2)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stack.controller.engine, "submit", interrupted)
        stack.controller.write(device, node_id=1)
        with pytest.raises(KeyboardInterrupt):
            stack.controller.start_writing()
    (ack,) = stack.controller.poll_writes()
    assert isinstance(ack.error, KeyboardInterrupt)
    assert stack.used() == (2, 0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("direction", ["write", "load"])
def test_who_sees_that_a_transfer_is_over_finds_it_timed_and_counted(make_stack, monkeypatch, direction, fails):
    """Another thread may be looking, at the very moment its last event fires."""
    stack = make_stack()
    host, _ = stack.written(4)
    stopped, seen = [], []
    stop, fire = HostClock.stop, HostSignal.fire
    metrics = stack.controller.metrics

    def note(self, after=None):
        counts = metrics.snapshot().counters.get("transfer_operations", {})
        seen.append((len(stopped), sum(counts.values())))
        fire(self, after)

    def refuse(*arguments, **options):
        raise RuntimeError("no")

    call = "backup_from_device_all_layer" if direction == "write" else "load_to_device_per_layer"
    if fails:
        monkeypatch.setattr(stack.host_pool, call, refuse)
    monkeypatch.setattr(HostClock, "stop", lambda self, events: (stop(self, events), stopped.append(self)))
    monkeypatch.setattr(HostSignal, "fire", note)
    before = sum(metrics.snapshot().counters["transfer_operations"].values())
    if direction == "write":
        stack.controller.write(stack.alloc(4), node_id=1)
        stack.controller.start_writing()
        (ack,) = stack.controller.poll_writes(wait=True)
    else:
        stack.controller.load(host, node_id=1)
        stack.controller.start_loading()
        (ack,) = stack.controller.poll_loads(wait=True)
    assert (ack.error is None) is not fails
    # The last two events are the ends of the operation; a load's layers fire before.
    assert [clocks for clocks, _ in seen[-2:]] == [0 if fails else 1] * 2
    if not fails:
        assert {count for _, count in seen[-2:]} == {seen[-1][1]}
        assert seen[-1][1] > before


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pages_stay_what_they_were_when_the_index_tensor_changes(page_size, dtype):
    slots = torch.arange(8, 16, dtype=dtype)
    pages = pages_of(slots, page_size)
    slots += 8
    assert pages.tolist() == list(range(8 // page_size, 16 // page_size))
