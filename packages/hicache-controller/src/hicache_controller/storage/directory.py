"""The directory of the file backend: who may be in it, where a page lies, and what is there.

``pages/xx/`` hold one file a page and pool, and next to them what is being written, under names that carry the writer's
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
import stat
import time
import uuid
from collections.abc import Iterator

from .page_file import new_file

MODEL_BYTES = 8
"""What a page's name has of the fingerprint, after the key."""

_BLOCK = 4096
_LOCK_SECONDS = 10.0
_NAME = re.compile(r"([0-9a-f]{2,128})-([0-9a-f]{16})-([A-Za-z0-9_]{1,64}-[0-9a-f]{8})")
_TEMPORARY = re.compile(r"\.([0-9a-f]{32})-[0-9]+-[0-9]+")


def disk_bytes(size: int) -> int:
    """Bytes a file of ``size`` bytes takes on disk, counted in blocks of 4 KiB."""
    return -(-size // _BLOCK) * _BLOCK


class StorageDirectory:
    """One process's share of a storage directory; making it creates what is missing.

    Raises
    ------
    OSError
        Where the directory cannot be created or written, or holds other files and no storage.
    PermissionError
        Where the directory or what this class keeps in it belongs to another user than this one and root, where
        all users may write the directory, or where the group or all users may write what is in it.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._pages = os.path.join(root, "pages")
        self._writers = os.path.join(root, "writers")
        self._lock_path = os.path.join(root, "lock")
        self._gate_path = os.path.join(root, "gate")
        if os.path.isdir(root) and not os.path.isdir(self._pages) and os.listdir(root):
            raise OSError(errno.ENOTEMPTY, "holds other files and no storage", root)
        _make_directory(root)
        _check_trusted(root, os.stat(root), stat.S_IWOTH)
        for directory in (self._writers, self._pages, *(self._shard(i) for i in range(256))):
            _make_directory(directory)
            _check_trusted(directory, os.stat(directory), stat.S_IWGRP | stat.S_IWOTH)
        for lock in (self._gate_path, self._lock_path):
            os.close(_open_lock(lock))
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
        """Return a name next to ``path`` that no other thread or process writes to."""
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
                    remove_file(path)

    def _enter(self) -> tuple[str, int]:
        """Put a locked file on the list of writers; return its name and the descriptor that holds the lock."""
        while True:
            writer = uuid.uuid4().hex
            new, path = (os.path.join(self._writers, prefix + writer) for prefix in (".", ""))
            live = new_file(new)
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
    """Return the bytes of a file, or None where there is none that can be seen, or something else."""
    status = _status(path)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def is_blocked(path: str) -> bool:
    """Return whether something is at a path that is not a file, such as a directory."""
    status = _status(path)
    return status is not None and not stat.S_ISREG(status.st_mode)


def last_use(path: str) -> int:
    """Return when a file was last used, in nanoseconds since the epoch; 0 where there is none."""
    status = _status(path)
    return 0 if status is None else status.st_mtime_ns


def renew(path: str) -> None:
    """Note that a file is used now."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def remove_file(path: str) -> OSError | None:
    """Remove a file, and return why it is there still; None where it is gone, or something else is at its path."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        return None if is_blocked(path) else error
    return None


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=False)
    except OSError:
        return None


def _make_directory(path: str) -> None:
    """Make a directory, and those above it, of mode 0700 whatever the umask; one that is there stays as it is."""
    if os.path.isdir(path):
        return
    if os.path.dirname(path) != path:
        _make_directory(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)


def _check_trusted(path: str, status: os.stat_result, forbidden: int) -> None:
    """Raise ``PermissionError`` where another user than this one and root owns a path, or a mode bit lets one write."""
    if status.st_uid not in (os.geteuid(), 0):
        why = f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} or root; use a directory of your own"
        raise PermissionError(errno.EPERM, f"{why} or change the owner", path)
    if status.st_mode & forbidden:
        advice = "chmod go-w on it" if forbidden & stat.S_IWGRP else "chmod o-w on it, or use a directory in it"
        why = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so that other users can write it"
        raise PermissionError(errno.EPERM, f"{why}; run {advice}", path)


def _open_lock(path: str) -> int:
    """Open a lock file, which is made where it is missing."""
    with contextlib.suppress(FileExistsError):
        os.close(new_file(path))
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a regular file; remove it", path)
        _check_trusted(path, status, stat.S_IWGRP | stat.S_IWOTH)
    except BaseException:
        os.close(file)
        raise
    return file


def _flock(path: str, how: int, deadline: float) -> int:
    """Open and lock a file; closing the descriptor unlocks it."""
    file, pause = _open_lock(path), 50e-6
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, how | fcntl.LOCK_NB)
                return file
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is locked for more than {_LOCK_SECONDS:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
    except BaseException:
        os.close(file)
        raise
