"""Many files read in one call: every byte in its place, what is no such file reported, and the GIL free meanwhile."""

import ctypes
import errno
import os
import random
import stat
import subprocess
import sys
import weakref
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import needs
from tests.gil import Counting

from hicache_kernels import files
from hicache_kernels.build import compile_module, target_archs
from hicache_kernels.files import Checksum, read_files
from hicache_kernels.spec import module_specs

GUARD = 64


@pytest.fixture
def entry(compiled):
    """The compiled function itself."""
    return compiled("files")["read_files"]


@pytest.fixture(scope="module")
def adler(compiled, cpu_compiler, tmp_path_factory):
    """Functions of a checksum whose halves are those of Adler-32, and the library that counts its states."""
    compiled("files")
    library = tmp_path_factory.mktemp("checksum") / "checksum.so"
    source = Path(__file__).parent / "checksum.cc"
    command = [cpu_compiler.path, "-O2", "-fPIC", "-shared", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    functions = ctypes.CDLL(str(library))
    names = [f"checksum_{name}" for name in Checksum._fields]
    addresses = [ctypes.cast(getattr(functions, name), ctypes.c_void_p).value for name in names]
    return Checksum(*addresses), functions


class Target:
    """Memory for some bytes, cut into pieces that lie apart, with guard bytes around each."""

    def __init__(self, size, cuts):
        ends = [*sorted(random.choices(range(size + 1), k=cuts)), size]
        sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.memory = memoryview(bytearray(os.urandom(sum(sizes) + GUARD * (len(sizes) + 1))))
        starts = np.cumsum([GUARD, *(size + GUARD for size in sizes[:-1])])
        self.views = [self.memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        random.shuffle(self.views)
        self.before = bytes(self.memory)

    def bytes(self):
        return b"".join(self.views)

    def fill(self, content):
        """The memory as reading ``content`` has to leave it."""
        wanted = memoryview(bytearray(self.before))
        for view in self.views:
            start = np.frombuffer(view, np.uint8).ctypes.data - np.frombuffer(self.memory, np.uint8).ctypes.data
            wanted[start : start + len(view)], content = content[: len(view)], content[len(view) :]
        return bytes(wanted)


def written(path, size):
    path.write_bytes(os.urandom(size))
    return path


def drop(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dropped", [False, True])
def test_every_byte_comes_to_its_place_and_no_other_is_touched(tmp_path, dropped, threads):
    sizes = [0, 1, 4096, 70_001, 700_000, *(random.randrange(200_000) for _ in range(10))]
    paths = [written(tmp_path / f"{i} ä", size) for i, size in enumerate(sizes)]
    # More pieces than Linux takes in a call, and a first one that is shorter than the first read.
    targets = [Target(size, random.choice([0, 1, 5, 3000])) for size in sizes]
    if dropped:
        for path in paths:
            drop(path)
    found = read_files([str(path) for path in paths], [target.views for target in targets], threads=threads)
    for path, size, target, file in zip(paths, sizes, targets, found, strict=True):
        assert target.memory == target.fill(path.read_bytes())
        status = path.stat()
        assert file == (0, size, status.st_mode, os.geteuid(), size, status.st_mtime_ns, 0, 0)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("unchecked", [0, 16, 5000])
def test_the_checksum_is_that_of_the_bytes_without_their_end(adler, tmp_path, threads, unchecked):
    checksum, functions = adler
    sizes = [0, 16, 17, 4096, 70_001, 256 << 10, 700_000, *(random.randrange(200_000) for _ in range(5))]
    paths = [written(tmp_path / str(i), size) for i, size in enumerate(sizes)]
    targets = [Target(size, random.choice([0, 1, 5, 3000])) for size in sizes]
    found = read_files(
        [str(path) for path in paths],
        [target.views for target in targets],
        threads=threads,
        checksum=checksum,
        unchecked=unchecked,
    )
    for size, target, file in zip(sizes, targets, found, strict=True):
        assert file.high << 16 | file.low == zlib.adler32(target.bytes()[: max(0, size - unchecked)])
    assert functions.checksum_states() == 0


@pytest.mark.parametrize(("count", "threads", "at_once"), [(20, 1, 1), (20, 4, 4), (3, 8, 3)])
def test_so_many_threads_read_at_once(adler, tmp_path, count, threads, at_once):
    checksum, functions = adler
    path, targets = str(written(tmp_path / "page", 100)), [Target(100, 0) for _ in range(count)]
    functions.checksum_await(at_once)  # of several, none is the caller's
    read_files([path] * count, [target.views for target in targets], threads=threads, checksum=checksum)
    assert functions.checksum_threads() == at_once
    assert functions.checksum_states() == 0


def test_all_work_is_done_where_memory_for_threads_runs_out(tmp_path, cpu_compiler):
    source, program = Path(__file__).parent / "run_in_threads.cc", tmp_path / "program"
    headers = Path(files.__file__).parent / "csrc" / "files"
    command = [cpu_compiler.path, "-std=c++17", "-O1", "-pthread", f"-I{headers}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "100 failed\n" * 4 + "100 all\n"), done.stderr


@pytest.mark.usefixtures("entry")
def test_what_is_not_a_file_of_that_size_is_reported_and_not_read(tmp_path):
    good = written(tmp_path / "good", 1000)
    os.mkfifo(tmp_path / "pipe")  # without a writer a read would not end
    (tmp_path / "link").symlink_to(good)
    written(tmp_path / "short", 999)
    written(tmp_path / "long", 1001)
    names = ["missing", "pipe", "link", "short", "long", "", "good"]
    targets = [Target(1000, 3) for _ in names]
    found = read_files([str(tmp_path / name) for name in names], [target.views for target in targets])
    assert [file.error for file in found] == [errno.ENOENT, 0, errno.ELOOP, 0, 0, 0, 0]
    assert [file.bytes for file in found] == [0, 0, 0, 0, 0, 0, 1000]
    assert [stat.S_ISREG(file.mode) for file in found] == [False, False, False, True, True, False, True]
    assert [file.size for file in found[3:5]] == [999, 1001]
    assert all(target.memory == target.before for target in targets[:-1])
    assert targets[-1].bytes() == good.read_bytes()


@pytest.mark.parametrize("size", [1000, 100_000])
def test_a_read_that_fails_is_reported_and_the_next_file_is_read(entry, tmp_path, size):
    path, memory = written(tmp_path / "page", size), np.zeros(size, np.uint8)
    found = np.empty((2, 8), np.int64)
    nowhere = 8  # nothing is ever mapped there
    pieces = np.array([(0, nowhere, size), (1, memory.ctypes.data, size)])
    entry(2 * (os.fsencode(path) + b"\0"), pieces, np.zeros(5, np.int64), 0, 1, found)
    assert found[:, :2].tolist() == [[errno.EFAULT, 0], [0, size]]
    assert bytes(memory) == path.read_bytes()


@pytest.mark.usefixtures("entry")
def test_a_file_that_ends_before_its_size_is_reported():
    path = "/sys/kernel/uevent_seqnum"  # of some digits, and a page long by its status
    needs(os.path.isfile(path) and os.stat(path).st_size > 100, "no such file here")
    target = memoryview(bytearray(os.stat(path).st_size))
    (found,) = read_files([path], [[target]])
    assert (found.error, found.size) == (0, len(target))
    assert 0 < found.bytes < 100


@pytest.mark.usefixtures("entry")
def test_views_made_one_by_one_are_let_go(tmp_path):
    path, memory = written(tmp_path / "page", 1000), bytearray(3000)
    made = []

    def views():
        for file in range(3):
            assert not any(view() for view in made[:-2])  # at most those of the file before are alive
            places = [memoryview(memory)[1000 * file :][:400], memoryview(memory)[1000 * file + 400 :][:600]]
            made.extend(map(weakref.ref, places))
            yield places
            del places

    assert [found.bytes for found in read_files([str(path)] * 3, views())] == [1000] * 3
    assert memory == path.read_bytes() * 3


@pytest.mark.usefixtures("entry")
def test_no_descriptor_stays_open(tmp_path):
    written(tmp_path / "page", 5000)
    names = ["page", "missing", "", "page"]
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        read_files([str(tmp_path / name) for name in names], [Target(size, 2).views for size in (5000, 1, 1, 7)])
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.usefixtures("entry")
def test_wrong_arguments_are_refused_before_anything_is_read(tmp_path):
    path, target = str(written(tmp_path / "page", 1000)), Target(1000, 2)
    for views in ([target.views], iter([target.views]), iter([])):
        with pytest.raises(ValueError, match=r"views has [01] entries for 2 paths"):
            read_files([path, path], views)
    with pytest.raises(ValueError, match="views has 2 entries for 1 paths"):
        read_files([path], [target.views, []])
    with pytest.raises(ValueError, match="paths has 3 entries; it must have 2"):
        read_files([path, f"{path}\0{path}"], [target.views, target.views])
    with pytest.raises(TypeError, match="not writable"):
        read_files([path, path], [target.views, [memoryview(bytes(1000))]])
    with pytest.raises(TypeError, match="contiguous"):
        read_files([path, path], [target.views, [memoryview(bytearray(2000))[::2]]])
    with pytest.raises(ValueError, match="threads is 0; it must be 1 or more"):
        read_files([path], [target.views], threads=0)
    with pytest.raises(ValueError, match="unchecked is -1; it must be 0 or more"):
        read_files([path], [target.views], unchecked=-1)
    with pytest.raises(ValueError, match="checksum has 4 functions; it must have 0 or 5"):
        read_files([path], [target.views], checksum=Checksum(1, 2, 0, 3, 4))
    assert target.memory == target.before


def test_tables_that_do_not_fit_are_refused_before_anything_is_read(entry, tmp_path):
    path = os.fsencode(written(tmp_path / "page", 1000)) + b"\0"
    memory = np.frombuffer(os.urandom(1000), np.uint8).copy()
    before = bytes(memory)
    address = memory.ctypes.data

    def call(pieces, *, files=2, fields=8, dtype=np.int64):
        entry(path * 2, np.array(pieces, dtype), np.zeros(5, np.int64), 0, 1, np.zeros((files, fields), np.int64))

    whole = [[0, address, 1000]]
    for pieces, options, words in [
        (whole, {"files": 3}, "paths has 2 entries; it must have 3"),
        (whole, {"fields": 5}, "found has size 5 in dimension 1; it must be fields = 8"),
        ([[0, address]], {}, "pieces has size 2 in dimension 1; it must be fields = 3"),
        ([[0, address, -1]], {}, r"pieces\[0\] has -1 bytes; it must have 0 or more"),
        ([*whole, [2, address, 1]], {}, r"pieces\[1\] is of file 2; it must be 0 to 1"),
        ([[1, address, 1000], *whole], {}, r"pieces\[1\] is of file 0; it must be 1 to 1"),
        ([[-1, address, 1000]], {}, r"pieces\[0\] is of file -1; it must be 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            call(pieces, **options)
    with pytest.raises(TypeError, match="pieces has dtype"):
        call(whole, dtype=np.float64)
    assert bytes(memory) == before


@pytest.mark.usefixtures("entry")
def test_other_threads_run_while_files_are_read(tmp_path):
    path, target = str(written(tmp_path / "page", 4 << 20)), memoryview(bytearray(4 << 20))
    many = [path] * 50, [[target]] * 50
    kept = files._function()
    with Counting() as others:
        assert max(others.during(lambda: read_files(*many)) for _ in range(20)) > 100
        kept.release_gil = False
        try:
            assert others.during(lambda: read_files(*many)) <= 1  # the measure sees who keeps it
        finally:
            kept.release_gil = True


def test_without_a_module_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "load_module", lambda name, device_type: None)
    monkeypatch.setattr(files, "unavailable_reason", lambda name, device_type: "no g++ found")
    files._function.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"files cannot be read: no g\+\+ found"):
            read_files([str(tmp_path)], [[]])
    finally:
        files._function.cache_clear()


SANITIZED = """
import ctypes, os, sys
import numpy, tvm_ffi
read = tvm_ffi.load_module(sys.argv[1])["read_files"]
names, pieces, buffers = [], [], []
for file, size in enumerate((0, 1, 5000, 70_001, 3_000_000)):
    names.append(f"{sys.argv[2]}/{file}")
    with open(names[-1], "wb") as written:
        written.write(os.urandom(size))
    while size:
        buffers.append(ctypes.create_string_buffer(min(size, 997)))
        pieces.append((file, ctypes.addressof(buffers[-1]), len(buffers[-1])))
        size -= len(buffers[-1])
names += ["/nowhere", "/"]
found = numpy.empty((len(names), 8), numpy.int64)
more = (numpy.zeros(5, numpy.int64), 0, 3, found)
read(b"".join(name.encode() + b"\\0" for name in names), numpy.array(pieces), *more)
whole = b"".join(open(name, "rb").read() for name in names[:-2])
print(b"".join(buffer.raw for buffer in buffers) == whole, found[:, 1].sum() == len(whole))
try:
    read(b"", numpy.array(pieces), *more)
except ValueError:
    print("refused")
sys.stdout.flush()
child = os.fork()  # what the sanitizer finds ends the process
if not child:
    pieces[-1] = (*pieces[-1][:2], 2 * pieces[-1][2])
    os.truncate(names[-3], 3_000_000 + pieces[-1][2] // 2)
    read(b"".join(name.encode() + b"\\0" for name in names), numpy.array(pieces), *more)
    os._exit(0)
print("found" if os.waitpid(child, 0)[1] else "missed")
"""


@pytest.mark.usefixtures("entry")
def test_nothing_is_read_or_written_out_of_bounds(tmp_path, cpu_compiler):
    runtimes = []
    for name in ("libasan.so", "libubsan.so"):
        asked = [cpu_compiler.path, f"-print-file-name={name}"]
        runtimes.append(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    needs(all(os.path.isabs(runtime) for runtime in runtimes), "the compiler has no sanitizers")
    spec = next(spec for spec in module_specs() if spec.name == "files")
    flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    # Sanitizers leave their symbols to the runtime that is loaded first.
    spec = replace(spec, flags=(*(flag for flag in spec.flags if flag != "-Wl,-z,defs"), *flags))
    library = compile_module(spec, cpu_compiler, target_archs("cpu"), tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(library), str(tmp_path)],
        env={
            **os.environ,
            "LD_PRELOAD": ":".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    # The sanitizer does see where bytes go: a piece that is too long is found.
    assert (done.returncode, done.stdout) == (0, "True True\nrefused\nfound\n"), done.stderr
    assert "AddressSanitizer" in done.stderr
