"""What the scheduler asks of storage: nothing waits for ever, nothing is lost, and no page is used by two."""

import pytest

from hicache_controller.integrations.vllm.host_blocks import BlockState, HostBlocks
from hicache_controller.integrations.vllm.storage_queue import ABSENT_SECONDS, StorageQueue, Task


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blocks() -> HostBlocks:
    return HostBlocks(8)


@pytest.fixture
def storage(blocks: HostBlocks, clock: Clock) -> StorageQueue:
    return StorageQueue(blocks, wait_seconds=2.0, clock=clock)


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 36 for number in numbers]


def states(storage: StorageQueue, *numbers: int, request: str = "r") -> list[BlockState]:
    return [storage.state(key, request) for key in keys(*numbers)]


def answer(storage: StorageQueue, *found: bool) -> list[bytes]:
    """Let the only worker answer the only job that is waiting to be taken."""
    (job,) = storage.take_jobs()
    return storage.report({job.number: [list(found)]})


MISSING, ASKED, PENDING, READY = BlockState.MISSING, BlockState.ASKED, BlockState.PENDING, BlockState.READY


def test_a_block_in_storage_is_found_fetched_and_loadable(storage, blocks):
    assert states(storage, 1, 2) == [ASKED, ASKED]
    answer(storage, True, False)
    assert states(storage, 1, 2) == [PENDING, MISSING]
    (job,) = storage.take_jobs()
    assert (job.task, job.keys, len(job.pages)) == (Task.FETCH, tuple(keys(1)), 1)
    assert states(storage, 1) == [PENDING]
    assert storage.report({job.number: [[True]]}) == keys(1)
    assert states(storage, 1) == [READY]
    assert storage.take_counts() == {"found": 1, "fetched": 1, "fetch_failed": 0}


def test_blocks_are_asked_for_once_however_often_requests_look(storage):
    for request in ("a", "b", "a"):
        states(storage, 1, 2, request=request)
    (job,) = storage.take_jobs()
    assert (job.task, job.keys, job.pages) == (Task.FIND, tuple(keys(1, 2)), ())
    states(storage, 1, 2)
    assert storage.take_jobs() == []


def test_a_block_counts_as_there_when_every_worker_has_it(blocks, clock):
    storage = StorageQueue(blocks, workers=3, clock=clock)
    states(storage, 1, 2)
    (job,) = storage.take_jobs()
    storage.report({job.number: [[True, True], [True, False]]})
    assert states(storage, 1, 2) == [ASKED, ASKED]
    storage.report({job.number: [[True, True]]})
    assert states(storage, 1, 2) == [PENDING, MISSING]


def test_a_block_that_one_worker_cannot_read_is_missing(blocks, clock):
    storage = StorageQueue(blocks, workers=2, clock=clock)
    states(storage, 1)
    (job,) = storage.take_jobs()
    storage.report({job.number: [[True], [True]]})
    states(storage, 1)
    (job,) = storage.take_jobs()
    assert storage.report({job.number: [[True], [False]]}) == []
    assert states(storage, 1) == [MISSING]
    assert blocks.free_pages == 8


def test_what_storage_lacks_is_asked_for_again_after_a_while(storage, clock):
    states(storage, 1)
    answer(storage, False)
    clock.now += ABSENT_SECONDS / 2
    assert states(storage, 1) == [MISSING]
    clock.now += ABSENT_SECONDS
    assert states(storage, 1) == [ASKED]


@pytest.mark.parametrize("while_fetching", [False, True])
def test_a_storage_that_hangs_makes_requests_compute(storage, clock, blocks, while_fetching):
    states(storage, 1)
    if while_fetching:
        answer(storage, True)
        states(storage, 1)
    (job,) = storage.take_jobs()
    assert storage.busy
    clock.now += 1.9
    assert states(storage, 1) == [PENDING if while_fetching else ASKED]
    clock.now += 0.2
    assert states(storage, 1) == [MISSING]
    assert states(storage, 1) == [MISSING]
    assert not storage.busy
    assert storage.take_counts()["late"] == 1
    storage.report({job.number: [[True]]})
    assert states(storage, 1) == [READY if while_fetching else PENDING]
    blocks.check_integrity()


def test_what_was_fetched_for_a_request_stays_until_it_is_loaded_or_ends(storage, blocks):
    states(storage, *range(8))
    answer(storage, *[True] * 8)
    states(storage, *range(8))
    answer(storage, *[True] * 8)
    assert blocks.take(keys(20)) is None
    storage.release("other")
    assert blocks.take(keys(20)) is None
    storage.release("r")
    assert blocks.take(keys(20)) is not None
    blocks.check_integrity()


def test_a_request_longer_than_the_host_gets_what_fits(storage):
    states(storage, *range(10))
    answer(storage, *[True] * 10)
    assert states(storage, *range(10)) == [PENDING] * 8 + [MISSING] * 2
    answer(storage, *[True] * 8)
    assert states(storage, *range(10)) == [READY] * 8 + [MISSING] * 2


def test_a_failed_fetch_takes_no_pin_of_a_later_block_of_the_same_key(storage, blocks):
    states(storage, 1)
    answer(storage, True)
    states(storage, 1)
    answer(storage, False)
    blocks.take(keys(1))
    blocks.finish(keys(1))
    blocks.pin(keys(1))
    storage.release("r")
    assert blocks.take(keys(*range(2, 10))) is None  # its own pin holds it


def test_stored_blocks_stay_on_the_host_until_storage_has_them(storage, blocks):
    blocks.take(keys(1, 2))
    storage.backup(blocks.finish(keys(1, 2)))
    (job,) = storage.take_jobs()
    assert (job.task, job.keys) == (Task.BACKUP, tuple(keys(1, 2)))
    assert blocks.take(keys(*range(3, 11))) is None
    storage.report({job.number: [[True, False]]})
    assert blocks.take(keys(*range(3, 11))) is not None
    assert storage.take_counts() == {"stored": 1, "store_failed": 1}


def test_too_many_blocks_for_a_slow_storage_stay_on_the_host_alone(storage, blocks):
    blocks.take(keys(*range(4)))
    storage.backup(blocks.finish(keys(*range(4))))
    (job,) = storage.take_jobs()
    assert len(job.keys) == 2  # a quarter of the pages
    assert storage.take_counts() == {"not_stored": 2}


def test_a_reset_finds_nothing_stored_before_and_frees_every_page_in_the_end(storage, blocks):
    blocks.take(keys(1, 2))
    storage.backup(blocks.finish(keys(1, 2)))
    (backup,) = storage.take_jobs()
    states(storage, 3)
    (find,) = storage.take_jobs()
    storage.report({find.number: [[True]]})
    states(storage, 3)
    (fetch,) = storage.take_jobs()
    storage.reset()
    assert blocks.free_pages == 5
    assert storage.report({backup.number: [[True, True]], fetch.number: [[True]]}) == []
    assert blocks.free_pages == 8
    assert states(storage, 1, 3) == [ASKED, ASKED]
    (job,) = storage.take_jobs()
    assert all(key not in keys(1, 2, 3) for key in job.keys)
    blocks.check_integrity()
