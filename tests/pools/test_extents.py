"""The extent allocator: what it hands out, what it refuses, and what it remembers."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hicache_pools.extents import ExtentAllocator, ExtentStats


def taken(allocator: ExtentAllocator, pages: int) -> np.ndarray:
    result = allocator.alloc_pages(pages)
    assert result is not None
    return result


def runs_of(pages: np.ndarray) -> int:
    return 1 + int(np.count_nonzero(np.diff(pages) != 1)) if len(pages) else 0


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads interrupt each other inside a call; at the usual 5 ms a missing lock would go unnoticed."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_slots_are_whole_pages_in_order() -> None:
    page_size = random.randint(2, 64)
    allocator = ExtentAllocator(20, page_size)
    indices = allocator.alloc(7 * page_size)
    assert indices is not None
    assert indices.dtype == torch.int64
    assert indices.device.type == "cpu"
    rows = indices.reshape(7, page_size)
    assert (rows[:, 0] % page_size == 0).all()
    assert torch.equal(rows, rows[:, :1] + torch.arange(page_size))
    assert allocator.available_size() == 13 * page_size == allocator.available_pages * page_size
    assert (allocator.size, allocator.page_num, allocator.page_size) == (20 * page_size, 20, page_size)


def test_allocating_nothing_gives_an_empty_result() -> None:
    allocator = ExtentAllocator(4, 16)
    slots, pages = allocator.alloc(0), allocator.alloc_pages(0)
    assert slots is not None
    assert slots.shape == (0,)
    assert slots.dtype == torch.int64
    assert pages is not None
    assert pages.shape == (0,)
    assert pages.dtype == np.int64
    assert allocator.free(slots) == allocator.free_pages(pages) == 0
    assert allocator.stats().allocations == allocator.stats().frees == 0


def test_indices_are_owned_by_the_caller() -> None:
    allocator = ExtentAllocator(8, 2)
    first = allocator.alloc(6)
    assert first is not None
    first.fill_(-1)
    allocator.check_integrity()
    second = allocator.alloc(10)
    assert second is not None
    assert sorted(second.tolist()) == list(range(6, 16))


def test_indices_are_on_the_cpu_and_may_be_changed_whatever_the_mode_they_were_made_in() -> None:
    allocator = ExtentAllocator(8, 2)
    with torch.inference_mode(), torch.device("meta"):
        first, rest, none = allocator.alloc(6), allocator.alloc(10), allocator.alloc(0)
    for indices in (first, rest, none):
        assert indices is not None
        assert (indices.device.type, indices.is_inference()) == ("cpu", False)
        indices += 1


def test_too_few_pages_give_none_and_change_nothing() -> None:
    allocator = ExtentAllocator(8, 4)
    allocator.alloc(12)
    before = allocator.stats()
    assert allocator.alloc(24) is None
    assert allocator.alloc_pages(6) is None
    assert allocator.stats() == before._replace(failed_allocations=2)
    assert allocator.available_size() == 20
    allocator.check_integrity()


@pytest.mark.parametrize("wrong", [-4, 1, 6])
def test_a_number_of_slots_that_is_not_whole_pages_raises(wrong: int) -> None:
    allocator = ExtentAllocator(8, 4)
    before = allocator.stats()
    with pytest.raises(ValueError, match=f"n_slots is {wrong}; it must be "):
        allocator.alloc(wrong)
    assert allocator.stats() == before


def test_a_negative_number_of_pages_raises() -> None:
    with pytest.raises(ValueError, match="n is -1"):
        ExtentAllocator(8).alloc_pages(-1)


@pytest.mark.parametrize(
    ("pages", "page_size", "named"), [(-1, 1, "pages is -1"), (2**31, 1, "pages is "), (1, 0, "page_size is 0")]
)
def test_impossible_sizes_raise(pages: int, page_size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ExtentAllocator(pages, page_size)


@pytest.mark.parametrize("value", [1.0, "1", None])
def test_what_is_no_whole_number_is_named(value: Any) -> None:
    for name, use in {
        "pages": lambda: ExtentAllocator(value),
        "page_size": lambda: ExtentAllocator(4, value),
        "n_slots": lambda: ExtentAllocator(4).alloc(value),
        "n": lambda: ExtentAllocator(4).alloc_pages(value),
    }.items():
        with pytest.raises(TypeError, match=f"^{name} is {value!r}; it must be a whole number"):
            use()


def test_a_pool_without_pages_works() -> None:
    allocator = ExtentAllocator(0, 16)
    assert allocator.alloc(16) is None
    assert allocator.stats().largest_free_run == allocator.stats().free_runs == 0
    allocator.clear()
    allocator.check_integrity()


def test_the_smallest_run_that_is_long_enough_is_used() -> None:
    allocator = ExtentAllocator(100)
    pages = taken(allocator, 100)
    for start, length in ((10, 9), (30, 5), (50, 7)):
        allocator.free_pages(pages[start : start + length])
    assert taken(allocator, 6).tolist() == list(range(50, 56))
    assert taken(allocator, 5).tolist() == list(range(30, 35))


def test_fewest_runs_when_no_single_run_is_long_enough() -> None:
    lengths = random.sample(range(1, 40), 12)
    allocator = ExtentAllocator(sum(lengths) + len(lengths))
    pages = taken(allocator, allocator.page_num)
    start = 0
    for length in lengths:
        allocator.free_pages(pages[start : start + length])
        start += length + 1
    wanted = random.randint(max(lengths) + 1, sum(lengths))
    needed = int(np.argmax(np.cumsum(sorted(lengths, reverse=True)) >= wanted)) + 1
    assert runs_of(taken(allocator, wanted)) == needed
    # At most one run was cut, so at most the untouched runs and one rest are left.
    assert allocator.stats().free_runs <= len(lengths) - needed + 1
    allocator.check_integrity()


def test_among_equal_runs_the_one_next_to_the_youngest_pages_is_used() -> None:
    allocator = ExtentAllocator(40)
    old = taken(allocator, 30)
    young = taken(allocator, 10)
    allocator.free_pages(young[4:7])
    for start in (5, 15, 25):
        allocator.free_pages(old[start : start + 3])
    assert taken(allocator, 3).tolist() == young[4:7].tolist()


def test_neighbours_join_whatever_the_order_of_the_frees() -> None:
    allocator = ExtentAllocator(64, 2)
    parts = [allocator.alloc(8) for _ in range(16)]
    random.shuffle(parts)
    for part in parts:
        assert part is not None
        assert allocator.free(part) == 8
        allocator.check_integrity()
    assert allocator.stats().free_runs == 1
    assert allocator.stats().largest_free_run == 64


def test_parts_of_several_allocations_are_freed_in_one_call() -> None:
    allocator = ExtentAllocator(64)
    pages = np.concatenate([taken(allocator, 16) for _ in range(4)])
    chosen = np.random.default_rng().permutation(pages)[:40]
    assert allocator.free_pages(chosen) == 40
    allocator.check_integrity()
    assert allocator.available_pages == 40
    assert np.array_equal(np.sort(taken(allocator, 40)), np.sort(chosen))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_indices_of_any_integer_type_are_freed(dtype: torch.dtype) -> None:
    allocator = ExtentAllocator(10, 4)
    indices = allocator.alloc(20)
    assert indices is not None
    assert allocator.free(indices.to(dtype)) == 20
    assert allocator.available_size() == 40


WRONG_SLOTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "free already": (lambda held: torch.cat([held, torch.arange(36, 40)]), "index 36 is free already"),
    "beyond the pool": (lambda held: torch.cat([held, torch.arange(40, 44)]), "index 40 is foreign"),
    "negative": (lambda held: torch.cat([torch.arange(-4, 0), held]), "index -4 is foreign"),
    "given twice": (lambda held: torch.cat([held, held[4:8]]), "index 4 is given more than once"),
    "half a page": (lambda held: held[:-2], "index 16 at position 16 starts a page of which only 2"),
    "slots out of order": (
        lambda held: torch.cat([held[:4], held[4:8].flip(0)]),
        "index 7 at position 4 is not slot 0",
    ),
    "not at a page's start": (lambda held: held[2:6], "index 2 at position 0 is not slot 0"),
    "two halves": (lambda held: torch.cat([held[:2], held[4:6]]), "index 4 at position 2 is not slot 2"),
    "a table": (lambda held: held.reshape(-1, 4), "shape"),
    "fractions": (lambda held: held.float(), "dtype float32"),
    "flags": (lambda held: held > 3, "dtype bool"),
}


@pytest.mark.parametrize("case", WRONG_SLOTS)
@pytest.mark.parametrize("call", ["free", "owned_pages"])
def test_a_wrong_free_of_slots_raises_and_changes_nothing(case: str, call: str) -> None:
    allocator = ExtentAllocator(10, 4)
    held = allocator.alloc(20)
    assert held is not None
    before = allocator.stats()
    make, message = WRONG_SLOTS[case]
    with pytest.raises(ValueError, match=message):
        getattr(allocator, call)(make(held))
    assert allocator.stats() == before
    allocator.check_integrity()
    assert allocator.free(held) == 20


def test_owned_pages_are_those_handed_out_in_any_order() -> None:
    allocator = ExtentAllocator(50, 4)
    held = allocator.alloc(160)
    assert held is not None
    pages = held.view(-1, 4)[torch.randperm(40)]
    allocator.free(pages[30:].flatten())
    kept = pages[:30].flatten()
    assert (allocator.owned_pages(kept) == pages[:30, 0].numpy() // 4).all()
    assert (allocator.owned_pages(kept.int()) == pages[:30, 0].numpy() // 4).all()
    assert len(allocator.owned_pages(kept[:0])) == 0
    with pytest.raises(ValueError, match="free already"):
        allocator.owned_pages(pages.flatten())


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0, 1, 7], "index 7 is free already"),
        ([0, 10], "index 10 is foreign"),
        ([2, -1], "index -1 is foreign"),
        ([2**63 - 1], f"index {2**63 - 1} is foreign"),
        ([2**63 - 1, -(2**63)], f"index {2**63 - 1} is foreign"),
        ([3, 1, 3], "index 3 is given more than once"),
        ([[0, 1]], "shape"),
        ([0.0], "dtype float64"),
    ],
)
def test_a_wrong_free_of_pages_raises_and_changes_nothing(pages: list[int], message: str) -> None:
    allocator = ExtentAllocator(10, 4)
    held = taken(allocator, 5)
    before = allocator.stats()
    with pytest.raises(ValueError, match=message):
        allocator.free_pages(pages)
    assert allocator.stats() == before
    allocator.check_integrity()
    assert allocator.free_pages(held) == 5


def test_freeing_twice_raises() -> None:
    allocator = ExtentAllocator(10, 4)
    held = allocator.alloc(8)
    assert held is not None
    allocator.free(held)
    with pytest.raises(ValueError, match="index 0 is free already"):
        allocator.free(held)


def test_clear_frees_everything_and_starts_the_counters_again() -> None:
    allocator = ExtentAllocator(100, 2)
    fresh = allocator.stats()
    for _ in range(20):
        allocator.alloc(2 * random.randint(1, 8))
    allocator.clear()
    allocator.check_integrity()
    assert allocator.stats() == fresh
    assert runs_of(taken(allocator, 100)) == 1
    allocator.clear()
    with pytest.raises(ValueError, match="free already"):
        allocator.free_pages([5])


def test_stats_count_what_happened() -> None:
    allocator = ExtentAllocator(10)
    pages = taken(allocator, 10)
    allocator.free_pages(pages[[1, 2, 5]])
    taken(allocator, 3)
    allocator.alloc_pages(1)
    allocator.free_pages([0, 2, 3])
    stats = allocator.stats()
    assert stats == ExtentStats(
        page_num=10,
        free_pages=3,
        free_runs=2,
        largest_free_run=2,
        allocations=2,
        failed_allocations=1,
        frees=2,
        allocated_pages=13,
        allocated_runs=3,
        mean_run_pages=13 / 3,
        bookkeeping_bytes=stats.bookkeeping_bytes,
    )


def every_other(pages: int) -> np.ndarray:
    return np.arange(0, pages, 2)


def ever_longer_runs(pages: int) -> np.ndarray:
    free = np.ones(pages, dtype=bool)
    free[np.cumsum(np.arange(1, int((2 * pages) ** 0.5) - 1))] = False
    return np.flatnonzero(free)


@pytest.mark.parametrize("freed", [every_other, ever_longer_runs])
def test_bookkeeping_stays_under_16_bytes_a_page(freed: Callable[[int], np.ndarray]) -> None:
    pages = 1 << 16
    allocator = ExtentAllocator(pages)
    taken(allocator, pages)
    allocator.free_pages(freed(pages))
    allocator.check_integrity()
    counted = allocator.stats().bookkeeping_bytes
    assert counted < 16 * pages
    index = allocator._index
    arrays = [value for value in vars(index).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) <= 13 * pages
    tables = [value for value in vars(index).values() if isinstance(value, list | dict)]
    assert len(tables) == 2
    assert all(len(table) <= (2 * pages) ** 0.5 for table in tables)


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index.free.__setitem__(3, 1 - index.free[3]),
        lambda index: index._length.__setitem__(20, 5),
        lambda index: index._heads.clear(),
        lambda index: index._sizes.append(70),
        lambda index: index._previous.__setitem__(20, 4),
        lambda index: setattr(index, "runs", 9),
    ],
)
def test_check_integrity_finds_damage(damage: Callable[[object], object]) -> None:
    allocator = ExtentAllocator(64)
    pages = taken(allocator, 64)
    allocator.free_pages(pages[20:30])
    allocator.free_pages(pages[40:50])
    allocator.check_integrity()
    damage(allocator._index)
    with pytest.raises(RuntimeError):
        allocator.check_integrity()


def test_check_integrity_finds_a_wrong_count_of_free_pages() -> None:
    allocator = ExtentAllocator(64)
    allocator._available -= 1
    with pytest.raises(RuntimeError, match="63 pages are counted as free, 64 are"):
        allocator.check_integrity()


def test_every_use_of_the_index_holds_the_lock() -> None:
    allocator = ExtentAllocator(64, 2)
    index = allocator._index

    class Guarded:
        def __getattr__(self, name: str) -> object:
            assert allocator._lock.locked(), f"{name} is used without the lock"
            return getattr(index, name)

    allocator._index = Guarded()  # type: ignore[assignment]
    held = allocator.alloc(20)
    assert held is not None
    assert allocator.free(held) == 20
    pages = taken(allocator, 5)
    assert allocator.free_pages(pages[::-1]) == 5
    with pytest.raises(ValueError, match="free already"):
        allocator.free_pages([1])
    allocator.check_integrity()
    assert allocator.stats().free_pages == 64
    allocator.clear()
    assert not allocator._lock.locked()


@pytest.mark.usefixtures("eager_switching")
def test_eight_threads_never_share_a_page_and_lose_none() -> None:
    page_size, pages = 4, 512
    allocator = ExtentAllocator(pages, page_size)
    owners = np.zeros(pages, dtype=np.int64)
    start = threading.Barrier(8)
    problems: list[BaseException] = []

    def work(name: int) -> None:
        generator = random.Random()
        held: list[torch.Tensor] = []
        try:
            start.wait()
            for _ in range(300):
                if held and generator.random() < 0.5:
                    indices = held.pop(generator.randrange(len(held)))
                    mine = indices[::page_size].numpy() // page_size
                    assert (owners[mine] == name).all()
                    owners[mine] = 0
                    assert allocator.free(indices) == len(indices)
                else:
                    indices = allocator.alloc(generator.randint(1, 40) * page_size)
                    if indices is not None:
                        mine = indices[::page_size].numpy() // page_size
                        assert (owners[mine] == 0).all()
                        owners[mine] = name
                        held.append(indices)
            for indices in held:
                owners[indices[::page_size].numpy() // page_size] = 0
                allocator.free(indices)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    allocator.check_integrity()
    assert allocator.available_pages == pages
    assert allocator.stats().free_runs == 1


@pytest.mark.usefixtures("eager_switching")
def test_one_of_eight_threads_wins_the_free_of_the_same_pages() -> None:
    allocator = ExtentAllocator(4096)
    for _ in range(30):
        pages = taken(allocator, 4096)[::2].copy()
        start = threading.Barrier(8)
        outcomes: list[bool] = []

        def give(pages: np.ndarray = pages, start: threading.Barrier = start, outcomes: list[bool] = outcomes) -> None:
            start.wait()
            try:
                allocator.free_pages(pages)
            except ValueError:
                outcomes.append(False)
            else:
                outcomes.append(True)

        threads = [threading.Thread(target=give) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == [False] * 7 + [True]
        allocator.check_integrity()
        allocator.clear()
