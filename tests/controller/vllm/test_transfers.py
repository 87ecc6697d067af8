"""A worker's transfers and storage, over tensors as an engine has them: bytes come back, failures are named."""

import threading

import numpy as np
import pytest
import torch

from hicache_controller.integrations.vllm.storage_queue import StorageJob, Task
from hicache_controller.integrations.vllm.transfers import BlockTransfers, Finished
from hicache_controller.integrations.vllm.worker_storage import WorkerStorage
from hicache_controller.storage import FileStorage, Fingerprint, HiCacheStorage
from hicache_controller.storage.contract import FaultyStorage

BLOCKS, PAGES = 16, 8


def filled(tensor: torch.Tensor) -> torch.Tensor:
    data = np.random.default_rng().bytes(tensor.untyped_storage().nbytes())
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).copy_(
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )
    return tensor


def apart() -> list[torch.Tensor]:
    return [filled(torch.zeros(BLOCKS, 256, dtype=torch.uint8)) for _ in range(3)]


def packed() -> list[torch.Tensor]:
    """All layers of a block lie together, with padding behind."""
    whole = filled(torch.zeros(BLOCKS, 1024, dtype=torch.uint8))
    return [whole[:, start : start + 256] for start in (0, 256, 512)]


def of_two_sizes() -> list[torch.Tensor]:
    sizes = (256, 64, 256, 64, 64)
    return [filled(torch.zeros(BLOCKS, size, dtype=torch.uint8)) for size in sizes]


def wait(transfers: BlockTransfers) -> list[Finished]:
    finished: list[Finished] = []
    while transfers._running:
        transfers.order_after(list(transfers._running))
        finished += transfers.finished()
    return finished


@pytest.mark.parametrize("make", [apart, packed, of_two_sizes])
def test_blocks_come_back_to_other_places(make):
    tensors = make()
    transfers = BlockTransfers(tensors, PAGES)
    assert transfers.block_bytes == sum(tensor.shape[1] for tensor in tensors)
    blocks, others, pages = torch.tensor([3, 0, 15]), torch.tensor([1, 8, 2]), torch.tensor([7, 1, 0])
    before = [tensor[blocks].clone() for tensor in tensors]
    transfers.store(1, blocks, pages)
    (stored,) = wait(transfers)
    assert (stored.number, stored.is_load, stored.nbytes, stored.error) == (1, False, 3 * transfers.block_bytes, None)
    for tensor in tensors:
        tensor.fill_(0x7F)
    transfers.load(2, others, pages)
    (loaded,) = wait(transfers)
    assert (loaded.number, loaded.is_load) == (2, True)
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor[others], expected)
        assert (tensor[torch.tensor([0, 3, 15])] == 0x7F).all()
    transfers.close()
    transfers.close()


def test_tensors_of_several_sizes_have_a_pool_each_with_names_that_storage_accepts():
    transfers = BlockTransfers(of_two_sizes(), PAGES)
    assert [(pool.name, pool.host.layer_num) for pool in transfers.pools] == [("kv", 2), ("kv1", 3)]
    transfers.close()


def test_a_load_follows_the_store_of_its_pages_and_a_store_the_load_of_its_blocks():
    tensors = apart()
    transfers = BlockTransfers(tensors, PAGES)
    pages = torch.arange(4)
    expected = [tensor[:4].clone() for tensor in tensors]
    transfers.store(1, pages, pages)
    transfers.load(2, pages + 4, pages)
    transfers.store(3, pages + 4, pages + 4)
    transfers.load(4, pages + 8, pages + 4)
    assert [each.error for each in wait(transfers)] == [None] * 4
    for tensor, rows in zip(tensors, expected, strict=True):
        assert torch.equal(tensor[8:12], rows)
    transfers.close()


def test_a_transfer_that_fails_says_which_pages_and_blocks_it_was_to_move():
    transfers = BlockTransfers(apart(), PAGES)
    transfers.load(1, torch.tensor([2, 3]), torch.tensor([0, PAGES]))
    (failed,) = wait(transfers)
    assert isinstance(failed.error, IndexError)
    assert (failed.blocks.tolist(), failed.pages.tolist()) == ([2, 3], [0, PAGES])
    transfers.close()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "tensors is empty"),
        ([torch.zeros(4, 8)], r"tensors\[0\] is torch.float32"),
        ([torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(5, 8, dtype=torch.uint8)], r"tensors\[1\] .* 4 blocks"),
    ],
)
def test_tensors_that_are_not_blocks_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        BlockTransfers(tensors, PAGES)


@pytest.mark.parametrize(("first", "second"), [((4, 16), (4, 8)), ((4, 16), (4, 16)), ((8, 8), (4, 16))])
def test_tensors_that_share_bytes_are_refused(first, second):
    memory = torch.zeros(64, dtype=torch.uint8)
    views = [memory[: rows * width].view(rows, width) for rows, width in (first, second)]
    with pytest.raises(ValueError, match=r"lie over each other|blocks"):
        BlockTransfers(views, PAGES)


def test_rows_that_reach_into_the_next_block_are_refused():
    memory = torch.zeros(4, 32, dtype=torch.uint8)
    shifted = memory.flatten()[24:120].as_strided((3, 16), (32, 1), 24)
    with pytest.raises(ValueError, match="lie over each other"):
        BlockTransfers([memory[:3, :16], shifted], PAGES)


class Stored:
    """Transfers with a storage, and three blocks that were stored on pages 0 to 2."""

    def __init__(self, storage: HiCacheStorage, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.transfers = BlockTransfers(tensors, PAGES)
        self.storage = WorkerStorage(storage, self.transfers.pools)
        self.keys = tuple(bytes([number]) * 36 for number in range(3))
        self.transfers.store(1, torch.arange(3), torch.arange(3))
        wait(self.transfers)

    def run(self, number: int, task: Task, *pages: int) -> list[bool]:
        self.storage.submit(StorageJob(number, task, self.keys, pages))
        while not (answers := self.storage.answers()):
            threading.Event().wait(0.001)
        return answers[number]

    def close(self) -> None:
        assert self.storage.close(10)
        self.transfers.close()


def file_storage(directory) -> FileStorage:
    return FileStorage(directory, fingerprint=Fingerprint("model", revision="1"))


@pytest.mark.parametrize("make", [apart, of_two_sizes])
def test_blocks_come_back_from_storage_in_another_worker(tmp_path, make):
    stored = Stored(file_storage(tmp_path), make())
    assert stored.run(1, Task.FIND) == [False] * 3
    assert stored.run(2, Task.BACKUP, 0, 1, 2) == [True] * 3
    expected = [tensor[:3].clone() for tensor in stored.tensors]
    stored.close()

    again = Stored(file_storage(tmp_path), make())
    assert again.run(1, Task.FIND) == [True] * 3
    assert again.run(2, Task.FETCH, 5, 7, 6) == [True] * 3
    again.transfers.load(2, torch.tensor([4, 5, 6]), torch.tensor([5, 7, 6]))
    wait(again.transfers)
    for tensor, rows in zip(again.tensors, expected, strict=True):
        assert torch.equal(tensor[4:7], rows)
    again.close()


def test_a_damaged_block_is_not_there(tmp_path):
    stored = Stored(FaultyStorage(file_storage(tmp_path), flip_every=2), apart())
    stored.run(1, Task.BACKUP, 0, 1, 2)
    assert stored.run(2, Task.FETCH, 3, 4, 5) == [True, False, True]
    stored.close()


def test_a_block_is_there_when_every_pool_has_its_part(tmp_path):
    storage = file_storage(tmp_path)
    stored = Stored(storage, of_two_sizes())
    stored.run(1, Task.BACKUP, 0, 1, 2)
    (tmp_path / storage.page_path(stored.keys[1], "kv1")).unlink()
    assert stored.run(2, Task.FIND) == [True, False, True]
    stored.close()


def test_a_storage_that_raises_has_nothing(tmp_path, monkeypatch, caplog):
    storage = file_storage(tmp_path)
    stored = Stored(storage, apart())
    monkeypatch.setattr(storage, "load_pages", lambda *_: 1 / 0)
    assert stored.run(1, Task.FETCH, 0, 1, 2) == [False] * 3
    assert "division by zero" in caplog.text
    stored.close()


def test_closing_does_not_wait_for_a_storage_that_hangs(tmp_path):
    free = threading.Event()
    stored = Stored(FaultyStorage(file_storage(tmp_path), hang=free), apart())
    stored.storage.submit(StorageJob(1, Task.FIND, stored.keys))
    assert not stored.storage.close(0.05)
    free.set()
