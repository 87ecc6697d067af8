"""Slots in flight against a plain model, and the events and lanes under them."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_controller.events import COMPLETED, EventGroup, HostSignal, StreamSignal, wait_until_done
from hicache_controller.in_flight import Access, InFlight, Place, Side, Use, page_granules
from hicache_controller.lanes import (
    CpuDevice,
    CudaDevice,
    HostClock,
    InlineLane,
    LanePair,
    LaneStoppedError,
    ThreadLane,
    runs_on_cpu,
)
from hicache_kernels import TransferResult

PLACES = [Place("a", Side.HOST), Place("a", Side.DEVICE), Place("b", Side.HOST)]
uses = st.builds(
    lambda place, access, pages: Use(place, access, None if pages is None else np.array(sorted(pages), dtype=np.int64)),
    st.sampled_from(PLACES),
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
    model: dict[int, list[Use]] = {}
    for owner, owned in steps:
        if owner in model:
            tracked.remove(owner)
            del model[owner]
        else:
            tracked.add(owner, owned)
            model[owner] = owned
        tracked.check_integrity()

    def meets(use):
        if use.place != question.place or use.access not in accesses:
            return False
        if use.granules is None or question.granules is None:
            # What is not known may be anything, but nothing meets an operation without slots.
            other = question if use.granules is None else use
            return other.granules is None or len(other.granules) > 0
        return bool(set(use.granules.tolist()) & set(question.granules.tolist()))

    assert tracked.users(question, accesses) == [owner for owner, owned in model.items() if any(map(meets, owned))]
    if question.granules is not None:
        busy = [
            any(
                use.place == question.place and (use.granules is None or page in use.granules)
                for owned in model.values()
                for use in owned
            )
            for page in question.granules.tolist()
        ]
        assert tracked.busy(question.place, question.granules).tolist() == busy


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 5), st.sampled_from([torch.int64, torch.int32]))
def test_pages_of_slots_are_each_page_once(slots, page_size, dtype):
    pages = page_granules(torch.tensor(slots, dtype=dtype), page_size)
    if page_size == 1:
        assert sorted(pages.tolist()) == sorted(slots)
    else:
        assert sorted(pages.tolist()) == sorted({slot // page_size for slot in slots})


def test_whole_pages_keep_their_order():
    pages = torch.randperm(9)
    slots = (pages[:, None] * 4 + torch.arange(4)).reshape(-1)
    assert page_granules(slots, 4).tolist() == pages.tolist()


def test_an_operation_is_tracked_once():
    tracked: InFlight[str] = InFlight()
    tracked.add("a", [])
    with pytest.raises(ValueError, match="in flight already"):
        tracked.add("a", [])
    tracked.remove("b")
    assert tracked.owners() == ["a"]


class Recorder:
    def __init__(self, log, name, gate=None):
        self.log, self.name, self.gate = log, name, gate
        self.error = self.thread = None
        self.entered = threading.Event()
        self.ended = threading.Event()

    def run(self):
        self.thread = threading.current_thread()
        self.entered.set()
        if self.gate is not None:
            self.gate.wait()
        self.log.append(self.name)
        self.ended.set()

    def abandon(self, error):
        self.error = error
        self.ended.set()


def test_a_thread_lane_runs_jobs_in_order_behind_their_events():
    log, first, second = [], HostSignal(), HostSignal()
    lane = ThreadLane(CpuDevice(), "lane")
    jobs = [Recorder(log, number) for number in range(3)]
    lane.submit(jobs[0], [first, COMPLETED])
    lane.submit(jobs[1], [])
    lane.submit(jobs[2], [EventGroup([second, first])])
    assert log == []
    first.fire()
    jobs[1].ended.wait()
    assert log == [0, 1]
    second.fire()
    jobs[2].ended.wait()
    assert log == [0, 1, 2]
    assert lane.close(30)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_ends_with_what_is_no_exception_does_not_end_its_lane(caplog):
    class Cancelled(Recorder):
        def run(self):
            super().run()
            raise asyncio.CancelledError

    log, lane = [], ThreadLane(CpuDevice(), "lane")
    lane.submit(Cancelled(log, 0), [])
    behind = Recorder(log, 1)
    lane.submit(behind, [])
    assert behind.ended.wait(30)
    assert log == [0, 1]
    assert lane.close(30)
    assert "no Exception" in caplog.text


def test_a_closing_lane_ends_the_running_job_and_abandons_the_rest():
    log, gate, never = [], threading.Event(), HostSignal()
    lane = ThreadLane(CpuDevice(), "lane")
    running, waiting, queued = Recorder(log, "running", gate), Recorder(log, "waiting"), Recorder(log, "queued")
    lane.submit(running, [])
    lane.submit(waiting, [never])
    lane.submit(queued, [])
    running.entered.wait()
    assert not lane.close(0)
    gate.set()
    assert lane.close(30)
    assert log == ["running"]
    late = Recorder(log, "late")
    lane.submit(late, [])
    assert all(isinstance(job.error, LaneStoppedError) for job in (waiting, queued, late))


def test_an_inline_thread_lane_runs_what_needs_no_waiting_in_the_submitting_thread():
    log, storage, queued = [], HostSignal(), StreamSignal()
    queued.fire([])
    lane = ThreadLane(CpuDevice(), "lane")
    jobs = [Recorder(log, number) for number in range(4)]
    lane.submit(jobs[0], [COMPLETED, queued], inline=True)
    assert log == [0]
    assert jobs[0].thread is threading.current_thread()
    lane.submit(jobs[1], [storage], inline=True)
    lane.submit(jobs[2], [], inline=True)
    assert log == [0]
    storage.fire()
    jobs[2].ended.wait()
    assert log == [0, 1, 2]
    assert jobs[2].thread is jobs[1].thread is not threading.current_thread()
    assert lane.close(30)
    lane.submit(jobs[3], [], inline=True)
    assert isinstance(jobs[3].error, LaneStoppedError)


def test_an_inline_thread_lane_leaves_it_to_its_thread_to_wait_for_what_is_not_queued():
    log, unqueued = [], StreamSignal()
    lane = ThreadLane(CpuDevice(), "lane")
    job = Recorder(log, "job")
    lane.submit(job, [EventGroup([COMPLETED, unqueued])], inline=True)
    assert log == []
    unqueued.fire([])
    job.ended.wait()
    assert job.thread is not threading.current_thread()
    assert lane.close(30)


def test_jobs_of_an_inline_thread_lane_run_one_at_a_time(in_thread):
    log, gate = [], threading.Event()
    lane = ThreadLane(CpuDevice(), "lane")
    first, second = Recorder(log, "first", gate), Recorder(log, "second")
    submitter = in_thread(lambda: lane.submit(first, [], inline=True))
    first.entered.wait()
    lane.submit(second, [], inline=True)
    assert not lane.close(0.05)
    assert log == []
    gate.set()
    submitter.join()
    assert lane.close(30)
    assert log == ["first"]
    assert isinstance(second.error, LaneStoppedError)


@pytest.mark.parametrize("inline", [False, True])
def test_an_event_that_raises_abandons_its_job_and_no_other(inline):
    class Faulty(CpuDevice):
        def order(self, event):
            if event is faulty:
                raise RuntimeError("an illegal memory access")

    log, faulty = [], FakeCudaEvent()
    lane = ThreadLane(Faulty(), "lane")
    first, second = Recorder(log, "first"), Recorder(log, "second")
    lane.submit(first, [faulty], inline=inline)
    lane.submit(second, [COMPLETED], inline=inline)
    first.ended.wait()
    second.ended.wait()
    assert str(first.error) == "an illegal memory access"
    assert log == ["second"]
    assert lane.close(30)


def test_what_the_cpu_moves_itself_is_not_queued_inline(make_stack):
    stack = make_stack(queue_inline=True)
    gate = stack.host_pool.write_gate
    gate.close()
    stack.controller.write(stack.alloc(1), node_id=1)
    stack.controller.start_writing()
    gate.open()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert ack.error is None


def test_an_inline_lane_is_done_when_submit_returns():
    log = []
    lane = InlineLane(CpuDevice())
    lane.submit(Recorder(log, 1), [COMPLETED])
    assert log == [1]
    lane.close(0)
    late = Recorder(log, 2)
    lane.submit(late, [])
    assert isinstance(late.error, LaneStoppedError)


def test_only_cpu_pools_complete_synchronously():
    with pytest.raises(ValueError, match="synchronous is True with pools on cuda"):
        LanePair(torch.device("cuda"), synchronous=True)


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
        patch.setattr(stack.controller.engine, "submit_device_to_host", interrupted)
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
    pages = page_granules(slots, page_size)
    slots += 8
    assert pages.tolist() == list(range(8 // page_size, 16 // page_size))


class Stream:
    """Stand-in for a CUDA stream that counts how often it was waited for."""

    def __init__(self, device):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


def part(name="kv", *, staged=False, direct=True, io_backend="kernel", block_quota=None):
    pool = SimpleNamespace(can_use_write_back_jit=staged, capabilities=lambda: SimpleNamespace(direct=direct))
    return SimpleNamespace(name=name, host_pool=pool, io_backend=io_backend, block_quota=block_quota)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
@pytest.mark.parametrize("block_quota", [None, 0, 2])
def test_the_cpu_waits_for_the_stream_where_it_moves_rows_itself(monkeypatch, staged, direct, io_backend, block_quota):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    forbidden = io_backend == "direct" or block_quota == 0
    on_cpu = not staged and (forbidden or not direct)
    options = {"io_backend": io_backend, "block_quota": block_quota}
    assert runs_on_cpu(staged=staged, direct=direct, **options) is on_cpu
    device = CudaDevice(torch.device("cuda"))
    device.before_transfer([part(staged=True), part(staged=staged, direct=direct, **options), part()])
    assert device.stream.waits == int(on_cpu)


def test_a_pool_whose_direct_path_is_forbidden_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    told = set()
    devices = [CudaDevice(torch.device("cuda"), told) for _ in range(2)]
    for device in devices * 2:
        device.before_transfer([part("kv", block_quota=0), part("swa", io_backend="direct"), part("no", direct=False)])
    assert [record.args for record in caplog.records] == [("kv", "kernel", 0), ("swa", "direct", None)]
    assert [device.stream.waits for device in devices] == [2, 2]
