"""Any sequence of operations, faults, cancels and evictions: no slot is lost or used twice, no wrong byte loads."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hicache_controller.storage_settings import StorageSettings

DEVICE_PAGES, HOST_PAGES = 12, 10


class Written:
    """Pages on the host, and what their rows are; without ``host`` where they are not there yet, or not any more.

    Rules put one into the bundle whatever comes of it: what is drawn must not depend on how far the threads are.
    """

    def __init__(self, host=None, rows=None, keys=None):
        self.host, self.rows, self.keys = host, rows, keys


class ControllerMachine(RuleBasedStateMachine):
    """The model is what the caller owns: device slots it holds, host slots of acked writes, and their bytes."""

    make_stack = None
    synchronous = False

    on_host = Bundle("on_host")

    def __init__(self):
        super().__init__()
        self.stack = self.make_stack(
            device_pages=DEVICE_PAGES,
            host_pages=HOST_PAGES,
            storage=True,
            storage_settings=StorageSettings(batch_pages=2, retry_seconds=0, backup_retries=1),
            synchronous=self.synchronous,
        )
        self.controller = self.stack.controller
        self.next_node = 0
        self.writes, self.loads, self.backups = {}, {}, {}
        self.prefetches = []
        self.host_owned, self.device_owned = 0, 0
        self.alive, self.reclaim_fails = [], False
        self.stack.entry.host_evict_fn = self.reclaim

    def reclaim(self, slots):
        """What a tree does when the host is short: evict the oldest, even if something still reads it."""
        while slots > 0 and self.alive:
            entry = self.alive.pop(0)
            slots -= len(entry.host)
            self.controller.evict_host(entry.host)
            self.host_owned -= len(entry.host) // 4
            entry.host = None
            if self.reclaim_fails:
                raise RuntimeError("injected")

    def keep(self, entry):
        self.alive.append(entry)
        return entry

    @rule(fails=st.booleans())
    def fault_in_reclaim(self, fails):
        self.reclaim_fails = fails

    def open_gates(self):
        """Before whatever may block this thread."""
        for gate in self.stack.gates:
            gate.open()

    def node(self):
        self.next_node += 1
        return self.next_node

    @rule(target=on_host, pages=st.integers(1, 4))
    def write(self, pages):
        device = self.stack.allocator.alloc(pages * 4)
        if device is None:
            return Written()
        rows = self.stack.compute(device)
        node = self.node()
        host = self.controller.write(device, node_id=node)
        if host is None:
            self.stack.allocator.free(device)
            return Written()
        entry = Written(rows=rows)
        self.writes[node] = (device, host, entry)
        self.device_owned += pages
        self.host_owned += pages
        return entry

    @rule()
    def start_writing(self):
        self.controller.start_writing()

    @rule()
    def start_loading(self):
        self.controller.start_loading()

    @rule(entry=on_host, first=st.integers(0, 3))
    def load(self, entry, first):
        if entry.host is None:
            return
        start = first * 4 % len(entry.host)
        node = self.node()
        device = self.controller.load(entry.host[start:], node_id=node)
        if device is not None:
            self.loads[node] = (device, [rows[start:] for rows in entry.rows])
            self.device_owned += len(device) // 4

    @rule(wait=st.booleans())
    def poll_writes(self, wait):
        if wait:
            self.open_gates()
        for ack in self.controller.poll_writes(wait=wait):
            for node in ack.node_ids:
                device, host, entry = self.writes.pop(node)
                self.controller.evict_device(device)
                self.device_owned -= len(device) // 4
                if ack.error is None:
                    entry.host = host
                    self.keep(entry)
                else:
                    self.host_owned -= len(host) // 4

    @rule(wait=st.booleans())
    def poll_loads(self, wait):
        if wait:
            self.open_gates()
        for ack in self.controller.poll_loads(wait=wait):
            for node in ack.node_ids:
                device, rows = self.loads.pop(node)
                if ack.error is None:
                    assert self.stack.same(self.stack.rows(device), rows)
                    self.controller.evict_device(device)
                self.device_owned -= len(device) // 4

    @rule(which=st.integers(0, 59))
    def cancel(self, which):
        nodes = sorted([*self.writes, *self.loads])
        if not nodes:
            return
        node = nodes[which % len(nodes)]
        self.open_gates()
        if node in self.writes:
            device, host, _ = self.writes.pop(node)
            assert self.controller.cancel_write(node)
            self.controller.evict_device(device)
            self.device_owned -= len(device) // 4
            self.host_owned -= len(host) // 4
        else:
            device, _ = self.loads.pop(node)
            assert self.controller.cancel_load(node)
            self.device_owned -= len(device) // 4

    @rule(entry=consumes(on_host))
    def evict(self, entry):
        if entry.host is None:
            return
        self.alive.remove(entry)
        self.controller.evict_host(entry.host)
        self.host_owned -= len(entry.host) // 4

    @rule(target=on_host, entry=consumes(on_host))
    def evict_tail(self, entry):
        if entry.host is None or len(entry.host) == 4:
            return entry
        self.alive.remove(entry)
        self.controller.evict_host(entry.host[4:])
        self.host_owned -= len(entry.host) // 4 - 1
        return self.keep(Written(entry.host[:4], [rows[:4] for rows in entry.rows], entry.keys and entry.keys[:1]))

    @rule(entry=on_host)
    def backup(self, entry):
        if entry.host is None:
            return
        entry.keys = entry.keys or self.stack.keys(len(entry.host) // 4)
        node = self.node()
        self.backups[node] = len(entry.keys)
        self.controller.backup(entry.host, entry.keys, node_id=node)

    @rule(wait=st.booleans())
    def poll_backups(self, wait):
        if wait:
            self.open_gates()
        for ack in self.controller.poll_backups(wait=wait):
            pages = self.backups.pop(ack.node_id)
            assert ack.stored_pages <= pages
            assert (ack.error is None) == (ack.stored_pages == pages)

    @rule(entry=on_host, cancel=st.booleans())
    def prefetch(self, entry, cancel):
        if entry.keys is None:
            return
        host = self.stack.group.alloc(len(entry.keys) * 4)
        operation = self.controller.prefetch(host, entry.keys, request_id="r")
        if host is not None:
            self.host_owned += len(host) // 4
            self.prefetches.append((operation, host, entry.rows, entry.keys))
        if cancel:
            operation.cancel()

    @rule(target=on_host)
    def finish_prefetch(self):
        if not self.prefetches:
            return Written()
        self.open_gates()
        operation, host, rows, keys = self.prefetches.pop(0)
        pages = operation.wait()
        if pages * 4 < len(host):
            self.controller.evict_host(host[pages * 4 :])
            self.host_owned -= len(host) // 4 - pages
        if not pages:
            return Written()
        return self.keep(Written(host[: pages * 4], [each[: pages * 4] for each in rows], keys[:pages]))

    @rule(which=st.integers(0, 6))
    def hold(self, which):
        """Keep the windows of the hazards open for as long as the rules like."""
        if not self.synchronous and self.stack.gates[which] is not self.stack.storage.exists_gate:
            self.stack.gates[which].close()

    @rule()
    def release(self):
        self.open_gates()

    @rule(which=st.integers(0, 6), count=st.integers(1, 2))
    def fault(self, which, count):
        self.stack.gates[which].failures = count

    @rule()
    def reattach(self):
        self.open_gates()
        for operation, *_ in self.prefetches:
            operation.host_ready.synchronize()
        assert self.controller.detach_storage_backend() is self.stack.storage
        self.controller.attach_storage_backend(self.stack.storage)

    @invariant()
    def integrity_holds(self):
        self.stack.check_integrity()

    def teardown(self):
        self.open_gates()
        for gate in self.stack.gates:
            gate.failures = 0
        self.controller.start_writing()
        self.controller.start_loading()
        while self.writes:
            self.poll_writes(wait=True)
        while self.loads:
            self.poll_loads(wait=True)
        while self.backups:
            self.poll_backups(wait=True)
        for operation, *_ in self.prefetches:
            operation.wait()
        self.controller.engine.drain()
        self.controller.poll_writes()
        self.controller.poll_loads()
        self.controller.poll_backups()
        assert len(self.controller.engine.in_flight) == 0
        assert self.stack.used() == (self.device_owned, self.host_owned)
        assert self.controller.shutdown()
        assert self.stack.used() == (self.device_owned, self.host_owned)


@pytest.mark.parametrize("synchronous", [False, True])
def test_no_sequence_of_operations_loses_a_slot_or_loads_a_wrong_byte(make_stack, synchronous):
    machine = type(
        "Machine", (ControllerMachine,), {"make_stack": staticmethod(make_stack), "synchronous": synchronous}
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[
                HealthCheck.function_scoped_fixture,
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
            ],
        ),
    )
