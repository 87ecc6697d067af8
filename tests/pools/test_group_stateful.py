"""HostPoolGroup against a model of plain sets, with failing pools and misbehaving callbacks; and from 8 threads."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_pools import NullPoolHost
from hicache_pools.group import HostPoolGroup, PoolEntry, PoolTransfer

NAMES = ("kv", "mamba", "swa")
SIZES = {"kv": 12, "mamba": 5, "swa": 8}


class WatchedPool(NullPoolHost):
    """Knows by itself who holds what, and refuses or raises at the allocations that a test names."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages, 1)
        self.held: set[int] = set()
        self.fault: Callable[[], bool] = lambda: False
        self._watch = threading.Lock()

    def alloc(self, n: int) -> torch.Tensor | None:
        if self.fault():
            return None
        slots = super().alloc(n)
        if slots is not None:
            with self._watch:
                taken = set(slots.tolist())
                assert len(taken) == n
                assert not taken & self.held
                self.held |= taken
        return slots

    def free(self, indices: torch.Tensor) -> int:
        given = set(indices.tolist())
        with self._watch:
            assert given <= self.held
            self.held -= given
        return super().free(indices)


def group_of_watched() -> HostPoolGroup:
    return HostPoolGroup([PoolEntry(name, WatchedPool(SIZES[name]), None, lambda layer: layer) for name in NAMES])


class InjectedError(Exception):
    """Injected."""


requests = st.lists(st.tuples(st.sampled_from(NAMES[1:]), st.integers(0, 5)), min_size=1, max_size=4)
BEHAVIOURS = ["enough", "little", "nothing", "raise", "free and raise", "enter", "steal"]
behaviours = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(BEHAVIOURS))


class GroupMachine(RuleBasedStateMachine):
    """Operations that hold slots, and a store of evictable slots that reclaim callbacks draw on."""

    @initialize()
    def start(self) -> None:
        self.group = group_of_watched()
        self.operations: list[tuple[torch.Tensor, list[PoolTransfer]]] = []
        self.evictable: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        self.calls: list[str] = []

    def pool(self, name: str) -> WatchedPool:
        pool = self.group.get_pool(name)
        assert isinstance(pool, WatchedPool)
        return pool

    def evict(self, name: str, slots: int) -> None:
        store = self.evictable[name]
        while store and slots > 0:
            slots -= self.group.free(store.pop(), name)

    def callback(self, name: str, behaviour: str) -> Callable[[int], None]:
        def evict(slots: int) -> None:
            self.calls.append(name)
            if behaviour in ("enough", "free and raise", "enter", "steal"):
                self.evict(name, slots)
            elif behaviour == "little":
                self.evict(name, slots // 2)
            if behaviour == "enter":
                # The whole interface again, for the same and for the other pools.
                inner = [PoolTransfer(other, device_indices=torch.arange(1)) for other in NAMES[1:]]
                if self.group.resolve_host_transfers(inner) is not None:
                    self.group.release_transfers(inner)
                stolen = self.group.alloc(1, name)
                if stolen is not None:
                    self.group.free(stolen, name)
            if behaviour == "steal":
                stolen = self.group.alloc(1, name)
                if stolen is not None:
                    self.evictable[name].append(stolen)
            if "raise" in behaviour:
                raise InjectedError(behaviour)

        return evict

    def owned(self, transfers: list[PoolTransfer]) -> list[tuple[str, torch.Tensor]]:
        return [
            (str(t.name), t.host_indices)
            for t in transfers
            if t.indices_from_pool is None and t.host_indices is not None
        ]

    def arm(self, behaviour: dict[str, str]) -> None:
        self.calls.clear()
        for name in NAMES:
            chosen = behaviour.get(name)
            self.group.get_entry(name).host_evict_fn = None if chosen is None else self.callback(name, chosen)

    @rule(primary=st.integers(0, 6), wanted=requests, behaviour=behaviours, derived=st.booleans(), data=st.data())
    def operate(
        self, primary: int, wanted: list[tuple[str, int]], behaviour: dict[str, str], derived: bool, data: Any
    ) -> None:
        self.arm(behaviour)
        anchor = self.group.alloc(primary)
        if anchor is None:
            return
        transfers = [PoolTransfer(name, device_indices=torch.arange(count)) for name, count in wanted]
        if derived:
            transfers.insert(0, PoolTransfer("kv", indices_from_pool="kv"))
        fail_at = data.draw(st.none() | st.integers(0, 6), label="refused allocation")
        fault_raises = data.draw(st.booleans(), label="raises")
        step = iter(range(1000))

        def fault() -> bool:
            if next(step) != fail_at:
                return False
            if fault_raises:
                raise InjectedError("alloc")
            return True

        for name in NAMES:
            self.pool(name).fault = fault
        self.calls.clear()
        before = {name: set(self.pool(name).held) for name in NAMES}
        try:
            resolved = self.group.resolve_host_transfers(
                transfers, primary_device_indices=torch.arange(primary), primary_host_indices=anchor
            )
        except InjectedError:
            resolved = None
        for name in NAMES:
            self.pool(name).fault = lambda: False
        # A callback that enters the group may ask other pools to reclaim; this operation itself asks each once.
        if "enter" not in behaviour.values():
            assert len(self.calls) == len(set(self.calls))
        if resolved is None:
            for transfer, (_, count) in zip(transfers[derived:], wanted, strict=True):
                assert transfer.host_indices is None
                assert transfer.device_indices is not None
                assert transfer.device_indices.tolist() == list(range(count))
            if derived:
                assert transfers[0].host_indices is transfers[0].device_indices is None
            if not self.calls:
                assert before == {name: self.pool(name).held for name in NAMES}
            self.group.free(anchor)
            return
        for transfer, (_, count) in zip(transfers[derived:], wanted, strict=True):
            assert transfer.host_indices is not None
            assert transfer.host_indices.numel() == count
        if derived:
            assert transfers[0].host_indices is anchor
        self.operations.append((anchor, transfers))

    @precondition(lambda self: self.operations)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        anchor, transfers = self.operations.pop(data.draw(st.integers(0, len(self.operations) - 1)))
        owned = sum(slots.numel() for _, slots in self.owned(transfers))
        order = data.draw(st.permutations(transfers))
        assert self.group.release_transfers(order) == owned
        assert self.group.release_transfers(transfers) == 0
        assert all(t.host_indices is None for t in transfers)
        self.group.free(anchor)

    @precondition(lambda self: self.operations)
    @rule(data=st.data())
    def keep_for_eviction(self, data: Any) -> None:
        """An operation that succeeded: its slots belong to a tree now, which gives them up on demand."""
        anchor, transfers = self.operations.pop(data.draw(st.integers(0, len(self.operations) - 1)))
        self.evictable["kv"].append(anchor)
        for name, slots in self.owned(transfers):
            self.evictable[name].append(slots)

    @invariant()
    def every_slot_is_free_or_has_one_owner(self) -> None:
        owners = {name: [s for part in self.evictable[name] for s in part.tolist()] for name in NAMES}
        for anchor, transfers in self.operations:
            owners["kv"] += anchor.tolist()
            for name, slots in self.owned(transfers):
                owners[name] += slots.tolist()
        for name in NAMES:
            pool = self.pool(name)
            assert sorted(owners[name]) == sorted(pool.held)
            assert pool.available_size() == SIZES[name] - len(pool.held)
            pool.allocator.check_integrity()


GroupMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestGroupMachine = GroupMachine.TestCase


def test_eight_threads_resolve_and_release_while_reclaim_fires_and_no_slot_is_lost_or_given_twice() -> None:
    group = group_of_watched()
    store: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
    tree = threading.RLock()  # held while calling the group and inside callbacks, as a tree would
    reclaims = dict.fromkeys(NAMES, 0)
    outcomes = {"resolved": 0, "refused": 0}
    errors: list[BaseException] = []

    def evict(name: str) -> Callable[[int], None]:
        def reclaim(slots: int) -> None:
            with tree:
                reclaims[name] += 1
                if random.random() < 0.1:
                    raise InjectedError(name)
                while store[name] and slots > 0:
                    slots -= group.free(store[name].pop(), name)
            inner = [PoolTransfer("swa", device_indices=torch.arange(1))]
            if random.random() < 0.2 and group.resolve_host_transfers(inner) is not None:
                group.release_transfers(inner)

        return reclaim

    for name in NAMES:
        group.get_entry(name).host_evict_fn = evict(name)

    def one_operation(generator: random.Random) -> None:
        anchor = group.alloc(generator.randrange(1, 4))
        if anchor is None:
            return
        transfers = [
            PoolTransfer(name, device_indices=torch.arange(generator.randrange(1, 4)))
            for name in generator.sample(NAMES[1:], 2)
        ]
        transfers.append(PoolTransfer("kv", indices_from_pool="kv"))
        resolved = group.resolve_host_transfers(transfers, primary_host_indices=anchor, primary_device_indices=anchor)
        with tree:
            outcomes["refused" if resolved is None else "resolved"] += 1
        if resolved is None:
            assert all(t.host_indices is None for t in transfers)
            group.free(anchor)
        elif generator.random() < 0.5:
            group.release_transfers(transfers)
            group.free(anchor)
        else:
            with tree:
                store["kv"].append(anchor)
                for transfer in transfers[:2]:
                    assert transfer.host_indices is not None
                    store[transfer.name].append(transfer.host_indices)

    def work(seed: int) -> None:
        generator = random.Random(seed)
        try:
            for step in range(150):
                if step % 3 == 0:
                    with tree:
                        one_operation(generator)
                else:
                    one_operation(generator)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(random.randrange(1 << 30),), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(timeout=max(deadline - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), "the group and its callbacks wait for each other"
    assert not errors, errors
    assert all(reclaims.values())
    assert outcomes["resolved"]
    for name, kept in store.items():
        for slots in kept:
            group.free(slots, name)
        assert group.available_size(name) == SIZES[name]
        assert group.get_pool(name).held == set()
        group.get_pool(name).allocator.check_integrity()


def test_two_threads_that_release_the_same_transfers_give_the_slots_back_once() -> None:
    for _ in range(50):
        group = group_of_watched()
        transfers = [PoolTransfer(name, device_indices=torch.arange(4)) for name in NAMES[1:]]
        assert group.resolve_host_transfers(transfers) is not None
        barrier, released = threading.Barrier(2), list[int]()

        def release(
            group: HostPoolGroup = group,
            transfers: list[PoolTransfer] = transfers,
            barrier: threading.Barrier = barrier,
            released: list[int] = released,
        ) -> None:
            barrier.wait()
            released.append(group.release_transfers(transfers))

        threads = [threading.Thread(target=release) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(released) == 8
        assert all(group.available_size(name) == SIZES[name] for name in NAMES)
