"""Directories and files that only this user and root can have written: made so, and checked before use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedPathError(PermissionError):
    """Another user may have written what lies at a path; the message names it and says why."""


def check_status(path: Path, status: os.stat_result, *, link: bool = False) -> None:
    """Check who owns what lies at ``path`` and who may write it; a symbolic link cannot be written.

    Raises
    ------
    UntrustedPathError
        Where that is another user than this one and root.
    """
    if status.st_uid not in (os.geteuid(), 0):
        raise UntrustedPathError(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} or root")
    if not link and status.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise UntrustedPathError(f"{path} has mode {mode:04o}; group and others must not be able to write it")


def open_directory(path: Path) -> int:
    """Open a directory and check it; the descriptor is the caller's to close.

    The path itself may be a symbolic link of this user or root. What the descriptor shows cannot be exchanged later.

    Raises
    ------
    UntrustedPathError
        Where another user owns it or may write it.
    OSError
        Where there is none.
    """
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode):
        check_status(path, link, link=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_status(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path, flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """Open a regular file, no symbolic link, and check it; one that ``flags`` create has mode 0600.

    Parameters
    ----------
    path
        The file.
    flags
        As of ``os.open``.
    directory
        Descriptor of the file's directory, in which it is then looked up.

    Raises
    ------
    UntrustedPathError
        Where it is something else, or another user owns it or may write it.
    OSError
        Where it cannot be opened.
    """
    name = path if directory is None else path.name
    status = os.stat(name, dir_fd=directory, follow_symlinks=False) if not flags & os.O_CREAT else None
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise UntrustedPathError(f"{path} is not a regular file")
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedPathError(f"{path} is not a regular file")
        if flags & os.O_CREAT and status.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
        check_status(path, status if not flags & os.O_CREAT else os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_directory(path: Path) -> None:
    """Make a directory, and the missing ones above it, with mode 0700 whatever the umask; one that is there is left.

    Raises
    ------
    OSError
        Where it cannot be made, or something else lies there.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir(0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(0o700)


def read_text(path: Path) -> str:
    """Read a file of a directory, both checked.

    Raises
    ------
    UntrustedPathError
        Where another user owns one of them or may write it.
    OSError
        Where it cannot be read.
    """
    directory = open_directory(path.parent)
    try:
        with open(open_file(path, directory=directory), encoding="utf-8") as file:
            return file.read()
    finally:
        os.close(directory)
