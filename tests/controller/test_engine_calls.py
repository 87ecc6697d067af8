"""The seam to the engine: one thread, errors of callbacks at the end, interrupts held back meanwhile."""

import logging
import os
import signal
import threading
import time

import pytest

from hicache_controller import UnifiedRadixCache
from hicache_controller.engine_calls import EngineCalls
from hicache_controller.interrupts import interruptibly


def public_call(method):
    def call(self, *arguments):
        with self.engine_calls:
            return method(self, *arguments)

    return call


class Cache:
    """Something with public calls, one of which calls another."""

    def __init__(self, calls=None):
        self.engine_calls = calls or EngineCalls("cache")
        self.done = []

    def callback(self, step):
        self.done.append(step)
        raise ValueError(f"step {step}")

    @public_call
    def poll(self, steps):
        for step in steps:
            assert self.engine_calls.call(self.callback, step) is None
        self.engine_calls.raise_first()
        return "result"

    @public_call
    def poll_twice(self):
        assert self.poll([1]) == "result"
        assert self.poll([2]) == "result"
        self.done.append("end")
        return "both"

    @public_call
    def wrong(self, error):
        self.engine_calls.call(self.callback, 1)
        raise error

    @public_call
    def interrupted(self, wait):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        self.done.append("held back")
        if wait:
            interruptibly(lambda: None)
            self.done.append("not reached")


def test_every_step_is_done_the_first_error_is_raised_and_others_are_logged(caplog):
    cache = Cache()
    with pytest.raises(ValueError, match="step 1"):
        cache.poll([1, 2, 3])
    assert cache.done == [1, 2, 3]
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [message.partition("with ")[2] for message in logged] == ["ValueError('step 2')", "ValueError('step 3')"]
    assert cache.poll([]) == "result"


def test_only_the_outermost_call_raises_what_callbacks_raised():
    cache = Cache()
    with pytest.raises(ValueError, match="step 1"):
        cache.poll_twice()
    assert cache.done == [1, 2, "end"]
    tree = Cache(cache.engine_calls)
    with tree.engine_calls:
        assert cache.poll([]) == "result"


def test_the_error_of_the_call_itself_comes_out_where_no_callback_raised():
    calls = EngineCalls("cache")
    with pytest.raises(KeyError), calls:
        raise KeyError
    with pytest.raises(ValueError, match="step 1"):
        Cache(calls).wrong(KeyError())


def test_an_interrupt_of_a_wait_is_not_lost_to_the_error_of_a_callback(caplog):
    calls = EngineCalls("cache")
    with pytest.raises(KeyboardInterrupt):
        Cache(calls).wrong(KeyboardInterrupt())
    assert "ValueError('step 1')" in caplog.text
    with calls:
        pass


@pytest.mark.parametrize("wait", [False, True])
def test_interrupts_come_at_the_end_or_while_a_call_waits(wait):
    cache = Cache()
    with pytest.raises(KeyboardInterrupt):
        cache.interrupted(wait)
    assert cache.done == ["held back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert cache.poll([]) == "result"


def test_an_interrupt_at_any_line_leaves_the_seam_as_it_was(interrupted_at):
    cache, nth = Cache(), 1
    while interrupted_at(lambda: cache.poll([]), nth):
        with pytest.raises(ValueError, match="step 1"):
            cache.poll([1])
        nth += 1
    assert nth > 10


def test_the_first_call_binds_the_thread_and_another_learns_how_to_take_over(in_thread):
    cache = Cache()
    in_thread(lambda: cache.poll([])).join()

    def from_another():
        for call in (lambda: cache.poll([1]), cache.engine_calls.check_thread):
            with pytest.raises(RuntimeError) as raised:
                call()
            message = str(raised.value)
            assert threading.current_thread().name in message
            assert bound.name in message
            assert "adopt_thread" in message

    cache = Cache()
    bound = in_thread(lambda: cache.poll([]))
    bound.join()
    from_another()
    assert cache.done == []
    cache.engine_calls.adopt_thread()
    assert cache.poll([]) == "result"


def test_no_thread_takes_over_from_one_that_is_in_a_call(in_thread):
    calls, began, end = EngineCalls("cache"), threading.Event(), threading.Event()

    def call():
        with calls:
            began.set()
            assert end.wait(30)

    thread = in_thread(call)
    assert began.wait(30)
    with pytest.raises(RuntimeError, match="is in a call of"):
        calls.adopt_thread()
    end.set()
    thread.join()
    calls.adopt_thread()
    with calls:
        pass


def test_waits_for_storage_share_a_bound_within_one_public_call(make_stack):
    stack = make_stack()
    calls, storage = stack.controller.engine_calls, stack.controller.storage

    def bound(timeout=None):
        with storage.one_call(timeout) as found:
            return found

    with calls:
        first, longer = bound(), bound(30)
        with calls:
            assert bound() is first
        assert longer is not bound() is first
    with calls:
        assert bound() is not first
    assert bound() is not bound()
    with storage.one_call(30) as around:
        with calls:
            assert bound() is around
        assert bound() is around


def test_a_poll_of_nothing_ends_before_anything_is_held(make_stack, monkeypatch):
    stack = make_stack()
    cache = UnifiedRadixCache(stack.controller, stack.allocator, page_size=stack.page_size)
    device = stack.alloc(1)
    stack.controller.write(device, node_id=1)

    def enter(calls):
        raise AssertionError("a call began")

    with monkeypatch.context() as patch:
        patch.setattr(EngineCalls, "__enter__", enter)
        for poll in (cache.poll, stack.controller.start_writing):
            with pytest.raises(AssertionError, match="a call began"):
                poll()
    stack.controller.start_writing()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert ack.error is None
    monkeypatch.setattr(EngineCalls, "__enter__", enter)
    for wait in (False, True):
        assert cache.poll(wait=wait) is False
        assert stack.controller.poll_writes(wait) == stack.controller.poll_loads(wait) == []
    assert stack.controller.start_writing() is None
