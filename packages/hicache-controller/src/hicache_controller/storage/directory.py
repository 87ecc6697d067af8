"""The directory of the file backend: who may be in it, where a page lies, and what is there.

``pages/xx/`` hold one file a page and pool, and beside them what is being written, under names that carry the writer's
id. ``writers/`` has one file a process, which that process keeps locked: a writer whose lock can be taken is dead,
whatever its process id was, and only what dead writers began is removed. ``lock``, entered through ``gate``, orders
storing (shared) against evicting (exclusive), among threads and processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import time
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from .page_file import read_parent

_BLOCK = 4096
_LOCK_SECONDS = 10.0
_NAME = re.compile(r"([0-9a-f]{2,64})-([0-9a-f]{16})-([A-Za-z0-9_]{1,64}-[0-9a-f]{8})")
_TEMPORARY = re.compile(r"\.([0-9a-f]{32})-[0-9]+-[0-9]+")


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
    """One process's place in a storage directory; making it creates what is missing.

    Raises
    ------
    OSError
        Where the directory cannot be created or written, or holds other files and no storage.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._pages = os.path.join(root, "pages")
        self._writers = os.path.join(root, "writers")
        self._lock_path = os.path.join(root, "lock")
        self._gate_path = os.path.join(root, "gate")
        if os.path.isdir(root) and not os.path.isdir(self._pages) and os.listdir(root):
            raise OSError(errno.ENOTEMPTY, "holds other files and no storage", root)
        for directory in (root, self._writers, self._pages, *(self._shard(i) for i in range(256))):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        self._count = itertools.count()
        self._writer, self._live = self._enter()

    def close(self) -> None:
        """Leave; nothing is raised where the directory is gone."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._writers, self._writer))
        os.close(self._live)

    def page_path(self, page: bytes, part: str) -> str:
        """Path of a page's part; ``page`` is the key and 8 bytes of fingerprint, hex digits keep it inside."""
        name = page.hex()
        return f"{self._pages}/{name[-18:-16]}/{name[:-16]}-{name[-16:]}-{part}"

    def temporary_path(self, path: str) -> str:
        """Return a name beside ``path`` that no other thread or process writes to."""
        return f"{os.path.dirname(path)}/.{self._writer}-{os.getpid()}-{next(self._count)}"

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
        return len(os.listdir(self._writers)) - 1, os.stat(self._writers).st_mtime_ns

    def remove_dead(self) -> None:
        """Take the dead off the list of writers."""
        for name in os.listdir(self._writers):
            if name == self._writer:
                continue
            path = os.path.join(self._writers, name)
            with contextlib.suppress(OSError):  # another process removes it, or it lives and holds its lock
                live = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(live, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(live)

    def names(self) -> Iterator[tuple[str, bytes, str]]:
        """Yield path, page and part of every file that has a page's name, and remove what dead writers began."""
        begun = []
        for shard in range(256):
            directory = self._shard(shard)
            with contextlib.suppress(FileNotFoundError):
                for name in os.listdir(directory):
                    match = _NAME.fullmatch(name)
                    if match and len(match[1]) % 2 == 0:
                        yield f"{directory}/{name}", bytes.fromhex(match[1] + match[2]), match[3]
                    elif match := _TEMPORARY.fullmatch(name):
                        begun.append((f"{directory}/{name}", match[1]))
        if begun:
            # Writers enter the list before they write: whose file was seen above and who is not listed now has left.
            self.remove_dead()
            listed = set(os.listdir(self._writers))
            for path, writer in begun:
                if writer not in listed:
                    with contextlib.suppress(OSError):
                        os.unlink(path)

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

    def _enter(self) -> tuple[str, int]:
        """Put a locked file on the list of writers; return its name and the descriptor that holds the lock."""
        while True:
            writer = uuid.uuid4().hex
            new, path = (os.path.join(self._writers, prefix + writer) for prefix in (".", ""))
            live = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # It gets its name once it is locked; until then another process may take it for dead and remove it.
                fcntl.flock(live, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(new, path)
                return writer, live
            except (BlockingIOError, FileNotFoundError):
                os.close(live)

    def _shard(self, number: int) -> str:
        return f"{self._pages}/{number:02x}"


def file_size(path: str) -> int | None:
    """Return the bytes of a file, or None where there is none that can be seen."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return None


def last_use(path: str) -> int:
    """Return when a file was last used, in nanoseconds since the epoch; 0 where there is none."""
    try:
        return os.stat(path, follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0


def renew(path: str) -> None:
    """Note that a file is used now."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def remove_file(path: str) -> bool:
    """Remove a file; return whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


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
