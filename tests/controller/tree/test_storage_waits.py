"""Storage that is slow or hangs: no call of the scheduler's thread waits for it beyond the bound; skips are counted."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_controller import wait_bound
from hicache_controller.events import HostSignal
from hicache_controller.hashing import Namespace
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import Quota, WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]

BOUND = 0.02


class SlowStorage(MemoryStorage):
    """Answers nothing while it is closed, and holds its lock meanwhile, as bad luck would have it."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.opened.set()
        self.storing = threading.Event()

    def close_gate(self) -> None:
        self.storing.clear()
        self.opened.clear()

    def _hang(self) -> None:
        with self._lock:
            assert self.opened.wait(60), "the storage was never opened"

    def find_pages(self, *arguments: Any, **options: Any) -> list[bool]:
        self._hang()
        return super().find_pages(*arguments, **options)

    def load_pages(self, *arguments: Any) -> list[bool]:
        self._hang()
        return super().load_pages(*arguments)

    def store_pages(self, pool: Any, keys: list[bytes], *rest: Any) -> list[bool]:
        self.storing.set()
        self._hang()
        return super().store_pages(pool, keys, *rest)


class Waits:
    """What this thread waits for storage: each wait is as long as it may be, by a clock that stands still otherwise.

    While ``opens`` is a storage, it answers in these waits, and only in them.
    """

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.opens: SlowStorage | None = None
        self.calls: dict[str, float] = {}
        thread, synchronize = threading.get_ident(), HostSignal.synchronize

        def wait(signal: HostSignal, timeout: float | None = None) -> bool:
            if timeout is None or threading.get_ident() != thread:
                return synchronize(signal, timeout)
            if self.opens is not None:
                self.opens.opened.set()
                came = synchronize(signal, timeout)
                self.opens.close_gate()
                return came
            self.now += 0 if signal.query() else timeout
            return signal.query()

        monkeypatch.setattr(HostSignal, "synchronize", wait)
        monkeypatch.setattr(wait_bound, "time", SimpleNamespace(monotonic=lambda: self.now))
        for each in model.controller.storage._attached.workers:
            monkeypatch.setattr(each, "submit", self._submit(each.submit))

    def _submit(self, submit: Callable[..., bool]) -> Callable[..., bool]:
        def put(task: Any, *after: Any, timeout: float = 0.0) -> bool:
            came = submit(task, *after, timeout=0)
            self.now += 0 if came else timeout
            return came

        return put

    def of(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make a call, and note how long it waited at most, by name."""
        before, name = self.now, call.__name__
        try:
            return call(*arguments, **options)
        finally:
            self.calls[name] = max(self.calls.get(name, 0.0), self.now - before)


def skipped(model: Any) -> float:
    return model.controller.metrics.snapshot().total("backup_skipped_pages", pool="kv")


def stored(model: Any) -> float:
    return model.controller.metrics.snapshot().total("backup_pages")


def make_slow(make_model: MakeModel, *, wait: float = BOUND, batch_pages: int = 64, **options: Any) -> Any:
    settings = {"max_wait_seconds": wait, "batch_pages": batch_pages, **options.pop("storage_settings", {})}
    storage = SlowStorage()
    model = make_model(storage=storage, storage_settings=settings, **options)
    model.gates.append(SimpleNamespace(open=storage.opened.set))
    return model


def at_once(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return call(*arguments, **options)


def serve(model: Any, keys: list[bytes], of: Callable[..., Any] = at_once, **options: Any) -> None:
    """Serve a request as a scheduler does, each call through ``of``; the bytes of what is found are checked."""
    cache = model.cache
    match = of(cache.match_prefix, keys, **options)
    started = of(cache.start_prefetch, match)
    of(cache.prefetch_ready, started)
    match = of(cache.finish_prefetch, started)
    match = of(cache.load_back, match)
    model.verify_match(match)
    pages = of(cache.alloc_device, len(keys) - match.pages)
    assert pages is not None
    model.fill("kv", match.rest(), pages)
    windows = {}
    for name, window in model.windows.items():
        last = match.rest()[-window:]
        windows[name] = of(cache.alloc_window, name, len(last))
        model.fill(name, last, windows[name])
    match = of(cache.insert, match, pages, windows=windows).match
    model.verify_match(match)
    of(cache.release, match)
    of(cache.poll)


def settle(model: Any) -> None:
    """Let storage answer, and wait for all it does; what a call read that was given up is counted once it ends."""
    model.storage.opened.set()
    assert model.cache.drain()
    assert all(thread.drain(60) for thread in model.controller.storage._attached.workers)
    model.cache.check_integrity()


@pytest.mark.parametrize("bound", [BOUND, 0])
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("pools", [{}, {"windows": (12, 4), "states": (8, 3)}], ids=["full", "hybrid"])
def test_no_call_waits_beyond_the_bound_for_a_storage_that_hangs(
    make_model: MakeModel,
    keys_of: KeysOf,
    monkeypatch: pytest.MonkeyPatch,
    policy: WritePolicy,
    pools: dict[str, Any],
    bound: float,
) -> None:
    model = make_slow(
        make_model,
        wait=bound,
        device_pages=12,
        host_pages=8,
        write_policy=policy,
        selective_hits=1,
        batch_pages=2,
        storage_settings={"backup_queue_pages": 5},
        **pools,
    )
    cache, words = model.cache, [tuple(random.choices(range(50), k=4)) for _ in range(12)]
    for each in words[:4]:
        serve(model, keys_of(each))
        settle(model)
    waits = Waits(model, monkeypatch)
    model.storage.close_gate()
    for each in words + words[::-1]:
        serve(model, keys_of(each), waits.of)
        cache.check_integrity()
    waits.of(cache.poll, wait=True)
    match = waits.of(cache.match_prefix, keys_of((*words[0], 7)))
    match = waits.of(cache.load_back, match)
    made = model.compute(match, len(match.rest()))
    assert made is not None
    if waits.of(cache.retraction_backup, "r", match, made[0], windows=made[1]):
        waits.of(cache.poll)
        restored = waits.of(cache.retraction_restore, "r")
        assert restored is not None
        model.give_back(restored.pages, restored.windows)
        waits.of(cache.release, restored.match)
    else:
        model.give_back(*made)
        waits.of(cache.release, match)
    waits.of(cache.evict_host, 3)
    waits.of(cache.evict_device, 3)
    for name in model.windows:
        waits.of(cache.evict_window_host, name, 2)
        waits.of(cache.evict_window_device, name, 2)
    waits.of(model.controller.storage_exists, keys_of(words[0]))
    waits.of(model.controller.poll_backups, wait=True)
    assert max(waits.calls.values()) <= bound + 1e-9, waits.calls
    monkeypatch.undo()
    settle(model)
    for each in words:
        model.serve(each)  # every byte that is found is right
    settle(model)


def test_pages_that_a_call_to_storage_reads_are_not_used_again_before_it_ends(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_slow(make_model, wait=0, device_pages=12, host_pages=6, batch_pages=2)
    model.storage.close_gate()
    serve(model, keys_of((1, 2, 3, 4)))
    while not model.cache._backups.running:
        model.cache.poll(wait=True)
    assert model.storage.storing.wait(30)
    serve(model, keys_of((5, 6, 7)))  # the first is dropped; two of its pages are being read
    model.cache.poll()
    assert [model.lookup(words)[1] for words in ((1, 2, 3, 4), (5, 6, 7))] == [0, 0]
    assert model.cache.stats().host_pages == 3
    assert model.host["kv"].available_size() == 2  # one page
    settle(model)
    assert stored(model) == 2 + 3
    assert skipped(model) == 2
    model.empty()
    assert model.begin(keys_of((1, 2, 3, 4))).pages == 2  # bit for bit


def test_pages_that_are_not_saved_leave_by_the_order_of_the_strategy_and_after_those_that_are(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_slow(make_model, wait=0, device_pages=20, host_pages=8, batch_pages=1)
    saved, unsaved = (0, 1), [(1, 1), (2, 2), (3, 3)]
    serve(model, keys_of(saved))
    settle(model)
    model.storage.close_gate()
    for words in unsaved:
        serve(model, keys_of(words))
        while model.cache._transfers.writes:
            model.cache.poll(wait=True)
    model.cache.evict_device(20)

    def on_host() -> list[tuple[int, ...]]:
        nodes = {node.key(0): node for node in model.cache._tree.nodes()}
        return [words for words in (saved, *unsaved) if keys_of(words)[0] in nodes]

    model.lookup(saved)
    assert on_host() == [saved, *unsaved]
    for words in [(3, 3), (1, 1), (2, 2), saved]:
        model.lookup(words)
    left = []
    for _ in range(4):
        before = on_host()
        assert model.cache.evict_host(1) >= 1
        model.cache.check_integrity()
        left += [words for words in before if words not in on_host()]
    assert left == [saved, (3, 3), (1, 1), (2, 2)]
    settle(model)


@pytest.mark.parametrize("ticks", [0, 2, 20])
def test_first_seen_prefixes_are_all_stored_where_storage_keeps_pace(
    make_model: MakeModel, keys_of: KeysOf, ticks: int
) -> None:
    # 5 x 16,011 tokens in pages of 320; a page takes as many polls to store as ``ticks``.
    model = make_slow(make_model, device_pages=42_763 // 320, host_pages=27_127 // 320)
    polls = threading.Semaphore(0)
    store = model.storage.store_pages

    def slow_store(pool: Any, keys: list[bytes], *rest: Any) -> list[bool]:
        for _ in range(ticks * len(keys)):
            assert polls.acquire(timeout=60)
        return store(pool, keys, *rest)

    model.storage.store_pages = slow_store
    for number in range(5):
        serve(model, keys_of([1000 * number + page for page in range(16_011 // 320)]))
        while not model.cache.drain(timeout=0):
            polls.release()
    assert (stored(model), skipped(model)) == (250, 0)
    assert model.storage.stats().pages == 250


@pytest.mark.parametrize("bound", [30.0, BOUND, 0])
def test_unpaced_prefixes_are_stored_within_the_bound_or_counted(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch, bound: float
) -> None:
    model = make_slow(make_model, wait=bound, device_pages=42_763 // 320, host_pages=27_127 // 320)
    waits = Waits(model, monkeypatch)
    waits.opens = model.storage if bound > BOUND else None
    model.storage.close_gate()
    for number in range(5):
        keys = keys_of([1000 * number + page for page in range(16_011 // 320)])
        match = waits.of(model.cache.match_prefix, keys)
        pages = waits.of(model.cache.alloc_device, 50)
        model.fill("kv", keys, pages)
        waits.of(model.cache.release, waits.of(model.cache.insert, match, pages).match)
    monkeypatch.undo()
    settle(model)
    assert stored(model) + skipped(model) == 250
    assert model.storage.stats().pages == stored(model)
    if bound > BOUND:
        assert stored(model) == 250
    else:
        assert max(waits.calls.values()) <= bound + 1e-9
        assert 0 < skipped(model) < 250


def test_a_namespace_at_its_quota_drops_what_storage_has_not_taken_of_its_own(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    tenant = Namespace(salt="tenant")
    model = make_slow(make_model, wait=0, device_pages=20, host_pages=20, quotas={tenant: Quota(host_pages=4)})
    model.storage.close_gate()
    for words in ((1, 1), (2, 2), (3, 3)):
        serve(model, keys_of(words), namespace=tenant)
        serve(model, keys_of((9, *words)))
        while model.cache._transfers.writes:
            model.cache.poll(wait=True)
        assert model.cache.namespace_stats(tenant)[1] <= 4
    assert [model.lookup(words) for words in ((1, 1), (2, 2), (3, 3))] == [(2, 0)] * 3
    assert model.cache.namespace_stats(tenant)[1] == 4
    assert model.cache.namespace_stats(None)[1] == 7
    settle(model)
    assert stored(model) + skipped(model) == 6 + 7


def test_skips_are_logged_once_in_a_while(
    make_model: MakeModel, keys_of: KeysOf, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_slow(make_model, wait=0, device_pages=20, host_pages=4, batch_pages=1)
    model.storage.close_gate()
    with caplog.at_level(logging.WARNING):
        for word in range(6):
            serve(model, keys_of((word, word, word)))
    settle(model)
    assert skipped(model) > 3
    assert sum("storage is slower than pages come" in record.getMessage() for record in caplog.records) == 1


def test_calls_that_wait_on_purpose_take_a_timeout(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_slow(make_model, wait=0, device_pages=12, host_pages=12, batch_pages=1)
    cache = model.cache
    with model.controller.storage.one_call(math.inf):
        model.serve((1, 2, 3))
        settle(model)
    model.empty()
    model.storage.close_gate()
    match = cache.match_prefix(keys_of((1, 2, 3)))
    assert cache.prefetch(match, timeout=0.01).pages == 0
    started = cache.start_prefetch(match)
    assert cache.finish_prefetch(started, wait=True, timeout=0.01) is match
    with pytest.raises(ValueError, match="timeout is 1, and wait is False"):
        cache.finish_prefetch(started, timeout=1)
    cache.release(match)
    model.storage.opened.set()
    model.controller.storage._attached.lookup.worker.drain(60)
    assert model.serve((1, 2, 3)) == 3  # though a scheduler's call would find nothing yet
    model.storage.close_gate()
    serve(model, keys_of((4, 5)))
    assert not cache.drain(timeout=0.01)
    with pytest.raises(TimeoutError, match="still uses slots"):
        cache.reset(timeout=0.01)
    cache.check_integrity()
    assert model.lookup((1, 2, 3))[0] == 3
    model.storage.opened.set()
    assert cache.drain(timeout=60)
    cache.reset(timeout=60)
    assert model.host["kv"].available_size() == 24
    assert cache.stats() == (0, 0, 0)
