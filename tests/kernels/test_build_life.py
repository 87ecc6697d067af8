"""A process that ends while it builds leaves no compiler, no lock, no half module and no directory."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.kernels.workshop import Workshop, add, in_child

from hicache_kernels import scratch

BUILDER = """
import os
import signal
import sys
from pathlib import Path
from hicache_kernels.probe import ModuleLoader
from hicache_kernels.spec import module_specs

loader = ModuleLoader(module_specs(Path(sys.argv[1])), cache=Path(sys.argv[2]))
assert loader.outcome_so_far("main", "cpu") is None
for line in sys.stdin:  # each asks for a forked process that lives on
    child = os.fork()
    if not child:
        signal.pause()
    print(child, flush=True)
"""
# A compiler that has a process of its own, as g++ and cc1plus, hangs, and ends for SIGKILL only.
HANGING = """#!/bin/sh
case "$*" in *--version*) echo 1; exit;; esac
trap '' TERM
sh -c 'read line < {release}' &
echo $$ $! $TMPDIR > {started}
wait
"""


@pytest.mark.parametrize("end", ["exit", "SIGTERM", "SIGKILL"])
def test_a_process_that_ends_while_it_builds_leaves_no_compiler_and_no_directory(workshop: Workshop, end: str) -> None:
    for pipe in (workshop.started, workshop.release):
        os.mkfifo(pipe)
    loading = workshop.compiler.read_text()
    workshop.compiler.write_text(HANGING.format(started=workshop.started, release=workshop.release))
    temporary = Path(tempfile.gettempdir())
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, workshop.csrc, workshop.cache],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
    )
    *processes, directory = workshop.started.read_text().split()
    assert Path(directory).parent == temporary  # so what the compiler leaves is removed with it
    watches = [os.pidfd_open(int(process)) for process in processes]
    if end != "exit":
        builder.send_signal(getattr(signal, end))
    builder.communicate(timeout=60)
    assert builder.returncode == {"exit": 0, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}[end]
    for watch in watches:
        ended, _, _ = select.select([watch], [], [], 60)
        os.close(watch)
        assert ended, "a compiler still runs"
    assert list(temporary.iterdir()) == []
    assert workshop.libraries() == []
    workshop.compiler.write_text(loading)
    assert add(workshop.loader(), 1) == 2


def test_a_forked_process_does_not_keep_the_compiler_of_a_killed_one_alive(workshop: Workshop) -> None:
    for pipe in (workshop.started, workshop.release):
        os.mkfifo(pipe)
    workshop.compiler.write_text(HANGING.format(started=workshop.started, release=workshop.release))
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, workshop.csrc, workshop.cache],
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert builder.stdin is not None
    assert builder.stdout is not None
    watch = os.pidfd_open(int(workshop.started.read_text().split()[0]))
    print("fork", file=builder.stdin, flush=True)
    child = int(builder.stdout.readline())
    try:
        builder.kill()
        builder.wait(60)
        ended, _, _ = select.select([watch], [], [], 60)
        assert ended, "a compiler still runs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(watch)


def test_a_build_removes_directories_of_dead_builders_and_leaves_those_of_live_ones() -> None:
    def die() -> None:
        with scratch.scratch_directory() as directory:
            (directory / "half.so").write_bytes(b"half")
            os._exit(0)

    in_child(die).join()
    (left,) = Path(tempfile.gettempdir()).iterdir()
    with scratch.scratch_directory() as first:
        assert not left.exists()
        with scratch.scratch_directory() as second:
            assert sorted(Path(tempfile.gettempdir()).iterdir()) == sorted([first, second])
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
