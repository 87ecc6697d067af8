"""FileStorage with several processes on one directory, and with writers that die at any moment."""

import importlib.util
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_controller.storage import FileStorage

PROGRAM = Path(__file__).parent / "writer_program.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("writer_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Writers:
    def __init__(self, directory):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, chains, length=8, capacity=0):
        self.process.stdin.write(f"{random.randrange(1 << 30)} {chains} {length} {capacity}\n")
        self.process.stdin.flush()

    def lines(self):
        return iter(self.process.stdout.readline, "")

    def finish(self):
        """Keys reported since the last look, once all writers have ended."""
        self.process.stdin.close()
        lines = [line.strip() for line in self.lines()]
        assert self.process.wait() == 0
        return {bytes.fromhex(line) for line in lines if not line.startswith("started")}


def page_files(directory):
    return [path for path in (directory / "pages").rglob("*") if path.is_file()]


def begun_files(directory):
    return [path for path in page_files(directory) if path.name.startswith(".")]


def check_everything(program, directory, capacity=None):
    """Every file is a whole page with the right bytes and all its ancestors; returns the keys."""
    files = page_files(directory)
    storage = FileStorage(directory, fingerprint=program.FINGERPRINT, threads=1)
    pool = program.fake_pool()
    storage.register_mem_pool_host(pool)
    keys = [bytes.fromhex(path.name.split("-")[0]) for path in page_files(directory)]
    for key in keys:
        assert storage.batch_get([key], pool.slots([0])) == [True]
        assert pool.read(0) == program.content(key)
    entries = {entry.key: entry for entry in storage._files.index}
    assert len(entries) == len(keys)
    assert all(entry.parent is None or entry.parent in entries for entry in entries.values())
    assert capacity is None or sum(path.stat().st_blocks * 512 for path in files) <= capacity
    storage.check_integrity()
    storage.close()
    return set(keys)


def test_a_directory_opens_whole_after_its_writer_was_killed_at_any_moment(tmp_path, program):
    writers = Writers(tmp_path)
    reported = set()
    for crash in range(8):
        writers.start(chains=10_000)
        wanted, seen, child = random.randrange(1, 20), 0, None
        for line in writers.lines():
            if line.startswith("started"):
                child, seen = int(line.split()[1]), 0
            else:
                reported.add(bytes.fromhex(line.strip()))
                seen += 1
            if child is not None and seen >= wanted:
                break
        while crash % 2 and not begun_files(tmp_path):  # half of them while a page is being written for sure
            pass
        kill(child)
        storage = FileStorage(tmp_path, fingerprint=program.FINGERPRINT, threads=1)
        storage.close()
        assert not begun_files(tmp_path)
    reported |= writers.finish()
    assert check_everything(program, tmp_path) >= reported
    assert not begun_files(tmp_path)
    assert os.listdir(tmp_path / "writers") == []


def kill(process):
    """Kill, and wait until the last thread is gone and with it the locks."""
    watch = os.pidfd_open(process)
    os.kill(process, signal.SIGKILL)
    select.select([watch], [], [])
    os.close(watch)


def test_what_a_living_writer_has_begun_is_left_alone(tmp_path, fingerprint):
    living = FileStorage(tmp_path, fingerprint=fingerprint)
    path = living._files.directory.temporary_path(str(tmp_path / "pages" / "00" / "x"))
    Path(path).write_bytes(b"begun")
    FileStorage(tmp_path, fingerprint=fingerprint).close()
    assert Path(path).read_bytes() == b"begun"
    living.close()
    FileStorage(tmp_path, fingerprint=fingerprint).close()
    assert not Path(path).exists()


def test_processes_share_a_directory_and_its_capacity(tmp_path, program):
    capacity = 96 * (program.PAGE_BYTES + 4096)
    writers = Writers(tmp_path)
    for _ in range(3):
        writers.start(chains=25, length=6, capacity=capacity)
    writers.finish()
    assert len(check_everything(program, tmp_path, capacity)) > 50
