"""What the command lines of all packages share: errors in one line, exit codes, and outputs that are checked first."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

PICTURES = (".png", ".pdf", ".svg")
MAX_LINE_BYTES = 1 << 24
MAX_FILE_BYTES = 1 << 26

output = Console()
errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


class CommandError(Exception):
    """Ends a command with one line on stderr, and with an exit code."""

    def __init__(self, message: str, code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code


class CommandGroup(TyperGroup):
    """The outermost group of a command line: whatever a command cannot do ends in one line, without a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, or print the help they ask for."""
        with _one_line_errors(self.name):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _one_line_errors(self.name):
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line_errors(program: str | None) -> Iterator[None]:
    try:
        yield
        _flush()
    except CommandError as error:
        message, code = str(error), error.code
    except (BrokenPipeError, SystemExit):  # rich ends the program where a pipe is broken
        message, code = "", BROKEN_PIPE
    except KeyboardInterrupt:
        message, code = "interrupted", INTERRUPTED
    except OSError as error:
        message, code = f"{error.filename or 'standard output'}: {error.strerror or error}", BAD_INPUT
    except (ImportError, MemoryError) as error:
        message, code = first_line(error), BAD_INPUT
    else:
        return
    try:
        if message:
            errors.print(f"{program or 'error'}: {printable(message)}")
        _flush()
    except (OSError, SystemExit):
        # What is left would fail once more at the end of the interpreter, with a message and a code of its own.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its kind where it says nothing."""
    return str(error).partition("\n")[0] or type(error).__name__


def printable(text: str) -> str:
    """Return a text with everything escaped that would break its line, or that no terminal can show."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def show(*parts: RenderableType, highlight: bool | None = None) -> None:
    """Print on standard output.

    Raises
    ------
    CommandError
        Where it takes no more, such as a full disk.
    """
    try:
        output.print(*parts, highlight=highlight)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"standard output: {error.strerror or error}") from None


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end a command in order, as Ctrl-C does: what it keeps in temporary files must not be left."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Outputs and inputs


def check_output(option: str, path: Path, *inputs: Path | None) -> None:
    """Stop before the work rather than after it where a file cannot be written; makes its directory.

    Parameters
    ----------
    option, path
        What was given.
    inputs
        Files that the command reads, which it must not write over.

    Raises
    ------
    CommandError
        Naming the option, the file and the reason.
    """
    if path.is_dir():
        raise CommandError(f"{option} is {path}, a directory; the name of a file is expected")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if any(given is not None and given.exists() and path.exists() and path.samefile(given) for given in inputs):
            raise CommandError(f"{option} is {path}; that is an input")
        if path.is_fifo():
            return  # opening it would wait for its reader
        existed = os.path.lexists(path)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
        if not existed:
            path.unlink()
    except OSError as error:
        raise unwritable(option, path, error) from None


def check_plot(path: Path, extra: str, *inputs: Path | None) -> None:
    """As :func:`check_output` for ``--plot``, and stop where no picture can be drawn.

    Parameters
    ----------
    path
        The picture.
    extra
        What to install for matplotlib, such as ``"hicache-kernels[bench]"``.
    inputs
        As there.

    Raises
    ------
    CommandError
        Naming what is wrong.
    """
    if path.suffix not in PICTURES:
        raise CommandError(f"--plot is {path}; a name that ends with one of {', '.join(PICTURES)} is expected")
    if find_spec("matplotlib") is None:
        raise CommandError(f"--plot needs matplotlib: install {extra}")
    check_output("--plot", path, *inputs)


def write_output(option: str, path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a path, and name the option where that fails.

    Raises
    ------
    CommandError
        Naming the option, the file and the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise unwritable(option, path, error) from None


def unwritable(option: str, path: Path, error: OSError) -> CommandError:
    """Name the option, the place and the reason."""
    place = "" if error.filename in (None, str(path)) else f"{error.filename}: "
    return CommandError(f"{option} is {path}, which cannot be written: {place}{error.strerror or error}")


def read_json(option: str, path: Path) -> Any:
    """Read a JSON file, which may be a pipe.

    Raises
    ------
    CommandError
        Naming the option, the file and what is wrong: it cannot be read, is too large, or is not JSON.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise CommandError(f"{option} is {path}; at most {MAX_FILE_BYTES} bytes are accepted")
        return json.loads(text)
    except OSError as error:
        raise CommandError(f"{option} is {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise CommandError(f"{option} is {path}; that is not JSON, or nested too deep") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a file with their numbers, from 1; none may fill the memory.

    Raises
    ------
    ValueError
        For what is neither a file nor a pipe, and for a line of more than :data:`MAX_LINE_BYTES`.
    OSError
        Where the file cannot be read.
    """
    if path.exists() and not (path.is_file() or path.is_fifo()):
        raise ValueError(f"{path}: not a file")
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{path}, line {number}: more than {MAX_LINE_BYTES} bytes")
            if not line:
                return
            yield number, line


# Devices


def check_device(name: str | None) -> None:
    """Stop where ``--device`` names none, without torch.

    Raises
    ------
    CommandError
        Naming what is accepted.
    """
    if name is not None and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise CommandError(f"--device is {name!r}; accepted are cpu and cuda, or cuda:1 and so on for another GPU")


def find_device(name: str | None) -> str:
    """Return the device of ``--device``, or the one to use by default: ``cuda`` where torch finds a GPU, else ``cpu``.

    Raises
    ------
    CommandError
        Where this machine has no such device.
    """
    check_device(name)
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    if name != "cpu" and int(name[5:] or 0) >= gpus:
        raise CommandError(f"--device is {name!r}, and torch sees {gpus} GPUs here")
    return name
