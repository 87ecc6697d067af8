"""Workers and devices: the order of jobs, what runs inline, closing, errors, and what the CPU moves itself."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from hicache_controller.devices import CpuDevice, CudaDevice, make_devices
from hicache_controller.events import COMPLETED, HostSignal, StreamSignal
from hicache_controller.worker import Worker, WorkerStoppedError


class Recorder:
    def __init__(self, log, name, gate=None, pages=0):
        self.log, self.name, self.gate, self.pages = log, name, gate, pages
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


def test_a_worker_runs_jobs_in_order_after_their_events():
    log, first, second = [], HostSignal(), HostSignal()
    worker = Worker("worker", CpuDevice())
    jobs = [Recorder(log, number) for number in range(3)]
    worker.submit(jobs[0], [first, COMPLETED])
    worker.submit(jobs[1], [])
    worker.submit(jobs[2], [second, first])
    assert log == []
    first.fire()
    jobs[1].ended.wait()
    assert log == [0, 1]
    second.fire()
    jobs[2].ended.wait()
    assert log == [0, 1, 2]
    assert worker.close(30)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_raises_no_exception_does_not_end_its_worker(caplog):
    class Cancelled(Recorder):
        def run(self):
            super().run()
            raise asyncio.CancelledError

    log, worker = [], Worker("worker", CpuDevice())
    worker.submit(Cancelled(log, 0), [])
    following = Recorder(log, 1)
    worker.submit(following, [])
    assert following.ended.wait(30)
    assert log == [0, 1]
    assert worker.close(30)
    assert "not an Exception" in caplog.text


def test_a_closing_worker_ends_the_running_job_and_abandons_the_rest():
    log, gate, never = [], threading.Event(), HostSignal()
    worker = Worker("worker", CpuDevice())
    running, waiting, queued = Recorder(log, "running", gate), Recorder(log, "waiting"), Recorder(log, "queued")
    worker.submit(running, [])
    worker.submit(waiting, [never])
    worker.submit(queued, [])
    running.entered.wait()
    assert not worker.close(0)
    gate.set()
    assert worker.close(30)
    assert log == ["running"]
    late = Recorder(log, "late")
    worker.submit(late, [])
    assert all(isinstance(job.error, WorkerStoppedError) for job in (waiting, queued, late))


@pytest.mark.parametrize("inline", [False, True])
def test_a_job_that_comes_while_a_worker_stops_does_not_hide_the_one_that_runs(busy, inline):
    busy.worker.stop()
    late = Recorder(busy.log, "late")
    assert not busy.worker.submit(late, inline=inline)
    assert isinstance(late.error, WorkerStoppedError)
    assert not busy.worker.drain(0.01)
    busy.gate.set()
    assert busy.worker.drain(30)
    assert busy.log == ["running"]


def test_an_inline_job_that_needs_no_waiting_runs_in_the_submitting_thread():
    log, storage, queued = [], HostSignal(), StreamSignal()
    queued.fire([])
    worker = Worker("worker", CpuDevice())
    jobs = [Recorder(log, number) for number in range(4)]
    worker.submit(jobs[0], [COMPLETED, queued], inline=True)
    assert log == [0]
    assert jobs[0].thread is threading.current_thread()
    worker.submit(jobs[1], [storage], inline=True)
    worker.submit(jobs[2], [], inline=True)
    assert log == [0]
    storage.fire()
    jobs[2].ended.wait()
    assert log == [0, 1, 2]
    assert jobs[2].thread is jobs[1].thread is not threading.current_thread()
    assert worker.close(30)
    worker.submit(jobs[3], [], inline=True)
    assert isinstance(jobs[3].error, WorkerStoppedError)


def test_an_inline_job_after_work_that_is_not_queued_waits_on_the_thread():
    log, unqueued = [], StreamSignal()
    worker = Worker("worker", CpuDevice())
    job = Recorder(log, "job")
    worker.submit(job, [COMPLETED, unqueued], inline=True)
    assert log == []
    unqueued.fire([])
    job.ended.wait()
    assert job.thread is not threading.current_thread()
    assert worker.close(30)


def test_inline_jobs_run_one_at_a_time(in_thread):
    log, gate = [], threading.Event()
    worker = Worker("worker", CpuDevice())
    first, second = Recorder(log, "first", gate), Recorder(log, "second")
    submitter = in_thread(lambda: worker.submit(first, [], inline=True))
    first.entered.wait()
    worker.submit(second, [], inline=True)
    assert not worker.close(0.05)
    assert log == []
    gate.set()
    submitter.join()
    assert worker.close(30)
    assert log == ["first"]
    assert isinstance(second.error, WorkerStoppedError)


@pytest.mark.parametrize("inline", [False, True])
def test_an_event_that_raises_abandons_its_job_and_no_other(inline):
    class Faulty(CpuDevice):
        def order(self, event, timeout):
            if event is faulty:
                raise RuntimeError("an illegal memory access")
            return super().order(event, timeout)

    log, faulty = [], StreamSignal()
    faulty.fire([])
    worker = Worker("worker", Faulty())
    first, second = Recorder(log, "first"), Recorder(log, "second")
    worker.submit(first, [faulty], inline=inline)
    worker.submit(second, [COMPLETED], inline=inline)
    first.ended.wait()
    second.ended.wait()
    assert str(first.error) == "an illegal memory access"
    assert log == ["second"]
    assert worker.close(30)


@pytest.fixture
def busy():
    """A worker with room for three pages that runs a job until its gate is set."""
    log, gate = [], threading.Event()
    worker = Worker("worker", CpuDevice(), max_pages=3)
    running = Recorder(log, "running", gate, pages=8)
    assert worker.submit(running)
    assert running.entered.wait(30)
    yield SimpleNamespace(worker=worker, log=log, gate=gate)
    gate.set()
    assert worker.close(30)


def test_a_full_queue_refuses_a_job_and_leaves_it_alone(busy):
    first, second = Recorder(busy.log, "first", pages=2), Recorder(busy.log, "second", pages=2)
    assert busy.worker.submit(first)
    assert busy.worker.depth == 2
    assert not busy.worker.submit(second)
    assert not busy.worker.submit(second, timeout=0.01)
    assert (busy.worker.depth, second.error) == (2, None)
    assert busy.worker.submit(Recorder(busy.log, "third", pages=1))
    busy.gate.set()
    assert busy.worker.drain(30)
    assert busy.log == ["running", "first", "third"]
    assert busy.worker.depth == 0


def test_one_job_of_any_size_may_wait(busy):
    assert busy.worker.submit(Recorder(busy.log, "large", pages=100))
    assert not busy.worker.submit(Recorder(busy.log, "small", pages=0))


def test_a_job_waits_for_room_in_the_queue(busy, in_thread):
    assert busy.worker.submit(Recorder(busy.log, "first", pages=3))
    accepted = []
    thread = in_thread(lambda: accepted.append(busy.worker.submit(Recorder(busy.log, 2, pages=3), timeout=30)))
    busy.gate.set()
    thread.join()
    assert accepted == [True]
    assert busy.worker.drain(30)
    assert busy.log == ["running", "first", 2]


def test_a_job_that_waits_for_room_is_abandoned_when_the_worker_stops(busy, in_thread):
    assert busy.worker.submit(Recorder(busy.log, "first", pages=3))
    late, accepted = Recorder(busy.log, "late", pages=3), []
    thread = in_thread(lambda: accepted.append(busy.worker.submit(late, timeout=30)))
    busy.worker.stop()
    thread.join()
    assert accepted == [False]
    assert isinstance(late.error, WorkerStoppedError)


def test_a_withdrawn_job_never_runs_and_makes_room(busy):
    first, second = Recorder(busy.log, "first", pages=2), Recorder(busy.log, "second", pages=3)
    assert busy.worker.submit(first)
    assert busy.worker.withdraw(first)
    assert not busy.worker.withdraw(first)
    assert busy.worker.depth == 0
    assert busy.worker.submit(second)
    busy.gate.set()
    assert busy.worker.drain(30)
    assert not busy.worker.withdraw(second)
    assert busy.log == ["running", "second"]
    assert first.error is None


def test_draining_waits_for_the_running_job(busy):
    assert not busy.worker.drain(0.01)
    busy.gate.set()
    assert busy.worker.drain(30)
    assert busy.log == ["running"]


def test_a_synchronous_worker_is_done_when_submit_returns():
    log = []
    worker = Worker("worker", CpuDevice(synchronous=True), synchronous=True)
    worker.submit(Recorder(log, 1), [COMPLETED])
    assert log == [1]
    worker.close(0)
    late = Recorder(log, 2)
    worker.submit(late, [])
    assert isinstance(late.error, WorkerStoppedError)


def test_only_cpu_pools_complete_synchronously():
    with pytest.raises(ValueError, match="synchronous is True with pools on cuda"):
        make_devices(torch.device("cuda"), synchronous=True)


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
    device = CudaDevice(torch.device("cuda"))
    device.before_transfer([part(staged=True), part(staged=staged, direct=direct, **options), part()])
    assert device.stream.waits == int(on_cpu)


def test_a_pool_whose_direct_path_is_forbidden_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    warned = set()
    devices = [CudaDevice(torch.device("cuda"), warned) for _ in range(2)]
    for device in devices * 2:
        device.before_transfer([part("kv", block_quota=0), part("swa", io_backend="direct"), part("no", direct=False)])
    assert [record.args for record in caplog.records] == [("kv", "kernel", 0), ("swa", "direct", None)]
    assert [device.stream.waits for device in devices] == [2, 2]
