"""The directory of the file backend: who may be in it, where a page lies, and what is there.

``pages/xx/`` hold one file a page and pool; ``tmp/<writer>/`` holds the files one process is writing, and ``live``,
which that process keeps locked: a writer whose lock can be taken is dead, whatever its process id was, and only then
are its files removed. ``lock``, entered through ``gate``, orders storing (shared) against evicting
(exclusive), among threads and processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from .page_file import read_parent

_BLOCK = 4096
_LOCK_SECONDS = 10.0
_NAME = re.compile(r"([0-9a-f]{2,64})-([0-9a-f]{16})-([A-Za-z0-9_]{1,64}-[0-9a-f]{8})")


class StoredPart(NamedTuple):
    """One file found: the page it belongs to (key and fingerprint), the part it is, and what the file says."""

    page: bytes
    part: str
    size: int
    touched: int
    parent: bytes | None


def disk_bytes(size: int) -> int:
    """Bytes a file of ``size`` bytes takes on disk, counted in blocks of 4 KiB."""
    return -(-size // _BLOCK) * _BLOCK


class StorageDirectory:
    """One process's place in a storage directory; making it creates what is missing and clears up after the dead.

    Raises
    ------
    OSError
        Where the directory cannot be created or written.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._pages = os.path.join(root, "pages")
        self._tmp = os.path.join(root, "tmp")
        self._lock_path = os.path.join(root, "lock")
        self._gate_path = os.path.join(root, "gate")
        for directory in (root, self._tmp, self._pages, *(self._shard(i) for i in range(256))):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        self._writer = uuid.uuid4().hex
        self._mine = os.path.join(self._tmp, self._writer)
        self._count = 0
        self._count_lock = threading.Lock()
        with self.locked(exclusive=True):
            self.remove_dead()
            os.mkdir(self._mine, 0o700)
            self._live = os.open(os.path.join(self._mine, "live"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._live, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Leave: remove this process's temporary files. Nothing is raised where the directory is gone."""
        shutil.rmtree(self._mine, ignore_errors=True)
        os.close(self._live)

    def page_path(self, page: bytes, part: str) -> str:
        """Path of a page's part; ``page`` is the key and 8 bytes of fingerprint, hex digits keep it inside."""
        name = page.hex()
        return f"{self._pages}/{name[-18:-16]}/{name[:-16]}-{name[-16:]}-{part}"

    def temporary_path(self) -> str:
        """Return a path that no other thread or process writes to."""
        with self._count_lock:
            self._count += 1
            return f"{self._mine}/{os.getpid()}-{self._count}"

    @contextlib.contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the directory's lock.

        Raises
        ------
        TimeoutError
            Where it is not to be had within 10 seconds, such as when its holder is stopped.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        # Who waits for the exclusive lock holds the gate meanwhile, or a stream of shared holders would starve it.
        gate = _flock(self._gate_path, fcntl.LOCK_EX, deadline)
        try:
            lock = _flock(self._lock_path, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, deadline)
        finally:
            os.close(gate)
        try:
            yield
        finally:
            os.close(lock)

    def presence(self) -> tuple[int, int]:
        """Return the number of other writers (some may be dead), and a time that changes when one comes or goes."""
        return len(os.listdir(self._tmp)) - 1, os.stat(self._tmp).st_mtime_ns

    def remove_dead(self) -> None:
        """Remove what dead writers left; the exclusive lock is held."""
        for name in os.listdir(self._tmp):
            if name == self._writer:
                continue
            path = os.path.join(self._tmp, name)
            try:
                live = os.open(os.path.join(path, "live"), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:  # killed between making its directory and its lock, both under our lock
                shutil.rmtree(path, ignore_errors=True)
                continue
            except OSError:
                continue
            try:
                fcntl.flock(live, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            else:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(live)

    def names(self) -> Iterator[tuple[str, bytes, str]]:
        """Yield path, page and part of every file that has a page's name."""
        for shard in range(256):
            directory = self._shard(shard)
            with contextlib.suppress(FileNotFoundError):
                for name in os.listdir(directory):
                    match = _NAME.fullmatch(name)
                    if match and len(match[1]) % 2 == 0:
                        yield f"{directory}/{name}", bytes.fromhex(match[1] + match[2]), match[3]

    def look(self, path: str, page: bytes, part: str) -> StoredPart | None:
        """Return what a file says about itself, or None where it is gone or not readable."""
        try:
            status = os.stat(path, follow_symlinks=False)
            parent = read_parent(path, status.st_size)
        except OSError:
            return None
        return StoredPart(
            page, part, disk_bytes(status.st_size), status.st_mtime_ns, None if parent is None else parent + page[-8:]
        )

    def _shard(self, number: int) -> str:
        return f"{self._pages}/{number:02x}"


def _flock(path: str, how: int, deadline: float) -> int:
    """Open and lock a file; closing the descriptor unlocks it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    pause = 50e-6
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise TimeoutError(f"{path} is locked for more than {_LOCK_SECONDS:g} s") from None
        except BaseException:
            os.close(file)
            raise
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
