"""A random program over a random engine: what a scheduler may do, in any order, with what it finds checked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tests.controller.tree.random_engine import (
    NAMESPACES,
    PAGE_KEY_BYTES,
    InjectedError,
    RandomEngine,
    Request,
    key_list,
    random_quota,
)

from hicache_controller.policies import WritePolicy
from hicache_controller.tree import Match, SequenceKeys, Tier

FAILED = object()
MAX_HELD = 2


class RandomProgram:
    """Steps that follow from a seed. Each has random numbers of its own, so that one which races changes no other.

    ``interrupted_at`` calls a function with an interrupt at its nth line.
    """

    def __init__(self, seed: int, model_type: type[Any], directory: Path, interrupted_at: Callable[..., bool]) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.threads = set(threading.enumerate())
        self.engine = RandomEngine(self.random, model_type, directory)
        self.model = self.engine.model
        self.cache = self.model.cache
        self.interrupted_at = interrupted_at
        self.letters = self.random.randint(1, 3)
        self.longest = self.random.choice((5, 9, 14))
        self.known: list[tuple[Any, list[int]]] = [(namespace, []) for namespace in NAMESPACES]
        self.count = self.random.randint(60, 200)
        self.done: list[str] = []
        self.next_id = 0
        self.requests: list[Request] = []
        self.loading: list[Match] = []
        self.prefetching: list[Any] = []
        self.retracted: dict[str, tuple[int, int]] = {}
        self.locked: list[tuple[Any, bool]] = []
        self.taken: list[tuple[str, Any, bool]] = []
        self.steps = [
            *[self.serve] * 10,
            *(self.look_up, self.open_request, self.open_request, self.insert, self.insert, self.settle),
            *(self.drop, self.settle, self.settle, self.retract, self.restore, self.discard),
            *(self.start_prefetch, self.finish_prefetch, self.finish_prefetch),
            *(
                self.evict,
                self.leave_device,
                self.leave_device,
                self.leave_device,
                self.evict_window,
                self.take_slots,
                self.return_slots,
            ),
            *(self.lock, self.unlock, self.pin, self.pass_time, self.split),
            *(self.break_transfer, self.hold_transfer, self.raise_soon, self.interrupt, *[self.stop_faults] * 4),
            *(self.poll, self.poll, self.drain, self.change_settings, self.change_storage),
        ]

    def run(self) -> None:
        """Run all steps, then give everything back; what is wrong raises, with how to see it again."""
        try:
            for number in range(self.count):
                self.random = Random(f"{self.seed}.{number}")
                step = self.reset if self.random.random() < 0.004 else self.random.choice(self.steps)
                self.done.append(step.__name__)
                step()
                self.check(bytes_too=number % 3 == 0)
            self.done.append("end")
            self.end()
        except BaseException as error:
            error.add_note(f"after {len(self.done)} of {self.count} steps, the last {self.done[-12:]}")
            error.add_note(f"{self.engine.settings}, storage {getattr(self.engine.storage, 'inner', None)}")
            error.add_note(
                f"again: HICACHE_SEED={self.seed} uv run pytest tests/controller/tree/test_random_programs.py"
            )
            with contextlib.suppress(Exception):
                self.engine.stop_faults()
                self.model.controller.shutdown(10)
            raise

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the tree; FAILED where a callback of the engine raised."""
        try:
            return function(*arguments, **options)
        except InjectedError:
            return FAILED

    # Checks

    def check(self, *, bytes_too: bool = True) -> None:
        self.cache.check_integrity()
        self.model.controller.check_integrity()
        for allocator in self.model.allocators.values():
            allocator.check_integrity()
        if self.engine.wrong:
            raise self.engine.wrong[0]
        for request in self.requests if bytes_too else ():
            self.verify(request)

    def verify(self, request: Request) -> None:
        """Check every byte that a request may read."""
        self.model.verify_match(request.match)
        rest = request.match.rest()[: len(request.pages)]
        self.model.verify("kv", rest, request.pages)
        for name, pages in request.windows.items():
            self.model.verify(name, rest[len(rest) - len(pages) :], pages)

    # Requests

    def keys(self) -> Any:
        """Keys of a random request, which mostly begins like one before it; some with their tokens."""
        namespace, words = self.random.choice(self.known)
        words = words[: self.random.choice((len(words), len(words), self.random.randint(0, len(words))))]
        longer = self.random.randint(0, max(0, self.longest - len(words)))
        words = words + [self.random.randrange(self.letters) for _ in range(longer)]
        self.known[self.random.randrange(len(self.known))] = namespace, words
        tokens = np.repeat(np.array(words, np.int64), self.model.page_size)
        keys = SequenceKeys(self.model.page_size, tokens, namespace=namespace)
        return keys if self.random.random() < 0.5 else keys.hashes

    def match(self) -> Match | None:
        priority = self.random.choice((0, 0, 0, 1, -1))
        found = self.call(
            self.cache.match_prefix, self.keys(), namespace=self.random.choice((None, *NAMESPACES)), priority=priority
        )
        return None if found is FAILED else found

    def look_up(self) -> None:
        quiet = self.random.random() < 0.5 and self.call(self.cache.drain) is True
        match = self.match()
        if match is not None:
            keys = [*key_list(match.keys[: match.pages * PAGE_KEY_BYTES]), *match.rest()]
            if quiet:
                assert match.pages == self.engine.residency.longest(keys, Tier.DEVICE, Tier.HOST)
            self.call(self.cache.release, match)

    def open_request(self) -> None:
        """Match, perhaps prefetch, and load; some loads are waited for by a later step."""
        if len(self.requests) + len(self.loading) >= MAX_HELD or (match := self.match()) is None:
            return
        if self.random.random() < 0.4:
            match = self.replace(match, self.cache.prefetch, match, timeout=self.random.choice((None, 0.0, 0.01)))
        self.load(match)

    def serve(self) -> None:
        """Serve a whole request in one step."""
        if (match := self.match()) is None:
            return
        match = self.replace(match, self.cache.prefetch, match)
        match = self.replace(match, self.cache.load_back, match)
        made = self.call(self.model.compute, match, len(match.rest())) if match.on_device else None
        if made is not None and made is not FAILED:
            self.verify(Request(match, *made))
            match = self.replace(match, lambda: self.cache.insert(match, made[0], windows=made[1]).match)
        self.call(self.cache.release, match)

    def load(self, match: Match) -> None:
        wait = self.random.random() < 0.6
        loaded = self.call(self.cache.load_back, match, wait=wait)
        if loaded is FAILED:
            self.call(self.cache.release, match)
        elif wait:
            self.compute(loaded)
        else:
            self.loading.append(loaded)

    def replace(self, match: Match, function: Callable[..., Match], *arguments: Any, **options: Any) -> Match:
        """Call something that replaces a match; the match where that raises."""
        other = self.call(function, *arguments, **options)
        return match if other is FAILED else other

    def compute(self, match: Match) -> None:
        """Check what was found, and compute some of what follows."""
        self.model.verify_match(match)
        made = self.call(self.model.compute, match, self.random.randint(0, len(match.rest())))
        if made is FAILED or made is None:
            self.call(self.cache.release, match)
        else:
            self.requests.append(Request(match, *made))

    def settle(self) -> None:
        match = self.pop(self.loading)
        if match is not None:
            settled = self.call(self.cache.settle, match)
            if settled is FAILED:
                self.call(self.cache.release, match)
            else:
                self.compute(settled)

    def insert(self) -> None:
        request = self.pop(self.requests)
        if request is None:
            return
        match, pages, windows = request.match, request.pages, request.windows
        whole = self.random.random() < 0.7
        count = len(pages) if whole else self.random.randint(0, len(pages))
        options = {"count": count}
        if self.random.random() < 0.3:
            rest = self.random.randrange(self.model.page_size)
            options = {"computed_tokens": (match.pages + count) * self.model.page_size + rest}
        result = self.call(self.cache.insert, match, pages, **options, windows=windows if whole else None)
        if not whole:
            self.model.give_back(pages[count:], windows)
        if result is FAILED:
            self.call(self.cache.release, match)
            return
        match = result.match
        self.model.verify(
            "kv", key_list(match.keys[: match.pages * PAGE_KEY_BYTES]), self.cache.device_page_numbers(match)
        )
        if whole:
            self.model.verify_match(match)
        if self.random.random() < 0.2:
            self.call(self.cache.pin, match, 3.0)
        if whole and self.random.random() < 0.2:
            self.requests.append(Request(match))
        else:
            self.call(self.cache.release, match)

    def drop(self) -> None:
        request = self.pop(self.requests)
        if request is not None:
            self.give_up(request)

    def give_up(self, request: Request) -> None:
        self.model.give_back(request.pages, request.windows)
        self.call(self.cache.release, request.match)

    # Retraction

    def retract(self) -> None:
        request = self.pop(self.requests)
        if request is None:
            return
        self.next_id += 1
        name, match = str(self.next_id), request.match
        moved = self.call(self.cache.retraction_backup, name, match, request.pages, windows=request.windows)
        assert (name in self.cache.retracted) == (moved is True or (moved is FAILED and name in self.cache.retracted))
        if name in self.cache.retracted:
            self.retracted[name] = (match.pages, len(request.pages))
        else:
            self.verify(request)
            self.requests.append(request)

    def restore(self) -> None:
        name = self.pop(sorted(self.retracted))
        if name is None or len(self.requests) >= MAX_HELD:
            return
        restored = self.call(self.cache.retraction_restore, name)
        if restored is FAILED or restored is None:
            assert name in self.cache.retracted, "a request is neither off the device nor on it"
            return
        assert (restored.match.pages, len(restored.pages)) == self.retracted.pop(name)
        self.requests.append(Request(*restored))
        self.verify(self.requests[-1])

    def discard(self) -> None:
        name = self.pop(sorted(self.retracted))
        if name is not None:
            self.call(self.cache.retraction_discard, name)
            del self.retracted[name]

    # Prefetches

    def start_prefetch(self) -> None:
        if len(self.prefetching) >= MAX_HELD or (match := self.match()) is None:
            return
        started = self.call(self.cache.start_prefetch, match)
        if started is FAILED:
            self.call(self.cache.release, match)
        else:
            self.prefetching.append(started)

    def finish_prefetch(self) -> None:
        started = self.pop(self.prefetching)
        if started is None:
            return
        self.cache.prefetch_ready(started)
        wait = self.random.random() < 0.6
        timeout = self.random.choice((None, 0.0, 0.01)) if wait else None
        match = self.replace(started.match, self.cache.finish_prefetch, started, wait=wait, timeout=timeout)
        if len(self.requests) + len(self.loading) < MAX_HELD:
            self.load(match)
        else:
            self.call(self.cache.release, match)

    # Room

    def evict(self) -> None:
        evict = self.random.choice((self.cache.evict_device, self.cache.evict_host))
        self.call(evict, self.random.choice((1, 2, 4, 100)))

    def leave_device(self) -> None:
        """Evict all that the device can spare, once it is on the host, and perhaps all of that."""
        self.call(self.cache.drain)
        self.call(self.cache.evict_device, 100)
        if self.random.random() < 0.3:
            self.call(self.cache.evict_host, 100)

    def evict_window(self) -> None:
        if self.model.windows:
            evict = self.random.choice((self.cache.evict_window_device, self.cache.evict_window_host))
            self.call(evict, self.random.choice(list(self.model.windows)), self.random.choice((1, 2, 3)))

    def take_slots(self) -> None:
        """Allocate as an engine does by its group, so that the tree has to make room."""
        name, device = self.random.choice(("kv", *self.model.windows)), self.random.random() < 0.5
        slots = self.random.randint(1, 4) * self.model.host[name].page_size
        group = self.model.group
        taken = self.call(group.alloc_device if device else group.alloc, slots, name)
        if taken is not FAILED and taken is not None:
            assert len(taken) == slots
            self.taken.append((name, taken, device))

    def return_slots(self) -> None:
        taken = self.pop(self.taken)
        if taken is not None:
            name, slots, device = taken
            self.call(self.model.group.free_device if device else self.model.group.free, slots, name)

    # Nodes and time

    def lock(self) -> None:
        if len(self.locked) >= MAX_HELD or (match := self.match()) is None:
            return
        if match.device_pages and match.device_node.device is not None:  # its load may have failed by now
            self.cache.inc_lock_ref(match.device_node)
            self.locked.append((match.device_node, True))
        elif match.host_pages and match.node.host is not None:
            self.cache.inc_host_lock_ref(match.node)
            self.locked.append((match.node, False))
        self.call(self.cache.release, match)

    def unlock(self) -> None:
        locked = self.pop(self.locked)
        if locked is not None:
            node, device = locked
            self.call(self.cache.dec_lock_ref if device else self.cache.dec_host_lock_ref, node)

    def pin(self) -> None:
        match = self.match()
        if match is not None:
            self.call(self.cache.pin, match, self.random.choice((0.5, 4.0)))
            self.call(self.cache.release, match)

    def pass_time(self) -> None:
        self.engine.now += self.random.choice((0.3, 2.0, 10.0))
        if self.random.random() < 0.5:
            self.call(self.cache.expire)

    def split(self) -> None:
        match = self.match()
        if match is not None:
            if match.node.pages > 1:
                self.call(self.cache.split, match.node, self.random.randint(1, match.node.pages - 1))
            self.call(self.cache.release, match)

    def change_settings(self) -> None:
        cache = self.cache
        cache.write_policy = self.random.choice(list(WritePolicy))
        cache.load_back_pages = self.random.choice((1, 1, 3))
        cache.load_quota_pages = self.random.choice((None, None, 2))
        self.call(cache.set_quota, self.random.choice(NAMESPACES), random_quota(self.random))

    # Faults

    def break_transfer(self) -> None:
        self.random.choice(self.engine.gates).failing = True

    def hold_transfer(self) -> None:
        if self.random.random() < 0.3:
            self.engine.hang.clear()
        else:
            self.random.choice(self.engine.gates).close()

    def raise_soon(self) -> None:
        self.engine.raises_in = self.random.choice((1, 2, 3, 6))

    def stop_faults(self) -> None:
        self.engine.stop_faults()

    def interrupt(self) -> None:
        """Interrupt a call that returns nothing which could be lost."""
        calls = (
            self.cache.poll,
            self.cache.expire,
            lambda: self.cache.evict_device(2),
            lambda: self.cache.evict_host(2),
        )
        self.call(self.interrupted_at, self.random.choice(calls), self.random.randint(1, 150))

    # All of it

    def poll(self) -> None:
        self.call(self.cache.poll, wait=self.random.random() < 0.3)

    def drain(self) -> None:
        self.call(self.cache.drain, self.random.choice((None, 0.0, 0.01)))

    def change_storage(self) -> None:
        """Clear the storage, let it go, or take it again."""
        storage, controller = self.engine.storage, self.model.controller
        if storage is None:
            return
        if not controller.has_storage:
            controller.attach_storage_backend(storage)
        elif self.random.random() < 0.3:
            self.call(controller.detach_storage_backend)
        elif self.random.random() < 0.3:
            storage.clear()

    def reset(self) -> None:
        """Forget everything; pages that the engine holds stay the engine's."""
        root = self.cache.root
        with contextlib.suppress(TimeoutError):
            self.call(self.cache.reset, self.random.choice((None, 0.0)))
        if self.cache.root is root:
            return
        for request in self.requests:
            self.model.give_back(request.pages, request.windows)
        for held in (self.requests, self.loading, self.prefetching, self.locked):
            held.clear()
        self.retracted.clear()
        self.taken = [taken for taken in self.taken if taken[2]]  # the host pools are empty
        assert not self.cache.retracted
        assert self.cache.stats() == (0, 0, 0)
        self.check_sizes()

    def end(self) -> None:
        """Wait for everything, release everything; nothing may be left, and every page is free.

        Calls to storage that were given up use pages until they end, which only ``quiesce`` waits for.
        """
        self.engine.stop_faults()
        for request in self.requests:
            self.give_up(request)
        for started in self.prefetching:
            self.cache.release(self.cache.finish_prefetch(started))
        for match in self.loading:
            settled = self.cache.settle(match)
            self.model.verify_match(settled)
            self.cache.release(settled)
        for held in (self.requests, self.prefetching, self.loading):
            held.clear()
        for name in list(self.retracted):
            self.discard_or_restore(name)
        while self.locked:
            self.unlock()
        while self.taken:
            self.return_slots()
        self.engine.now += 1000.0
        assert self.cache.drain(), "transfers are in flight that never end"
        self.model.controller.quiesce()
        self.check()
        self.check_sizes()
        self.evict_all()
        self.model.controller.quiesce()
        for allocator in self.model.allocators.values():
            allocator.free_refused()
        self.model.empty()
        self.check_sizes()
        if self.engine.storage is not None:
            self.engine.storage.inner.check_integrity()
        self.model.close()
        left = set(threading.enumerate()) - self.threads
        assert not left, f"threads are left: {left}"

    def discard_or_restore(self, name: str) -> None:
        restored = self.cache.retraction_restore(name) if self.random.random() < 0.5 else None
        if restored is None:
            self.cache.retraction_discard(name)
        else:
            request = Request(*restored)
            self.verify(request)
            self.give_up(request)

    def evict_all(self) -> None:
        self.cache.evict_device(10**6)
        self.cache.evict_host(10**6)
        for name in self.model.windows:
            self.cache.evict_window_device(name, 10**6)
            self.cache.evict_window_host(name, 10**6)

    def check_sizes(self) -> None:
        """Compare what the tree has, when nothing moves, with what its events said."""
        where, stats = self.engine.residency.where, self.cache.stats()
        assert (stats.device_pages, stats.host_pages) == (len(where["kv", Tier.DEVICE]), len(where["kv", Tier.HOST]))
        for name in self.model.windows:
            assert self.cache.window_stats(name) == (len(where[name, Tier.DEVICE]), len(where[name, Tier.HOST]))

    def pop(self, held: list[Any]) -> Any:
        """Take one of what is held; None if there is none."""
        return held.pop(self.random.randrange(len(held))) if held else None
