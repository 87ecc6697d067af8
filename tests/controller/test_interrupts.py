"""Ctrl-C between any two steps of a submission: it comes once all steps are done."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache_controller.devices import CpuDevice
from hicache_controller.interrupts import HeldInterrupts, interruptibly
from hicache_controller.transfer_engine import L2TransferEngine
from hicache_controller.transfer_handle import L2Transfer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_the_block_is_handled_when_it_is_left(number):
    seen, before = [], signal.getsignal(number)
    signal.signal(number, lambda *_: seen.append("handled"))
    try:
        with HeldInterrupts():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            seen.append("left")
        assert seen == ["left", "handled"]
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert seen == ["left", "handled", "handled"]
    finally:
        signal.signal(number, before)


def test_the_error_of_a_handler_comes_out_of_the_block_and_blocks_may_be_nested():
    left = []

    def block():
        with HeldInterrupts():
            with HeldInterrupts():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
            left.append("the inner one")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert left == ["the inner one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_signal_within_the_block_is_handled_though_the_first_handler_raises():
    seen, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: seen.append("SIGTERM"))

    def block():
        with HeldInterrupts():
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
                time.sleep(0.01)

    try:
        with pytest.raises(KeyboardInterrupt):
            block()
        assert seen == ["SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("waits", [False, True], ids=["in_the_block", "in_a_wait_within_it"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_that_is_installed_within_the_block_stays(number, waits):
    seen, before = [], signal.getsignal(number)

    def install():
        with HeldInterrupts():
            outer = signal.signal(number, lambda *_: seen.append("new"))
            assert callable(outer)

    try:
        signal.signal(number, lambda *_: seen.append("old"))
        with HeldInterrupts():
            interruptibly(install) if waits else install()
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert seen == ["new"]
        signal.signal(number, signal.SIG_IGN)
        with HeldInterrupts():
            signal.signal(number, signal.SIG_DFL)
        assert signal.getsignal(number) == signal.SIG_DFL
        with HeldInterrupts():
            signal.signal(number, signal.signal(number, signal.SIG_IGN))
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_wait_within_the_block_lets_interrupts_in_those_from_before_it_first():
    reached = []

    def interrupt(then):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        reached.append(then)

    def before_the_wait():
        with HeldInterrupts():
            interrupt("the wait")
            interruptibly(lambda: reached.append("waited"))

    def in_the_wait():
        with HeldInterrupts():
            interruptibly(lambda: interrupt("the end of the wait"))

    def after_the_wait():
        with HeldInterrupts():
            assert interruptibly(lambda: "what it waits for") == "what it waits for"
            interrupt("the end of the block")

    for block in (before_the_wait, in_the_wait, after_the_wait):
        with pytest.raises(KeyboardInterrupt):
            block()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert reached == ["the wait", "the end of the block"]


def test_a_block_within_a_wait_holds_interrupts_back_too():
    reached = []

    def wait():
        with HeldInterrupts():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            reached.append("the end of the inner block")
        reached.append("the end of the wait")

    def block():
        with HeldInterrupts():
            interruptibly(wait)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == ["the end of the inner block"]


def test_other_threads_and_signals_without_a_handler_are_left_alone(in_thread):
    handlers = []

    def look():
        with HeldInterrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    in_thread(look).join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with HeldInterrupts():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_at_the_end_of_one_block_takes_none_from_the_next(interrupted_at):
    def block():
        with HeldInterrupts():
            pass

    first, came = 0, True
    while came:
        first += 1
        came = interrupted_at(block, first)
        second = 0
        while interrupted_at(block, second := second + 1):
            pass
        assert second > 10
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert first > 10


def test_an_interrupt_at_any_line_of_an_inline_write_loses_nothing(make_stack, monkeypatch, interrupted_at):
    monkeypatch.setattr(CpuDevice, "moves_on_cpu", lambda *_: False)
    stack = make_stack(queue_inline=True)
    controller, nth, came = stack.controller, 0, True
    while came:
        nth += 3
        device = stack.alloc(2)
        rows, host = stack.compute(device), controller.write(device, node_id=nth)
        came = interrupted_at(controller.start_writing, nth)
        controller.check_integrity()
        controller.start_writing()
        (ack,) = controller.poll_writes(wait=True)
        assert ack.error is None
        controller.evict_device(device)
        assert stack.same(stack.loaded(host), rows)
        controller.evict_host(host)
    assert nth > 100
    assert stack.used() == (0, 0)


def test_an_interrupt_at_any_line_of_an_inline_load_loses_nothing(make_stack, monkeypatch, interrupted_at):
    monkeypatch.setattr(CpuDevice, "moves_on_cpu", lambda *_: False)
    stack = make_stack(queue_inline=True)
    controller, nth, came = stack.controller, 0, True
    host, rows = stack.written(2)
    while came:
        nth += 3
        device = controller.load(host, node_id=nth)
        came = interrupted_at(controller.start_loading, nth)
        controller.check_integrity()
        controller.start_loading()
        (ack,) = controller.poll_loads(wait=True)
        assert ack.error is None
        assert stack.same(stack.rows(device), rows)
        controller.evict_device(device)
    controller.evict_host(host)
    assert nth > 100
    assert stack.used() == (0, 0)


def test_an_interrupt_while_device_slots_wait_for_a_transfer_comes_once_they_are_free(make_stack, monkeypatch):
    stack = make_stack()
    controller, gate = stack.controller, stack.host_pool.write_gate
    gate.close()
    device = stack.alloc(2)
    rows, host = stack.compute(device), controller.write(device, node_id=1)
    controller.start_writing()
    gate.wait_entered()
    predecessors = controller.engine.predecessors

    def interrupted(uses):
        found = predecessors(uses)
        assert found.events
        os.kill(os.getpid(), signal.SIGINT)
        gate.open()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(controller.engine, "predecessors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            controller.evict_device(device)
    (ack,) = controller.poll_writes(wait=True)
    assert ack.error is None
    assert stack.same(stack.loaded(host), rows)
    controller.evict_host(host)
    assert stack.used() == (0, 0)


def test_what_an_interrupted_engine_has_begun_to_move_stays_in_flight(make_stack, monkeypatch, interrupted_at):
    monkeypatch.setattr(CpuDevice, "moves_on_cpu", lambda *_: False)
    stack = make_stack()
    moved, write_back = [], stack.host_pool.backup_from_device_all_layer
    monkeypatch.setattr(
        stack.host_pool, "backup_from_device_all_layer", lambda *given: moved.append(given) or write_back(*given)
    )
    engine, nth, came = L2TransferEngine("cpu", queue_inline=True), 0, True
    host, device = stack.group.alloc(2 * stack.page_size), stack.alloc(2)
    while came:
        nth += 3
        moved.clear()
        transfer = L2Transfer("kv", stack.host_pool, stack.device_pool, host, device, (0,))
        came = interrupted_at(lambda transfer=transfer: engine.submit_device_to_host([transfer]), nth)
        assert len(engine.in_flight) == len(moved)
        engine.in_flight.check_integrity()
        engine.reap()
        assert not engine.in_flight
    assert nth > 100
    assert engine.close(30)
    stack.group.free(host)


def test_tests_that_are_started_with_the_interrupt_ignored_can_be_interrupted() -> None:
    program = "import signal, tests.conftest; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    command = 'trap "" INT; exec "$0" -c "$1"'
    root = Path(__file__).parents[2]
    subprocess.run(["sh", "-c", command, sys.executable, program], cwd=root, check=True)
