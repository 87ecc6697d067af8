"""`hicache`: what cannot work ends in one line and a code, without torch, and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import faults_of_import_orders, run_with_torch, run_within_a_gib
from typer.testing import CliRunner

from hicache_controller.tools.cli import app
from hicache_controller.tools.replay import Replay, ReplayOptions, runner
from hicache_controller.tools.trace import TraceRequest, make_trace, write_trace

SHAPE = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")
CAPACITY = ("capacity", "--gpu", "40GB", "--host", "1GB")
HUGE = "1" + 20 * "0"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, make_trace(5, seed=random.randrange(1 << 32)))
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process and those that it starts make their temporary files."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def hicache(*arguments: object, output: str | None = None) -> subprocess.CompletedProcess[str]:
    return run_with_torch("hicache_controller.tools.cli", *arguments, output=output)


# Arguments that cannot work


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("replay", "{trace}", "--no-data", "--l1-pages", "inf%"), "--l1-pages is 'inf%'; a positive number"),
        (("replay", "{trace}", "--no-data", "--l2-pages", "nan%"), "--l2-pages is 'nan%'; a positive number"),
        (("replay", "{trace}", "--l1-pages", "1e400%"), "--l1-pages is '1e400%'; a positive number"),
        (("replay", "{trace}", "--storage", "mooncake", "--mooncake-master", ""), "mooncake_master is ''; host:port"),
        (("replay", "{trace}", "--storage", "tape"), "storage backend is 'tape'; accepted are file, memory, mooncake,"),
        (("replay", "{trace}", "--storage-option", "x=1"), "storage_options has 'x' for storage 'file'; they are for"),
        (("replay", "{trace}", "--storage", "a:B", "--storage-option", "x"), "--storage-option is 'x'; NAME=VALUE is"),
        (("replay", "{trace}", "--l3-bytes", "9" * 30), "l3_bytes is 9999"),
        (("replay", "{trace}", "--l2-pages", "100000000"), "asked for "),
        (("replay", "{trace}", "--block-tokens", "1073741824"), "block_tokens is 1073741824; accepted is 1 to"),
        (("replay", "{trace}", "--layers", HUGE), f"layers is {HUGE}; accepted is 1 to 4096"),
        (("replay", "{trace}", "--window-tokens", HUGE), f"window_tokens is {HUGE}; accepted is 1 to"),
        (("replay", "{trace}", "--device", "tpu"), "--device is 'tpu'; accepted are cpu and cuda"),
        (("replay", "{trace}", "--json", "{trace}"), "--json is {trace}; that is an input"),
        (("replay", "{trace}", "--json", "/dev/null/figures"), "--json is /dev/null/figures, which cannot be written"),
        (("replay", "{trace}", "--plot", "picture.foo"), "--plot is picture.foo; a name that ends with one of"),
        (("replay", "{deep}"), "{deep}, line 1: not JSON of a sensible depth"),
        (("replay", "{long}"), "{long}, line 1: more than 16777216 bytes"),
        (("replay", "/dev/zero"), "/dev/zero: not a file"),
        (("replay", "--requests", HUGE), f"requests is {HUGE}; accepted is 1 to"),
        (("trace", "make", "{made}", "--requests", HUGE), f"requests is {HUGE}; accepted is 1 to"),
        (("trace", "make", "{made}", "--turns", "10000", "--requests", "10000"), "requests is 10000 and turns 10000"),
        (("trace", "make", "{made}", "--system-prompts", HUGE), f"system_prompts is {HUGE}; accepted is 1 to"),
        (("trace", "make", "/dev/full"), "FILE is /dev/full, which cannot be written: No space left on device"),
        (("trace", "make", "/dev/null/made"), "FILE is /dev/null/made, which cannot be written"),
        (("info", "--layers", HUGE), f"layers is {HUGE}; accepted is 1 to 4096"),
        (("info", "--layers", "1000000000"), "layers is 1000000000; accepted is 1 to 4096"),
        (("info", "--page-size", HUGE), f"page_size is {HUGE}; accepted is 1 to"),
        (("info", "--layers", "4096", "--row-bytes", "1048576"), "a page of these pools has 549755813888 bytes"),
        ((*CAPACITY, "--config", "{deep}"), "--config is {deep}; that is not JSON, or nested too deep"),
        ((*CAPACITY, "--config", "/dev/zero"), "--config is /dev/zero; at most "),
        ((*CAPACITY, "--config", "{none}"), "--config is {none}: No such file"),
        (("capacity", "--gpu", "1" + 400 * "0", *SHAPE), "size is '1000"),
        (("capacity", "--gpu", "9" * 20 + "TB", *SHAPE), "size is '99999999999999999999TB'; at most"),
        ((*CAPACITY, "--kv-heads", "8", "--head-dim", "128", "--layers", HUGE), f"layers is {HUGE}; accepted is 1 to"),
        ((*CAPACITY, *SHAPE, "--prompt-tokens", "1" + 400 * "0"), "prompt_tokens is 1000"),
        ((*CAPACITY, *SHAPE, "--bus-gb-s", "1e-300"), "bus_bytes_per_second is 1e-291; accepted is"),
        ((*CAPACITY, *SHAPE, "--json", "/dev/null/plan"), "--json is /dev/null/plan, which cannot be written"),
        (("bench", "engine", "--prompts", HUGE), f"prompts has one of {HUGE} tokens; accepted is"),
        (("bench", "engine", "--layers", HUGE), f"layers is {HUGE}; accepted is 1 to 4096"),
        (("bench", "engine", "--repeats", HUGE), f"repeats is {HUGE}; accepted is 1 to"),
        (("bench", "engine", "--json", "/dev/null/report"), "--json is /dev/null/report, which cannot be written"),
        (("replay", "two\nlines"), "two\\nlines: No such file"),
    ],
    ids=itertools.count(),
)
def test_argument_that_cannot_work_is_one_line_without_torch(
    tmp_path: Path, trace: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    places = {"trace": trace, **{name: tmp_path / name for name in ("deep", "long", "made", "none")}}
    places["deep"].write_text("[" * 200_000)
    with places["long"].open("wb") as sparse:
        sparse.truncate(1 << 32)
    run = run_within_a_gib("hicache_controller.tools.cli", *(argument.format(**places) for argument in arguments))
    assert run.returncode == 2
    assert run.stderr.startswith(f"hicache: {complaint.format(**places)}"), run.stderr[:300]
    assert run.stderr.count("\n") == 1, run.stderr[:300]
    assert not places["made"].exists()


@pytest.mark.parametrize(
    "arguments", [(), ("replay",), ("info",), ("capacity",), ("trace", "make"), ("bench", "engine")], ids=" ".join
)
def test_help_needs_no_torch(arguments: tuple[str, ...]) -> None:
    run = run_within_a_gib("hicache_controller.tools.cli", *arguments, "--help")
    assert (run.returncode, run.stderr) == (0, "")


def test_public_names_do_not_depend_on_what_was_imported_before() -> None:
    assert faults_of_import_orders("hicache_controller") == ""


def test_missing_library_of_mooncake_is_named_with_its_packages(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(f"raise ImportError({missing!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = run_within_a_gib("hicache_controller.tools.cli", "replay", trace, "--storage", "mooncake")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"hicache: Mooncake cannot be imported ({missing})")
    assert run.stderr.endswith("packages libibverbs1 librdmacm1 libnuma1\n")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("replay", "{trace}"), ("bench", "engine")], ids=" ".join)
def test_missing_matplotlib_is_named_with_its_extra_before_anything_is_measured(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = [argument.format(trace=trace) for argument in command]
    run = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "picture.png")])
    assert (run.exit_code, run.stdout) == (2, "")
    assert run.stderr == "hicache: --plot needs matplotlib: install hicache-controller[plot]\n"


# Outputs that take no more


def test_full_disk_under_the_figures_is_one_line_after_the_tables(trace: Path) -> None:
    run = hicache("replay", trace, "--no-data", "--json", "/dev/full")
    assert run.returncode == 2
    assert "Where the blocks came from" in run.stdout
    assert run.stderr == "hicache: --json is /dev/full, which cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [("replay", "{trace}", "--no-data"), ("--help",), ("replay", "--help")], ids=str)
def test_full_standard_output_is_one_line(trace: Path, temporary: Path, arguments: tuple[str, ...]) -> None:
    run = hicache(*(argument.format(trace=trace) for argument in arguments), output="/dev/full")
    assert (run.returncode, run.stderr) == (2, "hicache: standard output: No space left on device\n")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("arguments", [("replay", "{trace}"), ("--help",)], ids=str)
def test_reader_that_left_ends_a_command_with_141_and_no_word(
    trace: Path, temporary: Path, arguments: tuple[str, ...]
) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hicache_controller.tools.cli", *arguments]
    run = subprocess.run(
        [argument.format(trace=trace) for argument in command], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (141, "")
    assert list(temporary.iterdir()) == []


def test_interrupted_command_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hicache_controller.tools.cli.make_trace", interrupted)
    run = CliRunner().invoke(app, ["trace", "make", str(tmp_path / "made")])
    assert (run.exit_code, run.stderr) == (130, "hicache: interrupted\n")


# Storage backends of others

BACKEND = """
from hicache_controller.storage import MemoryStorage

class Shelf(MemoryStorage):
    def __init__(self, fingerprint, label, shelves=1):
        super().__init__()
        print("opened", fingerprint.model, label, shelves)
"""


@pytest.mark.parametrize("named", ["by class", "by entry point"])
def test_replay_runs_against_the_backend_of_another_package(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (tmp_path / "my_shelf.py").write_text(BACKEND)
    (tmp_path / "my_shelf-1.dist-info").mkdir()
    (tmp_path / "my_shelf-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-shelf\nVersion: 1\n")
    (tmp_path / "my_shelf-1.dist-info" / "entry_points.txt").write_text("[hicache.storage]\nshelf = my_shelf:Shelf\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    storage = "my_shelf:Shelf" if named == "by class" else "shelf"
    options = ("--storage-option", "label=blue", "--storage-option", "shelves=3")
    run = hicache("replay", trace, "--device", "cpu", "--storage", storage, *options)
    assert (run.returncode, run.stderr) == (0, "")
    assert "opened hicache-replay blue 3\n" in run.stdout
    for wrong, complaint in (
        (("my_shelf:Shelves",), "storage backend is 'my_shelf:Shelves'; module my_shelf has no 'Shelves'"),
        (("my_shelves:Shelf",), "storage backend is 'my_shelves:Shelf'; module my_shelves cannot be imported"),
        ((storage,), f"storage backend is {storage!r}: missing a required argument: 'label'; its options are finger"),
    ):
        run = hicache("replay", trace, "--device", "cpu", "--storage", *wrong)
        assert run.returncode == 2
        assert run.stderr.startswith(f"hicache: {complaint}")
        assert run.stderr.count("\n") == 1


# Replays that end early


def no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def no_thread(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError("budget")


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("FileStorage", no_space),
        ("build_model", no_memory),
        ("_controller", no_thread),
        ("UnifiedRadixCache", no_thread),
    ],
)
def test_replay_that_cannot_be_made_leaves_no_directory(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, part: str, fault: Callable[..., None]
) -> None:
    monkeypatch.setattr(runner, part, fault)
    with pytest.raises((OSError, MemoryError, RuntimeError)):
        Replay([TraceRequest(0, 512, 1, (1,))], ReplayOptions(l1_pages=64, l2_pages=64))
    assert list(temporary.iterdir()) == []
